"""The published schedules of the old policy's decay."""

from __future__ import annotations

import pytest

from recast_engine.training.old_policy import old_policy_decay


@pytest.mark.parametrize(
    ("schedule", "step", "decay"),
    [
        ("fast", 0, 0.0),
        ("fast", 100, 0.1),
        ("fast", 500, 0.5),
        ("fast", 9000, 0.5),
        ("slow", 0, 0.0),
        ("slow", 75, 0.0),
        ("slow", 175, 0.75),
        ("slow", 209, 0.999),
        ("slow", 9000, 0.999),
    ],
)
def test_decay(schedule: str, step: int, decay: float) -> None:
    assert old_policy_decay(schedule, step) == pytest.approx(decay)
