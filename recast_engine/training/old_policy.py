"""How slowly the sampling ("old") policy follows the policy being trained."""

from __future__ import annotations

from collections.abc import Callable

SCHEDULES: dict[str, Callable[[int], float]] = {
    "fast": lambda step: min(0.001 * step, 0.5),
    "slow": lambda step: min(0.0075 * max(step - 75, 0), 0.999),
}
"""Decay eta by the number of optimiser steps taken: theta_old <- eta theta_old + (1 - eta) theta."""


def old_policy_decay(schedule: str, step: int) -> float:
    """eta after optimiser step ``step`` (from 1) of ``schedule``; applied once at the end of every epoch.

    DiffusionNFT's reference code counts gradient steps over the whole run and updates the old policy once
    per epoch of sampling; so does this. Raises KeyError for an unknown schedule.
    """
    return SCHEDULES[schedule](step)
