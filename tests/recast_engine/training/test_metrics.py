"""The scalars of an epoch, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from recast_engine.rewards.base import Scores
from recast_engine.training.metrics import extend_baseline, objective
from recast_engine.training.stages import Stage
from tests.recast_engine.training.tiny import PROMPTS, PixelScorer


def _scores(*rows: list[float]) -> Scores:
    values = np.array(rows)
    return Scores(("redness", "constant"), values, np.ones(values.shape, bool), np.zeros(2))


def test_the_objective_is_in_standard_deviations_of_the_start() -> None:
    """A reward that was 0.1 everywhere has no spread but rounding's (1e-17), and measures nothing."""
    stage = Stage(
        0, ("redness", "constant"), np.array([0.75, 0.25]), PixelScorer("redness", "constant"), PROMPTS
    )
    start = _scores([1.0, 3.0] * 10 + [2.0], [0.1] * 21)
    baseline = extend_baseline({}, start)
    assert baseline["constant"][1] == 0.0
    assert objective(stage, start, baseline) == pytest.approx(0.0)
    later = _scores([4.0] * 21, [0.2] * 21)
    assert objective(stage, later, baseline) == pytest.approx(0.75 * 2.0 / np.sqrt(20 / 21))
