"""From a finished table of scores to the profile. No torch."""

from __future__ import annotations

import numpy as np

from recast_engine.config import dump
from recast_engine.errors import RewardFailure
from recast_engine.profiling.curves import curve_warnings, estimate_curve
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
        curves[reward], texts = _curve(plan, table, index)
        warnings += texts
    settings = dump(plan.estimator) | {"seed": plan.seed, "prompts": len(plan.places)}
    return Profile(plan.rewards, plan.levels, curves, tuple(warnings), dict(table.cost), settings)


def _curve(plan: Plan, table: ScoreTable, index: int) -> tuple[Curve, list[str]]:
    """The curve of reward number ``index`` and its warnings."""
    reward, failed = plan.rewards[index], int(table.failed[index])
    try:
        curve = estimate_curve(
            table.clean[index],
            table.rollouts[index, :-1],
            alpha=plan.estimator.alpha,
            advantage_clip=plan.estimator.advantage_clip,
            rng=np.random.default_rng(plan.seed),
            anchor=table.rollouts[index, -1],
        )
    except RewardFailure as error:
        raise RewardFailure(f"reward {reward!r}: {error} ({failed} scores failed)") from None
    texts = curve_warnings(reward, curve)
    if failed:
        texts.append(f"{reward}: {failed} scores failed and were left out")
    return curve, texts
