"""The shipped prompt sets: valid, disjoint, and what the generator writes."""

import json
from collections import Counter

import pytest

from recast_engine.miniature import SPLITS, prompt_file, reward_weights, world
from recast_engine.miniature.prompts import split_scenes


def rows(split: str) -> list[dict]:
    return [json.loads(line) for line in prompt_file(split).read_text().splitlines()]


@pytest.mark.parametrize("split", SPLITS)
def test_files_are_what_the_generator_writes(split: str) -> None:
    assert rows(split) == [scene.metadata() for scene in split_scenes()[split]]


@pytest.mark.parametrize("split", SPLITS)
def test_every_row_describes_its_prompt(split: str) -> None:
    for row in rows(split):
        assert world.parse(row["prompt"]).metadata() == row


def test_splits_are_disjoint_and_share_their_ingredients() -> None:
    prompts = {split: [row["prompt"] for row in rows(split)] for split in SPLITS}
    assert {split: len(p) for split, p in prompts.items()} == {"train": 160, "heldout": 96}
    everything = prompts["train"] + prompts["heldout"]
    assert len(set(everything)) == len(everything)
    for split in SPLITS:
        assert {row["text"] for row in rows(split) if row["tag"] == "text"} == set(world.WORDS)


def test_kinds_are_balanced_as_documented() -> None:
    tags = Counter(row["tag"] for row in rows("train"))
    assert tags == {"position": 80, "text": 48, "counting": 24, "colors": 8}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError, match="no miniature prompt split"):
        prompt_file("test")
    with pytest.raises(KeyError, match="no miniature reward"):
        reward_weights("unknown")
