"""The weighted objective by hand."""

from __future__ import annotations

import numpy as np
import pytest

from recast_engine.errors import ConfigError
from recast_engine.evaluation.objective import contributions, normalised, objective, references

NAN = float("nan")


def test_budgets_are_normalised_and_checked():
    assert normalised({"ocr": 3.0, "geneval": 1.0, "hpsv2": 0.0}, ("ocr", "geneval", "hpsv2")) == {
        "ocr": 0.75,
        "geneval": 0.25,
    }
    with pytest.raises(ConfigError, match="clipscore"):
        normalised({"clipscore": 1.0}, ("ocr",))
    with pytest.raises(ConfigError, match="positive"):
        normalised({"ocr": 0.0}, ("ocr",))


def test_objective_by_hand():
    budgets = {"ocr": 0.25, "clipscore": 0.75}
    base = {"ocr": np.array([[0.0, 1.0], [NAN, NAN]]), "clipscore": np.array([[1.0, 3.0], [1.0, 3.0]])}
    tuned = {"ocr": np.array([[1.0, NAN], [NAN, NAN]]), "clipscore": np.array([[3.0, 3.0], [2.0, 4.0]])}
    applies = {"ocr": np.array([True, False]), "clipscore": np.array([True, True])}
    reference = references({"base": base, "tuned": tuned}, "base", budgets)
    assert (reference["ocr"].mean, reference["ocr"].std) == (0.5, 0.5)
    assert (reference["clipscore"].mean, reference["clipscore"].std) == (2.0, 1.0)
    parts = contributions(tuned, applies, budgets, reference)
    # Image (0, 1): its OCR score failed, so its objective is unknown and not smaller.
    expected = [[0.25 * 1.0 + 0.75 * 1.0, NAN], [0.0, 0.75 * 2.0]]
    np.testing.assert_allclose(objective(parts, applies), expected)


def test_the_baselines_own_mean_is_zero():
    rng = np.random.default_rng(0)
    base = {"ocr": rng.normal(3, 2, (5, 4)), "clipscore": rng.normal(-1, 0.1, (5, 4))}
    applies = dict.fromkeys(base, np.ones(5, bool))
    budgets = {"ocr": 0.5, "clipscore": 0.5}
    reference = references({"base": base}, "base", budgets)
    total = objective(contributions(base, applies, budgets, reference), applies)
    assert total.mean() == pytest.approx(0.0, abs=1e-12)


def test_a_constant_baseline_borrows_the_spread_of_all():
    base, tuned = {"ocr": np.zeros((2, 2))}, {"ocr": np.array([[0.0, 1.0], [0.0, 1.0]])}
    reference = references({"base": base, "tuned": tuned}, "base", {"ocr": 1.0})
    assert reference["ocr"].mean == 0.0
    assert reference["ocr"].std == pytest.approx(np.std([0] * 6 + [1] * 2))
    same = references({"base": base, "tuned": base}, "base", {"ocr": 1.0})
    parts = contributions(base, {"ocr": np.ones(2, bool)}, {"ocr": 1.0}, same)
    np.testing.assert_array_equal(parts["ocr"], 0.0)


def test_rounding_is_no_spread():
    """The standard deviation of 21 times 0.1 is 1e-17 in floating point: nothing to measure by."""
    base, tuned = {"ocr": np.full((7, 3), 0.1)}, {"ocr": np.full((7, 3), 0.2)}
    assert base["ocr"].std() > 0.0
    reference = references({"base": base, "tuned": tuned}, "base", {"ocr": 1.0})
    assert reference["ocr"].std == pytest.approx(0.05)
    assert references({"base": base}, "base", {"ocr": 1.0})["ocr"].std == 0.0


def test_prompts_no_reward_applies_to_have_no_objective():
    base = {"ocr": np.array([[0.0, 1.0], [NAN, NAN]])}
    applies = {"ocr": np.array([True, False])}
    reference = references({"base": base}, "base", {"ocr": 1.0})
    total = objective(contributions(base, applies, {"ocr": 1.0}, reference), applies)
    assert np.isnan(total[1]).all()
    assert np.isfinite(total[0]).all()
