"""From a finished table of scores to the profile. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from recast_engine.config import dump
from recast_engine.errors import RewardFailure
from recast_engine.profiling.curves import (
    curve_warnings,
    estimate_curve,
    estimate_proposal_curve,
    proposal_warnings,
)
from recast_engine.profiling.plan import Plan
from recast_engine.profiling.profile import Curve, Profile
from recast_engine.profiling.scores import ScoreTable


def profile_from_scores(plan: Plan, table: ScoreTable) -> Profile:
    """The profile of all rewards of ``plan``.

    Raises:
        RewardFailure: a reward failed so often that nothing is left of it.
    """
    curves: dict[str, Curve] = {}
    warnings = list(plan.warnings)
    for index, reward in enumerate(plan.rewards):
        curves[reward] = reward_curve(plan, table, index)
        warnings += _warnings(plan, table, index, curves[reward])
    settings = dump(plan.estimator) | {"seed": plan.seed, "prompts": len(plan.places)}
    return Profile(plan.rewards, plan.levels, curves, tuple(warnings), dict(table.cost), settings)


def reward_curve(plan: Plan, table: ScoreTable, index: int) -> Curve:
    """The curve of reward number ``index``, by the plan's estimator. Raises RewardFailure."""
    clean, rollouts, anchor = table.clean[index], table.rollouts[index, :-1], table.rollouts[index, -1]
    settings: dict[str, Any] = {
        "levels": plan.levels,
        "alpha": plan.estimator.alpha,
        "advantage_clip": plan.estimator.advantage_clip,
        "rng": np.random.default_rng(plan.seed),
        "anchor": anchor,
        "cleanup": plan.estimator.cleanup,
    }
    try:
        if plan.estimator.kind == "external_proposal":
            return estimate_proposal_curve(clean, table.proposals[index], rollouts, **settings)
        return estimate_curve(clean, rollouts, **settings)
    except RewardFailure as error:
        failed = int(table.failed[index])
        raise RewardFailure(f"reward {plan.rewards[index]!r}: {error} ({failed} scores failed)") from None


def _warnings(plan: Plan, table: ScoreTable, index: int, curve: Curve) -> list[str]:
    reward, failed = plan.rewards[index], int(table.failed[index])
    texts = curve_warnings(reward, curve)
    if plan.estimator.kind == "external_proposal":
        texts += proposal_warnings(reward, curve, plan.levels)
    if failed:
        texts.append(f"{reward}: {failed} scores failed and were left out")
    return texts
