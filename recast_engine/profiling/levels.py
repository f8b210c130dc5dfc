"""Where a profile is measured, and how many steps a rollout takes; no torch, so work can be estimated."""

from __future__ import annotations

import math

import numpy as np

LEVEL_EXPONENT = 1.5
FEWEST_ROLLOUT_STEPS = 2


def noise_levels(count: int) -> tuple[float, ...]:
    """L levels from 0 to 1, sigma_l = 1 - (1 - l / (L - 1))^1.5.

    Denser towards 1, where the signal-to-noise ratio (1 - sigma)^2 / sigma^2 runs through most of its range
    and curves of composition-like rewards fall within a tenth.
    """
    return tuple(float(1.0 - (1.0 - place) ** LEVEL_EXPONENT) for place in np.linspace(0.0, 1.0, count))


def rollout_steps(sigma: float, sampling_steps: int) -> int:
    """Model evaluations of a rollout from ``sigma``: its share of a whole sampling run, at least 2."""
    return max(FEWEST_ROLLOUT_STEPS, math.ceil(sigma * sampling_steps))
