"""Paired statistics against hand computation, closed forms, scipy and their own promises."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from recast_engine.evaluation.statistics import (
    bootstrap_interval,
    holm,
    mean_interval,
    paired_difference,
    prompt_means,
    sign_test,
)

NAN = float("nan")


def test_prompts_weigh_the_same_however_many_images_were_scored():
    values = np.array([[1.0, 3.0], [5.0, NAN], [NAN, NAN]])
    np.testing.assert_array_equal(prompt_means(values), [2.0, 5.0, NAN])
    summary = mean_interval(values, seed=0)
    assert summary.mean == 3.5
    assert (summary.prompts, summary.images) == (2, 3)


def test_difference_by_hand():
    subject = np.array([[1.0, 2.0], [4.0, NAN], [0.0, 0.0], [7.0, 7.0]])
    baseline = np.array([[0.0, 1.0], [6.0, 9.0], [0.0, 0.0], [NAN, NAN]])
    result = paired_difference(subject, baseline, seed=1)
    assert result.mean == pytest.approx((1.0 - 2.0 + 0.0) / 3)
    assert (result.wins, result.ties, result.losses) == (1, 1, 1)
    assert (result.prompts, result.images) == (3, 5)
    assert result.p_value == 1.0


def test_intervals_do_not_exist_for_less_than_two_prompts():
    one = paired_difference(np.array([[1.0, 2.0]]), np.zeros((1, 2)), seed=0)
    assert (one.mean, one.low, one.high, one.p_value) == (1.5, None, None, 1.0)
    none = paired_difference(np.full((2, 2), NAN), np.zeros((2, 2)), seed=0)
    assert (none.mean, none.low, none.prompts, none.p_value) == (None, None, 0, None)


def test_tables_of_different_shape_are_refused():
    with pytest.raises(ValueError, match="paired"):
        paired_difference(np.zeros((2, 3)), np.zeros((3, 2)), seed=0)


def test_identical_tables_show_nothing():
    values = np.random.default_rng(0).normal(size=(12, 3))
    result = paired_difference(values, values.copy(), seed=0)
    assert (result.mean, result.low, result.high) == (0.0, 0.0, 0.0)
    assert (result.wins, result.ties, result.losses, result.p_value) == (0, 12, 0, 1.0)


def test_everything_follows_from_the_seed():
    values = np.random.default_rng(3).normal(size=40)
    first = bootstrap_interval(values, seed=5)
    assert first == bootstrap_interval(values, seed=5)
    assert first != bootstrap_interval(values, seed=6)


def test_interval_matches_students_for_normal_data():
    # 200 prompts: t interval -/+ 1.972 s / sqrt(200); 20,000 draws leave about 1.5% of Monte Carlo error.
    values = np.random.default_rng(1).normal(size=200)
    low, high = bootstrap_interval(values, seed=0, draws=20_000)
    half = 1.97196 * values.std(ddof=1) / math.sqrt(200)
    assert low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.05 * half)


@pytest.mark.parametrize(("prompts", "skewed"), [(12, False), (40, False), (40, True)])
def test_interval_covers_the_truth_at_its_nominal_rate(prompts, skewed):
    # 600 repetitions: standard error of the rate 0.9%. A skewed population (exponential) may lose 3% more.
    rng = np.random.default_rng(7)
    hits = 0
    for repeat in range(600):
        noise = rng.exponential(size=prompts) - 1 if skewed else rng.normal(size=prompts)
        low, high = bootstrap_interval(0.3 + noise, seed=repeat, draws=1000)
        hits += low <= 0.3 <= high
    assert hits / 600 > (0.90 if skewed else 0.925)
    assert hits / 600 < 0.98


def test_prompts_are_resampled_whole():
    """Ten correlated images a prompt must not shrink the interval as independent ones would."""
    rng = np.random.default_rng(2)
    per_prompt = rng.normal(size=(30, 1))
    one = mean_interval(per_prompt, seed=0)
    ten = mean_interval(np.repeat(per_prompt, 10, axis=1), seed=0)
    assert ten.low == pytest.approx(one.low)
    assert ten.high == pytest.approx(one.high)


@given(st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=100, deadline=None)
def test_sign_test_equals_scipys(wins, losses):
    if wins + losses == 0:
        assert sign_test(wins, losses) == 1.0
    else:
        expected = binomtest(wins, wins + losses, 0.5).pvalue
        assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


def test_sign_test_by_hand_and_at_scale():
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(4, 1) == pytest.approx(2 * (1 + 5) / 32)
    assert sign_test(9000, 11000) == pytest.approx(binomtest(9000, 20000).pvalue, rel=1e-6)


def test_holm_by_hand():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None, "e": 0.005})
    assert adjusted["e"] == pytest.approx(0.02)
    assert adjusted["a"] == pytest.approx(0.03)
    assert adjusted["c"] == pytest.approx(0.06)
    assert adjusted["b"] == pytest.approx(0.06)
    assert adjusted["d"] is None
    assert list(adjusted) == ["a", "b", "c", "d", "e"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_monotone_and_never_below_the_raw_value(p_values):
    named = {str(i): p for i, p in enumerate(p_values)}
    adjusted = holm(named)
    order = sorted(named, key=named.__getitem__)
    assert all(adjusted[name] >= named[name] for name in named)
    assert all(adjusted[a] <= adjusted[b] for a, b in itertools.pairwise(order))
    assert max(adjusted.values()) <= 1.0
