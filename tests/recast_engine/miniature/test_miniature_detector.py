"""The detector: right on renders, and honest about what is not a shape."""

import random

import numpy as np
import pytest
from PIL import Image

from recast_engine.miniature import world
from recast_engine.miniature.degrade import blur, melt
from recast_engine.miniature.detector import Detection, MiniatureDetector
from recast_engine.miniature.world import render, sample_scene


def detect(image: object) -> list[Detection]:
    return MiniatureDetector()(image)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["single", "count", "relation"])
def test_renders_are_read_without_error(kind: world.Kind) -> None:
    rng = random.Random(31)
    for _ in range(150):
        scene = sample_scene(rng, kind)
        found = detect(render(scene, rng))
        shown = scene.objects if kind == "relation" else scene.objects * scene.count
        assert sorted((d.color, d.label) for d in found) == sorted(shown), scene.caption
        assert min(d.confidence for d in found) > 0.95


def test_box_and_side_of_a_known_drawing() -> None:
    pixels = np.full((48, 48, 3), 222, np.uint8)
    pixels[10:24, 5:19] = world.COLORS["blue"]
    [found] = detect(pixels)
    assert found == Detection("square", 1.0, (5.0, 10.0, 19.0, 24.0), "blue")


def test_relation_of_boxes_is_the_relation_asked_for() -> None:
    rng = random.Random(8)
    for _ in range(60):
        scene = sample_scene(rng, "relation")
        boxes = {(d.color, d.label): d.box for d in detect(render(scene, rng))}
        a, b = (boxes[thing] for thing in scene.objects)
        gap = {"above": b[1] - a[3], "below": a[1] - b[3], "left of": b[0] - a[2], "right of": a[0] - b[2]}
        assert gap[scene.relation] >= 1


def test_images_and_arrays_are_read_alike() -> None:
    image = render(sample_scene(random.Random(2), "relation"), random.Random(3))
    assert detect(image) == detect(np.asarray(image))


def test_an_empty_picture_and_a_speck_hold_nothing() -> None:
    pixels = np.full((48, 48, 3), 42, np.uint8)
    assert detect(pixels) == []
    pixels[20:23, 20:23] = world.COLORS["red"]
    assert detect(pixels) == []


@pytest.mark.parametrize("spoil", [blur, melt])
def test_confidence_falls_as_shapes_dissolve(spoil: object) -> None:
    rng, noise = random.Random(5), np.random.default_rng(5)
    images = [np.asarray(render(sample_scene(rng, "single"), rng)) for _ in range(40)]

    def mean_confidence(severity: float) -> float:
        spoilt = [spoil(image, severity, noise) for image in images]  # type: ignore[operator]
        return float(np.mean([max((d.confidence for d in detect(i)), default=0.0) for i in spoilt]))

    mild, strong = mean_confidence(0.0), mean_confidence(1.0)
    assert strong < mild - 0.03


def test_a_shape_between_circle_and_square_is_doubted() -> None:
    rows, columns = np.indices((48, 48)) - 23.5

    def superellipse(exponent: float) -> Detection:
        pixels = np.full((48, 48, 3), 222, np.uint8)
        inside = np.abs(rows / 10) ** exponent + np.abs(columns / 10) ** exponent < 1
        pixels[inside] = world.COLORS["green"]
        [found] = detect(pixels)
        return found

    assert superellipse(2).label == "circle"
    assert superellipse(40).label == "square"
    assert min(superellipse(2).confidence, superellipse(40).confidence) > 0.95
    assert superellipse(3.5).confidence < 0.7


def test_other_colours_are_no_objects() -> None:
    pixels = np.full((48, 48, 3), 42, np.uint8)
    pixels[10:30, 10:30] = (250, 60, 250)
    assert all(d.confidence < 0.3 for d in detect(pixels))


def test_a_grey_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="RGB"):
        detect(Image.new("L", (48, 48)))
