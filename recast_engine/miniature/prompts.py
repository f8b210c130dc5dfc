"""Writes the miniature's prompt sets: `python -m recast_engine.miniature.prompts`.

Both sets use the same colours, shapes and words in different combinations, and no prompt is in
both. The base model has seen every caption in pretraining; "held out" is meant for the
reinforcement learning that comes after.
"""

from __future__ import annotations

import json
import random
from itertools import zip_longest

from recast_engine.miniature import SPLITS, prompt_file
from recast_engine.miniature.world import Kind, Scene, every_scene

SEED = 5
PER_KIND: dict[str, dict[Kind, int]] = {
    "train": {"single": 8, "count": 24, "relation": 80, "text": 48},
    "heldout": {"single": 4, "count": 12, "relation": 48, "text": 32},
}


def _evenly(scenes: list[Scene], rng: random.Random) -> list[Scene]:
    """Shuffled, yet any stretch holds the words, relations and numbers in nearly equal shares."""
    rng.shuffle(scenes)
    groups: dict[tuple[str, str, int], list[Scene]] = {}
    for scene in scenes:
        groups.setdefault((scene.word, scene.relation, scene.count), []).append(scene)
    rounds = zip_longest(*groups.values())
    return [scene for turn in rounds for scene in turn if scene is not None]


def split_scenes() -> dict[str, list[Scene]]:
    """Disjoint scenes of every split, a function of `SEED` alone."""
    rng = random.Random(SEED)
    splits: dict[str, list[Scene]] = {split: [] for split in SPLITS}
    for kind in PER_KIND["train"]:
        scenes = _evenly(every_scene(kind), rng)
        for split in SPLITS:
            count = PER_KIND[split][kind]
            splits[split] += scenes[:count]
            scenes = scenes[count:]
    for scenes in splits.values():
        rng.shuffle(scenes)
    return splits


def write() -> None:
    """Write one JSONL file per split into the package."""
    for split, scenes in split_scenes().items():
        path = prompt_file(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(scene.metadata()) + "\n" for scene in scenes))


if __name__ == "__main__":
    write()
