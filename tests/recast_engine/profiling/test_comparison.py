"""Two profiles compared: values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recast_engine.allocation import allocate
from recast_engine.errors import InvalidArgument
from recast_engine.profiling import Curve, Profile
from recast_engine.profiling.comparison import Interval, compare, difference, pearson

SIGMAS = [1.0, 0.75, 0.5, 0.25, 0.0]


def curve(*divergence: float, half_width: float = 0.02) -> Curve:
    """A curve on the five levels 0, 0.25, ..., 1 whose intervals reach ``half_width`` both ways."""
    values = np.array(divergence)
    low, high = values - half_width, values + half_width
    low[-1] = high[-1] = 0.0
    gain = tuple(-np.diff(values))
    return Curve(
        divergence=tuple(values),
        divergence_raw=tuple(values),
        standard_error=(half_width / 2,) * 5,
        ci_low=tuple(low),
        ci_high=tuple(high),
        gain=gain,
        gain_low=gain,
        gain_high=gain,
        total=float(values[0]),
        max_violation_se=0.0,
        prompts=20,
        images=80,
    )


def profile(**curves: Curve) -> Profile:
    return Profile(tuple(curves), (0.0, 0.25, 0.5, 0.75, 1.0), curves)


EARLY = curve(0.4, 0.4, 0.4, 0.3, 0.0)  # gains by step 0.3 0.1 0 0
LATE = curve(0.4, 0.1, 0.0, 0.0, 0.0)  # 0 0 0.1 0.3
EVEN = curve(0.4, 0.3, 0.2, 0.1, 0.0)  # 0.1 0.1 0.1 0.1


def test_a_profile_agrees_with_itself() -> None:
    one = profile(ocr=EARLY, hpsv2=LATE)
    found = compare(one, one, SIGMAS)
    assert found.largest_weight_change == found.mean_weight_change == 0.0
    assert found.left_out == ()
    for reward in found.rewards.values():
        assert reward.correlation == pytest.approx(1.0)
        assert reward.change.value == 0.0
        assert reward.change.low == pytest.approx(-0.02 * math.sqrt(2))
        assert reward.apart_at is None
        assert "the same steps" in reward.verdict
        assert "no change of its total beyond noise" in reward.verdict


def test_correlation_change_and_where_by_hand() -> None:
    found = compare(profile(ocr=EARLY, hpsv2=LATE), profile(ocr=LATE, hpsv2=LATE), SIGMAS)
    # gains (3, 1, 0, 0) and (0, 0, 1, 3) / 10, mean 1: sum of products of deviations -4, sums of squares 6
    assert found.rewards["ocr"].correlation == pytest.approx(-4 / 6)
    assert found.rewards["ocr"].apart_at == 0.5  # 0.4 against 0
    assert "different steps" in found.rewards["ocr"].verdict
    assert "apart beyond their intervals, most at sigma 0.50" in found.rewards["ocr"].verdict
    before = allocate([[0.3, 0.1, 0, 0], [0, 0, 0.1, 0.3]], [1, 1]).matrix
    # alike in everything, the rewards share every step afterwards
    change = np.abs(before - 0.5)
    assert found.largest_weight_change == pytest.approx(change.max())
    assert found.at_step in (1, 4)
    assert found.mean_weight_change == pytest.approx(change.mean())
    assert found.rewards["hpsv2"].largest_weight_change == pytest.approx(change[1].max())


def test_a_total_that_falls_beyond_its_interval() -> None:
    fallen = curve(0.2, 0.15, 0.1, 0.05, 0.0)
    found = compare(profile(ocr=EVEN), profile(ocr=fallen), SIGMAS).rewards["ocr"]
    assert found.change.value == pytest.approx(-0.2)
    assert (found.change.low, found.change.high) == pytest.approx(
        (-0.2 - 0.02 * math.sqrt(2), -0.2 + 0.02 * math.sqrt(2))
    )
    assert "its total fell from 0.4000 to 0.2000" in found.verdict
    assert found.correlation is None  # even gains do not vary
    assert "cannot be compared" in found.verdict


def test_a_low_correlation_of_curves_that_overlap_may_be_noise() -> None:
    wide = {"half_width": 0.5}
    one, two = curve(0.4, 0.4, 0.4, 0.3, 0.0, **wide), curve(0.4, 0.1, 0.0, 0.0, 0.0, **wide)
    found = compare(profile(ocr=one), profile(ocr=two), SIGMAS).rewards["ocr"]
    assert found.apart_at is None
    assert "may be noise" in found.verdict


def test_the_interval_of_a_difference_keeps_asymmetry() -> None:
    """a = 3 in [2, 7], b = 10 in [7, 14]: arms sqrt(3^2 + 4^2) below and sqrt(4^2 + 1^2) above."""
    assert difference(Interval(3, 2, 7), Interval(10, 7, 14)) == Interval(7, 7 - 5, 7 + math.sqrt(17))


def test_budgets_choose_the_rewards_and_weigh_them() -> None:
    a, b = profile(ocr=EARLY, hpsv2=LATE, geneval=EVEN), profile(hpsv2=LATE, ocr=EVEN, clipscore=LATE)
    found = compare(a, b, SIGMAS, budgets={"ocr": 3, "hpsv2": 1})
    assert found.budgets == {"ocr": 0.75, "hpsv2": 0.25}
    assert found.left_out == ("geneval", "clipscore")
    silent = compare(a, b, SIGMAS, budgets={"ocr": 1, "hpsv2": 0})
    assert silent.largest_weight_change == pytest.approx(0.0, abs=1e-12)  # one reward has all of every step
    with pytest.raises(InvalidArgument, match="budgets: geneval"):
        compare(a, b, SIGMAS, budgets={"geneval": 1})
    with pytest.raises(InvalidArgument, match="no common reward"):
        compare(profile(ocr=EARLY), profile(hpsv2=LATE), SIGMAS)


def test_pearson_is_numpys_and_none_without_variation() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 10))
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert pearson(x, np.full(10, 0.1)) is None
    assert pearson(np.zeros(10), y) is None
