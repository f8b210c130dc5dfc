"""The world: renders repeat, captions and metadata say what the scene is."""

import random

import numpy as np
import pytest

from recast_engine.miniature import world
from recast_engine.miniature.world import Scene, every_scene, parse, render, sample_scene

KINDS = list(world.KIND_WEIGHTS)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_draw_equal_pixels(kind: world.Kind) -> None:
    images = [
        [np.asarray(render(sample_scene(rng, kind), rng)) for _ in range(8)]
        for rng in (random.Random(4), random.Random(4), random.Random(5))
    ]
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])
    assert images[0][0].shape == (48, 48, 3)
    assert images[0][0].dtype == np.uint8


def test_every_caption_is_unique_and_parses_back() -> None:
    scenes = [scene for kind in KINDS for scene in every_scene(kind)]
    assert len({scene.caption for scene in scenes}) == len(scenes) == 12 + 36 + 288 + 256
    assert [parse(scene.caption) for scene in scenes] == scenes


def test_other_captions_are_refused() -> None:
    with pytest.raises(ValueError, match="not a caption"):
        parse("a photo of a red circle on the moon")


def test_relation_metadata_follows_geneval() -> None:
    scene = Scene("relation", objects=(("red", "circle"), ("blue", "square")), relation="above")
    assert scene.caption == "a red circle above a blue square"
    assert scene.metadata() == {
        "prompt": "a red circle above a blue square",
        "tag": "position",
        "include": [
            {"class": "square", "count": 1, "color": "blue"},
            {"class": "circle", "count": 1, "color": "red", "position": ["above", 0]},
        ],
    }


def test_counting_metadata_excludes_one_more() -> None:
    scene = Scene("count", objects=(("green", "triangle"),), count=2)
    assert scene.metadata() == {
        "prompt": "two green triangles",
        "tag": "counting",
        "include": [{"class": "triangle", "count": 2, "color": "green"}],
        "exclude": [{"class": "triangle", "count": 3}],
    }


def test_single_and_text_metadata() -> None:
    assert Scene("single", objects=(("red", "circle"),)).metadata() == {
        "prompt": "a red circle",
        "tag": "colors",
        "include": [{"class": "circle", "count": 1, "color": "red"}],
    }
    scene = Scene("text", word="CAT", foreground="white", background="blue")
    assert scene.metadata() == {"prompt": 'the word "CAT" in white on blue', "tag": "text", "text": "CAT"}


def test_kinds_are_drawn_in_their_shares() -> None:
    rng = random.Random(0)
    kinds = [sample_scene(rng).kind for _ in range(4000)]
    for kind, share in world.KIND_WEIGHTS.items():
        # Four standard errors of a share at n = 4000 are at most 0.032.
        assert kinds.count(kind) / 4000 == pytest.approx(share, abs=0.032)


def test_words_show_their_two_colours() -> None:
    rng = random.Random(1)
    scene = Scene("text", word="HI", foreground="white", background="blue")
    pixels = np.asarray(render(scene, rng)).astype(int)
    assert np.abs(pixels[0, 0] - world.TEXT_BACKGROUNDS["blue"]).max() <= 6
    assert (pixels.min(axis=2) > 235).sum() > 60


def test_contact_sheet_places_images_row_by_row() -> None:
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[2] = 200
    sheet = np.asarray(world.contact_sheet(images, columns=2, scale=1))
    assert sheet.shape == (12, 12, 3)
    assert (sheet[6:10, 0:4] == 200).all()
    assert sheet[:6].max() == 0
