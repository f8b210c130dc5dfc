"""Spelling scores by hand, and the real recogniser on renders."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from recast_engine.miniature import world
from recast_engine.prompts import Prompt
from recast_engine.rewards import ocr
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.ocr import OCR, edit_distance, similarity, text_line


@pytest.fixture(scope="module")
def reward() -> OCR:
    pytest.importorskip("rapidocr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECAST_ENGINE_THREADS", "1")
        reward = OCR()
        reward.read(np.zeros((1, 48, 48, 3), np.uint8))
    return reward


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("ab", "ba", 2),
    ],
)
def test_edit_distance_by_hand(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("CAT", "CAT", 1.0),
        ("c a t", "CAT", 1.0),
        ("ＣＡＴ", "cat", 1.0),
        ("CAR", "CAT", 2 / 3),
        ("CA", "CAT", 2 / 3),
        ("CATS", "CAT", 2 / 3),
        ("", "CAT", 0.0),
        ("XXXXXXXX", "CAT", 0.0),
        ("Hello World", "hello  world", 1.0),
    ],
)
def test_similarity_by_hand(read, target, score):
    assert similarity(read, target) == pytest.approx(score)


def test_within_a_scene_other_words_cost_nothing_once_the_target_is_there():
    assert similarity("OPEN Grand Café since 1903", "grand café", within=True) == 1.0
    assert similarity("OPEN Grand Café since 1903", "grand café") == 0.0
    assert similarity("Gramd", "Grand", within=True) == pytest.approx(0.8)


def test_the_target_may_stand_in_quotes(reward):
    rng = random.Random(13)
    scene = world.sample_scene(rng, "text")
    image = np.asarray(world.render(scene, rng))[None]
    asked = [Prompt(f"a sign that says “{scene.word}”")]
    assert reward.score(image, asked)[0] == reward.score(image, [Prompt("x", text=scene.word)])[0] > 0.6


def test_a_blank_target_is_an_error():
    with pytest.raises(ValueError, match="blank"):
        similarity("CAT", " ")


def test_threads_follow_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("RECAST_ENGINE_THREADS", raising=False)
    assert ocr.threads() == 3
    monkeypatch.setenv("RECAST_ENGINE_THREADS", "2")
    assert ocr.threads() == 2


def test_text_line_keeps_the_ink_and_the_recognisers_shape():
    image = np.full((48, 48, 3), 30, np.uint8)
    image[20:26, 8:40] = (250, 240, 10)
    line = text_line(image)
    assert line.shape[0] == 96
    assert line.shape[1] / line.shape[0] <= 128 / 48
    assert (line[..., 0] < 60).any()  # BGR: the ink is yellow, so blue is its low channel
    np.testing.assert_array_less(200, line[48, 80:90, 1:].min())


def test_words_of_the_miniature_are_read(reward):
    rng = random.Random(11)
    scenes = [world.sample_scene(rng, "text") for _ in range(48)]
    images = world.render_many(scenes, rng)
    right = reward.score(images, [Prompt(s.caption, text=s.word) for s in scenes])
    assert right.mean() > 0.97
    wrong = reward.score(images, [Prompt("x", text="WXYZ")] * 48)
    assert wrong.mean() < 0.2


def test_a_reading_does_not_depend_on_its_neighbours(reward):
    rng = random.Random(12)
    images = world.render_many([world.sample_scene(rng, "text") for _ in range(6)], rng)
    assert reward.read(images) == [reward.read(image[None])[0] for image in images]


def test_blank_and_noise_read_as_nothing(reward):
    noise = np.random.default_rng(0).integers(0, 256, (4, 48, 48, 3), dtype=np.uint8)
    blank = np.stack([np.full((48, 48, 3), level, np.uint8) for level in (0, 128, 255)])
    scores = reward.score(np.concatenate([blank, noise]), [Prompt("x", text="CAT")] * 7)
    assert np.isfinite(scores).all()
    assert scores.max() <= 1 / 3


def test_large_images_go_through_detection(reward):
    canvas = Image.new("RGB", (512, 320), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((40, 40), "GRAND", font=world.font(60), fill="black")
    draw.text((40, 180), "OPENING", font=world.font(60), fill="navy")
    score = reward.score(np.asarray(canvas)[None], [Prompt("a sign", text="Grand Opening")])
    assert score[0] > 0.9
    blank = np.full((1, 256, 256, 3), 200, np.uint8)
    assert reward.score(blank, [Prompt("a sign", text="Grand Opening")])[0] == 0.0


def test_noise_and_huge_images_score_low_without_an_exception(reward):
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 256, (1, 512, 512, 3), dtype=np.uint8)
    huge = np.full((1, 3000, 4000, 3), 180, np.uint8)
    thin = rng.integers(0, 256, (1, 300, 2, 3), dtype=np.uint8)
    for images in (noise, huge, thin):
        score = reward.score(images, [Prompt("a sign", text="Grand Opening")])
        assert 0.0 <= score[0] <= 0.25


def test_a_failing_reader_costs_one_image_and_not_a_zero(caplog):
    def reader(lines):
        if any(line.max() == 0 for line in lines):
            raise RuntimeError("broken session")
        return ["CAT"] * len(lines)

    images = np.stack([np.full((48, 48, 3), level, np.uint8) for level in (255, 0, 255)])
    with pytest.raises(PartialFailure, match=r"the text recogniser failed \(RuntimeError\)") as caught:
        OCR(line_reader=reader).score(images, [Prompt("x", text="CAT")] * 3)
    np.testing.assert_array_equal(caught.value.values, [1.0, np.nan, 1.0])
    assert "RuntimeError" in caplog.text
