"""The weighted training objective of each image, in units of the baseline's spread.

    objective(image) = sum_i lambda_i (r_i - m_i) / s_i      over the rewards i that apply to its prompt

lambda_i are the budgets, normalised to sum 1; m_i and s_i are mean and standard deviation of reward i over
all images of the baseline. Standardising lets rewards of different scales be added, as the per-reward
normalisation of advantages does in training; the budgets of rewards that do not apply are left out, not
handed to the others, also as in training. A failed score makes the image's objective NaN, never smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recast_engine.errors import ConfigError
from recast_engine.rewards.base import spread

Floats = NDArray[np.float64]
Tables = Mapping[str, Mapping[str, Floats]]
"""subject label -> reward id -> (P, K) scores, NaN where a reward does not apply or failed."""


@dataclass(frozen=True)
class Reference:
    """Baseline mean and standard deviation of one reward; ``std`` 0 takes the reward out of the objective."""

    mean: float
    std: float


def normalised(budgets: Mapping[str, float], rewards: tuple[str, ...]) -> dict[str, float]:
    """Budgets with sum 1, zero ones dropped.

    Raises:
        ConfigError: a budget over something that is not evaluated, or no positive budget.
    """
    if unknown := sorted(set(budgets) - set(rewards)):
        raise ConfigError(f"objective over rewards that are not evaluated: {', '.join(unknown)}")
    total = sum(budgets.values())
    if total <= 0:
        raise ConfigError("objective: at least one budget must be positive")
    return {reward: weight / total for reward, weight in budgets.items() if weight > 0}


def references(tables: Tables, baseline: str, rewards: Mapping[str, float]) -> dict[str, Reference]:
    """m_i and s_i of every reward.

    A baseline that scores the same on every image has no spread of its own; the spread over all subjects
    then stands in. When that is 0 too, the reward tells no image from another.
    """
    result = {}
    for reward in rewards:
        own = _finite(tables[baseline][reward])
        mean = float(own.mean()) if own.size else 0.0
        std = spread(own) or spread(np.concatenate([table[reward].ravel() for table in tables.values()]))
        result[reward] = Reference(mean, std)
    return result


def contributions(
    table: Mapping[str, Floats],
    applicable: Mapping[str, NDArray[np.bool_]],
    budgets: Mapping[str, float],
    reference: Mapping[str, Reference],
) -> dict[str, Floats]:
    """lambda_i (r_i - m_i) / s_i of every reward: (P, K); 0 where it does not apply, NaN where it failed.

    Args:
        table: reward -> (P, K) scores of one subject.
        applicable: reward -> (P,) whether it applies to each prompt.
    """
    parts = {}
    for reward, weight in budgets.items():
        mean, std = reference[reward].mean, reference[reward].std
        if std == 0.0:
            parts[reward] = np.zeros_like(table[reward])
            continue
        scaled = weight * (table[reward] - mean) / std
        parts[reward] = np.where(applicable[reward][:, None], scaled, 0.0)
    return parts


def objective(parts: Mapping[str, Floats], applicable: Mapping[str, NDArray[np.bool_]]) -> Floats:
    """Sum of the ``contributions``: (P, K), NaN for prompts that no reward of the objective applies to."""
    total: Floats = np.sum(list(parts.values()), axis=0)
    anywhere = np.any([applicable[reward] for reward in parts], axis=0)
    return np.where(anywhere[:, None], total, np.nan)


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]
