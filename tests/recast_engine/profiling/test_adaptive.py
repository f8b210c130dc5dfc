"""Rounds that follow from the merged scores alone, until intervals are narrow or the budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from recast_engine.config import AdaptiveConfig, EstimatorConfig, ProposalConfig
from recast_engine.errors import ConfigError
from recast_engine.profiling.adaptive import rollouts_wanted
from recast_engine.profiling.assembly import profile_from_scores
from recast_engine.profiling.measure import measure_profile, measure_work
from recast_engine.profiling.plan import Plan
from recast_engine.profiling.scores import ScoreTable
from recast_engine.prompts import Prompt

PROMPTS = [Prompt(str(0.1 * (place % 3))) for place in range(16)]


def config(**adaptive: Any) -> EstimatorConfig:
    return EstimatorConfig(
        prompts=16,
        images_per_prompt=4,
        levels=5,
        sampling_steps=6,
        adaptive=AdaptiveConfig(**adaptive),
    )


def width(curves: Any) -> float:
    """The largest half-width of all intervals, in units of D(0)."""
    return max(
        float(np.subtract(curve.ci_high, curve.ci_low).max()) / 2 / curve.divergence_raw[0]
        for curve in curves.values()
    )


def test_it_stops_when_every_interval_is_narrow_enough(backbone: Any, hermite: Any) -> None:
    wide, narrow = (
        measure_profile(backbone, hermite([1]), PROMPTS, config(target_width=target), seed=0)
        for target in (0.3, 0.15)
    )
    assert width(wide.curves) <= 0.3
    assert width(narrow.curves) <= 0.15
    assert narrow.cost["model_evaluations"] > wide.cost["model_evaluations"]


@pytest.mark.parametrize("budget", [5_000, 12_345])
def test_the_budget_is_used_and_never_exceeded(backbone: Any, hermite: Any, budget: int) -> None:
    profile = measure_profile(backbone, hermite([1]), PROMPTS, config(max_model_evaluations=budget), seed=0)
    spent = profile.cost["model_evaluations"]
    assert spent == backbone.evaluations
    assert budget - 16 * 100 < spent <= budget  # a last image of 16 prompts costs less than 16 * 100


def test_a_budget_too_small_is_refused(backbone: Any, hermite: Any) -> None:
    with pytest.raises(ConfigError, match=r"adaptive\.max_model_evaluations"):
        measure_profile(backbone, hermite([1]), PROMPTS, config(max_model_evaluations=500), seed=0)
    assert backbone.evaluations == 0


def test_rounds_are_the_same_under_sharding(backbone: Any, hermite: Any) -> None:
    estimator, scorer = config(max_model_evaluations=9_000), hermite([1])
    plan = Plan.of(estimator, scorer.rewards, PROMPTS, 3, applicable=scorer.applicable(PROMPTS))
    table, rounds = plan.empty(), 0
    while (work := plan.next(table)) is not None:
        shards = [
            measure_work(backbone, scorer, PROMPTS, plan, part) for part in reversed(plan.split(work, 2))
        ]
        table, rounds = ScoreTable.merge([*shards, table]), rounds + 1
    assert rounds > 2
    whole = measure_profile(backbone, hermite([1]), PROMPTS, estimator, seed=3)
    assert whole.curves == profile_from_scores(plan, table).curves


def plan_of_noisy_levels(noise: float) -> tuple[Plan, ScoreTable]:
    """One reward; the highest inner level loses ``noise`` of the image, the others nothing."""
    rng = np.random.default_rng(0)
    prompts: Sequence[Prompt] = [Prompt("a")] * 16
    estimator = replace(config(target_width=1e-3), anchor=True)
    plan = Plan.of(estimator, ("clipscore",), prompts, 0)
    table = plan.table(8, 1, rounds=1)
    table.clean[:] = rng.normal(size=table.clean.shape)
    table.rollouts[:] = table.clean[:, None, :, :, None]
    fresh = rng.normal(size=table.clean.shape)
    table.rollouts[:, 2, :, :, 0] = np.sqrt(1 - noise) * table.clean + np.sqrt(noise) * fresh
    table.rollouts[:, 3, :, :, 0] = rng.normal(size=table.clean.shape)
    return plan, table


def test_levels_that_lose_much_get_more_rollouts() -> None:
    plan, table = plan_of_noisy_levels(0.9)
    wanted = rollouts_wanted(plan, table)
    assert wanted is not None
    assert wanted[:2] == (1, 1)
    assert wanted[2] > 1
    assert wanted[3] == wanted[2]  # the anchor has every rollout's random numbers
    assert rollouts_wanted(*plan_of_noisy_levels(0.0)) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"adaptive": {}}, "target_width"),
        ({"kind": "external_proposal"}, "proposals"),
        ({"proposals": {"source": "openai"}}, "proposals"),
        (
            {"kind": "external_proposal", "proposals": {"source": "openai"}, "adaptive": {"target_width": 1}},
            "adaptive",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        EstimatorConfig(**fields)
    assert ProposalConfig(source="openai").source == "openai"
