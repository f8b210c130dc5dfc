"""GenEval's rules on hand-made detections, and on renders of the miniature world."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recast_engine.errors import ConfigError
from recast_engine.miniature import world
from recast_engine.miniature.detector import MiniatureDetector
from recast_engine.prompts import Prompt, parse_prompts
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.geneval import GenEval, Rules, judge, load, overlap, relative_positions
from recast_engine.rewards.vocabulary import Vocabulary


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


def test_overlap_by_hand():
    assert overlap((0, 0, 9, 9), (0, 0, 9, 9)) == 1.0
    assert overlap((0, 0, 9, 9), (5, 0, 14, 9)) == pytest.approx(50 / 150)  # 10 x 10 px each, 5 x 10 shared
    assert overlap((0, 0, 9, 9), (10, 0, 19, 9)) == 0.0


def test_boxes_that_double_a_surer_one_go_when_asked():
    # One cat seen twice, and another: the second box shares 90 / 110 = 0.82 with the first.
    places = [(0.95, 0), (0.92, 1), (0.91, 50)]
    found = [Found("cat", confidence, (x, 0, x + 9, 9)) for confidence, x in places]
    asked = prompt(TWO_CATS, exclude=({"class": "cat", "count": 3},), tag="counting")
    assert not judge(found, asked).strict  # as published: no suppression unless it is asked for
    assert judge(found, asked, Rules(max_overlap=0.8)).strict
    assert not judge(found, asked, Rules(max_overlap=0.9)).strict
    other = [Found("dog", 0.99, (0, 0, 9, 9)), *found]  # another class hides nothing
    assert judge(other, asked, Rules(max_overlap=0.8)).strict
    # 16 are kept first, and of those the doubles go, in the published order.
    crowd = [Found("cat", 0.95, (0, 0, 9, 9))] * 16 + [Found("cat", 0.91, (50, 0, 59, 9))]
    assert not judge(crowd, prompt(TWO_CATS), Rules(max_overlap=0.8)).strict


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_an_overlap_that_is_no_share_is_refused(value):
    with pytest.raises(ConfigError, match=r"options\.geneval\.max_overlap"):
        load("miniature", "cpu", max_overlap=value)


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
    with pytest.raises(PartialFailure, match=r"the detector failed \(RuntimeError\)") as caught:
        GenEval(detector).score(images, [prompt(ONE_CAT)] * 2)
    np.testing.assert_array_equal(caught.value.values, [1.0, np.nan])


def test_what_the_detector_cannot_name_has_no_score():
    """Not 0, which would say that it was looked for."""
    images = np.ones((4, 8, 8, 3), np.uint8)
    asked = [
        prompt(ONE_CAT),
        prompt({"class": "unicorn", "count": 1}),
        prompt(ONE_CAT | {"color": "mauve"}),
        prompt(ONE_CAT, exclude=({"class": "unicorn", "count": 1},)),
    ]
    reward = GenEval(lambda image: [Found("cat")], vocabulary=Vocabulary(("cat", "dog"), ("red",)))
    with pytest.raises(PartialFailure, match="the detector does not know 'unicorn'") as caught:
        reward.score(images, asked)
    np.testing.assert_array_equal(caught.value.values, [1.0, np.nan, np.nan, np.nan])


KINDS = {
    # tag: include, exclude, what is found, the published verdict
    "single_object": [
        (({"class": "bench", "count": 1},), (), [Found("bench")], True),
        (({"class": "bench", "count": 1},), (), [Found("chair")], False),
    ],
    "two_object": [
        ((ONE_CAT, DOG), (), [Found("cat"), Found("dog")], True),
        ((ONE_CAT, DOG), (), [Found("cat")], False),
    ],
    "counting": [
        ((TWO_CATS,), ({"class": "cat", "count": 3},), [Found("cat", 0.95)] * 2, True),
        ((TWO_CATS,), ({"class": "cat", "count": 3},), [Found("cat", 0.95)], False),  # too few
        ((TWO_CATS,), ({"class": "cat", "count": 3},), [Found("cat", 0.95)] * 3, False),  # too many
        ((TWO_CATS,), ({"class": "cat", "count": 3},), [Found("cat", 0.95)] * 2 + [Found("cat", 0.85)], True),
    ],
    "colors": [
        ((RED_CAT,), (), [Found("cat", color="red")], True),
        ((RED_CAT,), (), [Found("cat", color="orange")], False),
    ],
    "color_attr": [
        ((RED_CAT, {"class": "dog", "count": 1, "color": "blue"}), (),
         [Found("cat", color="red"), Found("dog", color="blue")], True),
        ((RED_CAT, {"class": "dog", "count": 1, "color": "blue"}), (),
         [Found("cat", color="blue"), Found("dog", color="red")], False),  # colours swapped
    ],
    "position": [
        ((DOG, CAT_LEFT), (), [Found("dog", box=at(40, 10)), Found("cat", box=at(10, 10))], True),
        ((DOG, CAT_LEFT), (), [Found("dog", box=at(10, 10)), Found("cat", box=at(40, 10))], False),  # swapped
        ((DOG, CAT_LEFT), (), [Found("dog", box=at(11, 10)), Found("cat", box=at(10, 10))], False),  # overlap
        ((DOG, CAT_LEFT), (), [Found("cat", box=at(10, 10))], False),  # nothing to stand beside
    ],
}  # fmt: skip


@pytest.mark.parametrize("tag", KINDS)
def test_the_published_verdicts_for_every_kind_of_prompt(tag):
    for include, exclude, found, verdict in KINDS[tag]:
        assert judge(found, prompt(*include, exclude=exclude, tag=tag)).strict is verdict


def published_prompts() -> list[Prompt]:
    """The six kinds of GenEval prompts over COCO's classes, in the published form of a JSONL line."""
    from recast_engine.rewards.vocabulary import CLASSES, COLORS

    rows = []
    for place, name in enumerate(CLASSES):
        other, color = CLASSES[place - 1], COLORS[place % 10]
        relation = ("left of", "right of", "above", "below")[place % 4]
        one, two = {"class": name, "count": 1}, {"class": other, "count": 1}
        rows += [
            {"tag": "single_object", "include": [one], "prompt": f"a photo of a {name}"},
            {"tag": "two_object", "include": [one, two], "prompt": f"a photo of a {name} and a {other}"},
            {
                "tag": "counting", "include": [{"class": name, "count": place % 3 + 2}],
                "exclude": [{"class": name, "count": place % 3 + 3}], "prompt": f"a photo of {name}s",
            },
            {"tag": "colors", "include": [one | {"color": color}], "prompt": f"a photo of a {color} {name}"},
            {
                "tag": "color_attr", "include": [one | {"color": color}, two | {"color": "red"}],
                "prompt": f"a photo of a {color} {name} and a red {other}",
            },
            {
                "tag": "position", "include": [two, one | {"position": [relation, 0]}],
                "prompt": f"a photo of a {name} {relation} a {other}",
            },
        ]  # fmt: skip
    return parse_prompts("\n".join(json.dumps(row) for row in rows))


def check_prompts(prompts: list[Prompt]) -> None:
    """Every prompt can be judged, and detections made from its own clauses satisfy it."""
    from recast_engine.rewards.vocabulary import CLASSES, COLORS

    for asked in prompts:
        found: list[Found] = []
        for clause in asked.include:
            assert clause["class"] in CLASSES
            assert clause.get("color", "red") in COLORS
            dx, dy = {"left of": (-60, 0), "right of": (60, 0), "above": (0, -60), "below": (0, 60)}.get(
                clause.get("position", ("", 0))[0], (0, 0)
            )
            found += [
                Found(clause["class"], 0.95, at(200 + dx, 200 + dy), clause.get("color", "red"))
            ] * clause["count"]
        assert judge(found, asked).strict, asked
        assert not judge(found[:-1], asked).strict, asked


def test_prompts_of_every_kind_and_class_parse_and_can_be_satisfied():
    prompts = published_prompts()
    assert len(prompts) == 480
    check_prompts(prompts)


@pytest.mark.skipif(
    "RECAST_TEST_PROMPTS" not in os.environ,
    reason="RECAST_TEST_PROMPTS names no folder with the published geneval.jsonl and ocr.txt",
)
def test_the_published_prompts_parse():
    folder = Path(os.environ["RECAST_TEST_PROMPTS"])
    geneval = parse_prompts((folder / "geneval.jsonl").read_text(encoding="utf-8"))
    assert len(geneval) == 553
    check_prompts(geneval)
    spelling = parse_prompts((folder / "ocr.txt").read_text(encoding="utf-8"))
    assert len(spelling) == 500
    assert all(one.target for one in spelling)
