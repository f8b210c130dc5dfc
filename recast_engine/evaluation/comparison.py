"""The figures of a report: every metric, the weighted objective and the diversity, subject by subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast_engine.evaluation import objective as objectives
from recast_engine.evaluation import statistics, verdict
from recast_engine.evaluation.drawing import Drawn
from recast_engine.rewards.base import spread
from recast_engine.rewards.catalogue import reward_info

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def compare(
    drawn: Mapping[str, Drawn],
    rewards: Sequence[str],
    applies: Flags,
    baseline: str,
    budgets: Mapping[str, float] | None,
    *,
    seed: int,
) -> dict[str, Any]:
    """The report's ``metrics``, ``objective`` and ``diversity`` (see ``run.evaluate``).

    Args:
        applies: (R, P) whether each reward applies to each prompt.
        budgets: of the objective, normalised; None for no objective.
        seed: of the bootstrap.
    """
    applicable = dict(zip(rewards, applies, strict=True))
    tables = {label: dict(zip(rewards, one.scores, strict=True)) for label, one in drawn.items()}
    metrics = {}
    for row, reward in enumerate(rewards):
        failed = {label: int(one.failed[row].sum()) for label, one in drawn.items()}
        columns = {label: table[reward] for label, table in tables.items()}
        metrics[reward] = _metric(reward, columns, baseline, failed, seed) | {
            "prompts": int(applicable[reward].sum())
        }
    _correct(metrics, [label for label in drawn if label != baseline])
    objective = None if budgets is None else _objective(tables, applicable, budgets, baseline, seed)
    return {"metrics": metrics, "objective": objective, "diversity": _diversity(drawn, baseline)}


def _metric(
    reward: str,
    columns: Mapping[str, Floats],
    baseline: str,
    failed: Mapping[str, int],
    seed: int,
) -> dict[str, Any]:
    info = reward_info(reward)
    own = columns[baseline][np.isfinite(columns[baseline])]
    return {
        "objective": info.objective,
        "summary": info.summary,
        "held_out": info.role == "held_out",
        "higher_is_better": info.higher_is_better,
        "baseline_std": spread(own) if own.size else None,
        "means": {
            label: asdict(statistics.mean_interval(values, seed=seed)) | {"failed": failed[label]}
            for label, values in columns.items()
        },
        "differences": _differences(columns, baseline, seed),
    }


def _differences(columns: Mapping[str, Floats], baseline: str, seed: int) -> dict[str, dict[str, Any]]:
    return {
        label: asdict(statistics.paired_difference(values, columns[baseline], seed=seed))
        for label, values in columns.items()
        if label != baseline
    }


def _correct(metrics: Mapping[str, Any], others: Sequence[str]) -> None:
    """Add Holm's p-value over the metrics, and the direction it supports, to every subject's differences."""
    for label in others:
        adjusted = statistics.holm({name: m["differences"][label]["p_value"] for name, m in metrics.items()})
        for name, p_value in adjusted.items():
            difference = metrics[name]["differences"][label]
            difference["p_holm"] = p_value
            difference["direction"] = verdict.direction(difference, p_value)


def _objective(
    tables: objectives.Tables,
    applicable: Mapping[str, Flags],
    budgets: Mapping[str, float],
    baseline: str,
    seed: int,
) -> dict[str, Any]:
    reference = objectives.references(tables, baseline, budgets)
    parts = {
        label: objectives.contributions(table, applicable, budgets, reference)
        for label, table in tables.items()
    }
    columns = {label: objectives.objective(part, applicable) for label, part in parts.items()}
    differences = _differences(columns, baseline, seed)
    for difference in differences.values():
        difference["direction"] = verdict.objective_direction(difference)
    return {
        "budgets": dict(budgets),
        "reference": {reward: asdict(one) for reward, one in reference.items()},
        "means": {
            label: asdict(statistics.mean_interval(values, seed=seed)) for label, values in columns.items()
        },
        "differences": differences,
        "contributions": {
            label: _contributions(part, parts[baseline], columns[label] - columns[baseline])
            for label, part in parts.items()
            if label != baseline
        },
    }


def _contributions(
    part: Mapping[str, Floats],
    own: Mapping[str, Floats],
    difference: Floats,
) -> dict[str, float | None]:
    """What each reward adds to the objective's mean difference; the sum is that difference."""
    result: dict[str, float | None] = {}
    for reward, values in part.items():
        units = statistics.prompt_means(np.where(np.isfinite(difference), values - own[reward], np.nan))
        units = units[np.isfinite(units)]
        result[reward] = float(units.mean()) if units.size else None
    return result


def _diversity(drawn: Mapping[str, Drawn], baseline: str) -> dict[str, dict[str, float | None]]:
    means = {label: float(one.diversity.mean()) for label, one in drawn.items()}
    result: dict[str, dict[str, float | None]] = {}
    for label, mean in means.items():
        known = np.isfinite(mean)
        ratio = mean / means[baseline] if known and means[baseline] > 0 else None
        result[label] = {"mean": mean if known else None, "ratio": ratio}
    return result
