"""GenEval's rules on hand-made detections, and on renders of the miniature world."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recast_engine.miniature import world
from recast_engine.miniature.detector import MiniatureDetector
from recast_engine.prompts import Prompt
from recast_engine.rewards.geneval import GenEval, Rules, judge, relative_positions


class Found(NamedTuple):
    label: str
    confidence: float = 0.95
    box: tuple[float, float, float, float] = (0.0, 0.0, 10.0, 10.0)
    color: str = "red"


def prompt(*include: dict, exclude: tuple[dict, ...] = (), tag: str | None = None) -> Prompt:
    return Prompt("a scene", include=include, exclude=exclude, tag=tag)


def at(x: float, y: float, size: float = 10.0) -> tuple[float, float, float, float]:
    return (x - size / 2, y - size / 2, x + size / 2, y + size / 2)


ONE_CAT = {"class": "cat", "count": 1}
TWO_CATS = {"class": "cat", "count": 2}
RED_CAT = {"class": "cat", "count": 1, "color": "red"}
CAT_LEFT = {"class": "cat", "count": 1, "position": ("left of", 0)}
DOG = {"class": "dog", "count": 1}


def test_presence_needs_confidence_above_the_threshold():
    assert judge([Found("cat", 0.31)], prompt(ONE_CAT)).strict
    assert not judge([Found("cat", 0.30)], prompt(ONE_CAT)).strict
    assert not judge([Found("dog")], prompt(ONE_CAT)).strict


def test_counting_prompts_use_the_higher_threshold():
    found = [Found("cat", 0.95), Found("cat", 0.8)]
    assert judge(found, prompt(TWO_CATS)).strict
    assert judge(found, prompt(TWO_CATS, tag="counting")) == judge(found[:1], prompt(TWO_CATS))
    assert judge(found, prompt(TWO_CATS, tag="counting"), Rules(counting_threshold=0.3)).strict


def test_include_is_at_least_and_exclude_caps_it():
    three = [Found("cat")] * 3
    assert judge(three, prompt(TWO_CATS)).strict
    verdict = judge(three, prompt(TWO_CATS, exclude=({"class": "cat", "count": 3},)))
    assert not verdict.strict
    assert verdict.soft == pytest.approx((1 + (1 - 1 / 3)) / 2)


def test_at_most_sixteen_objects_of_a_class_are_kept():
    crowd = [Found("cat")] * 30
    assert judge(crowd, prompt({"class": "cat", "count": 17})).soft == pytest.approx(16 / 17)
    assert judge(crowd, prompt(ONE_CAT, exclude=({"class": "cat", "count": 17},))).strict


def test_colour_is_asked_of_the_most_confident_objects_only():
    found = [Found("cat", 0.5, color="red"), Found("cat", 0.9, color="blue")]
    assert judge(found, prompt(RED_CAT)) == judge([Found("cat", color="blue")], prompt(RED_CAT))
    assert judge(found, prompt(RED_CAT)).soft == pytest.approx(0.5)
    assert judge(found[:1], prompt(RED_CAT)).strict


def test_positions_by_hand():
    assert relative_positions(at(10, 10), at(40, 10)) == {"left of"}
    assert relative_positions(at(40, 12), at(10, 10)) == {"right of"}
    assert relative_positions(at(10, 10), at(10, 40)) == {"above"}
    assert relative_positions(at(10, 40), at(12, 10)) == {"below"}
    # Offset 30 on both axes, 2 of slack: 28 / 42.4 = 0.66 on each.
    assert relative_positions(at(10, 10), at(40, 40)) == {"left of", "above"}
    # Centres closer than the slack on both axes, 0.1 * (10 + 10) = 2.
    assert relative_positions(at(10, 10), at(12, 10)) == set()
    # 3 - 2 = 1 of a distance of 3 is not more than half.
    assert relative_positions(at(10, 10), at(13, 10)) == set()
    # 5 - 2 = 3 of 5 is.
    assert relative_positions(at(10, 10), at(15, 10)) == {"left of"}
    # Large boxes need more distance: 0.1 * (40 + 40) = 8 of 15 leaves 7 / 15.
    assert relative_positions(at(50, 50, 40), at(65, 50, 40)) == set()


def test_identical_boxes_have_no_position():
    assert relative_positions(at(5, 5), at(5, 5)) == set()


def test_position_needs_its_target():
    cat = Found("cat", box=at(10, 10))
    asked = prompt(DOG, CAT_LEFT)
    assert judge([cat, Found("dog", box=at(40, 10))], asked).strict
    wrong_side = judge([cat, Found("dog", box=at(-20, 10))], asked)
    assert not wrong_side.strict
    assert wrong_side.soft == pytest.approx(2 / 3)
    assert judge([cat], asked).soft == pytest.approx(1 / 3)
    assert judge([], asked).soft == 0.0


def test_position_holds_for_every_pair():
    cats = {"class": "cat", "count": 2, "position": ("left of", 0)}
    found = [Found("dog", box=at(40, 10)), Found("cat", box=at(10, 10)), Found("cat", box=at(70, 10))]
    verdict = judge(found, prompt(DOG, cats))
    assert not verdict.strict
    assert verdict.soft == pytest.approx((1 + 1 + 0.5) / 3)


def test_unknown_position_and_no_condition_are_errors():
    with pytest.raises(ValueError, match="unknown position"):
        judge([], prompt(DOG, {"class": "cat", "count": 1, "position": ("inside", 0)}))
    with pytest.raises(ValueError, match="no include or exclude"):
        judge([], Prompt("a scene"))


FOUND = st.builds(
    Found,
    st.sampled_from(["cat", "dog"]),
    st.floats(0, 1),
    st.builds(at, st.floats(0, 50), st.floats(0, 50), st.floats(2, 20)),
    st.sampled_from(["red", "blue"]),
)
CLAUSE = st.fixed_dictionaries(
    {"class": st.sampled_from(["cat", "dog"]), "count": st.integers(1, 3)},
    optional={
        "color": st.sampled_from(["red", "blue"]),
        "position": st.tuples(st.sampled_from(["left of", "above"]), st.just(0)),
    },
)


@given(st.lists(FOUND, max_size=6), st.lists(CLAUSE, min_size=1, max_size=3), st.lists(CLAUSE, max_size=1))
@settings(max_examples=200, deadline=None)
def test_soft_is_one_exactly_when_strict(found, include, exclude):
    verdict = judge(found, prompt(*include, exclude=tuple(exclude)))
    assert 0.0 <= verdict.soft <= 1.0
    assert verdict.strict == (verdict.soft == 1.0)
    shuffled = judge(found[::-1], prompt(*include, exclude=tuple(exclude)))
    if len({d.confidence for d in found}) == len(found):
        assert shuffled == verdict


@pytest.mark.parametrize("kind", ["single", "count", "relation"])
def test_renders_of_the_miniature_are_right_and_other_captions_wrong(kind):
    rng = random.Random(3)
    scenes = [world.sample_scene(rng, kind) for _ in range(40)]
    images = world.render_many(scenes, rng)
    prompts = []
    for scene in scenes:
        row = scene.metadata()
        prompts.append(prompt(*row["include"], exclude=tuple(row.get("exclude", ())), tag=row["tag"]))
    reward = GenEval(MiniatureDetector(), Rules(counting_threshold=0.3))
    np.testing.assert_array_equal(reward.score(images, prompts), 1.0)
    others = [(i, j) for i, a in enumerate(scenes) for j, b in enumerate(scenes) if a != b]
    rng.shuffle(others)
    pick, ask = zip(*others[:60], strict=True)
    mismatched = reward.score(images[list(pick)], [prompts[j] for j in ask])
    assert (mismatched == 1.0).mean() < 0.05


def test_a_failing_detector_costs_one_image():
    def detector(image):
        if image.max() == 0:
            raise RuntimeError("broken")
        return [Found("cat")]

    images = np.stack([np.ones((8, 8, 3), np.uint8), np.zeros((8, 8, 3), np.uint8)])
    scores = GenEval(detector).score(images, [prompt(ONE_CAT)] * 2)
    assert scores[0] == 1.0
    assert np.isnan(scores[1])
