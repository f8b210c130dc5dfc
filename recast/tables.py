"""What jobs found, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

OBJECTIVE = "weighted objective"


def curves(profile: Mapping[str, Any]) -> Table:
    """A profile's divergence curves, clean images first."""
    table = Table("reward", *[f"σ {level:.2f}" for level in profile["levels"]], box=None)
    for reward, curve in profile["curves"].items():
        table.add_row(reward, *[f"{value:.3f}" for value in curve["divergence"]])
    return table


def comparison(found: Mapping[str, Any]) -> Table:
    """Two profiles, reward by reward."""
    table = Table("reward", "correlation", "total a", "total b", "change", "95% interval", box=None)
    for reward, one in found["rewards"].items():
        change = one["change"]
        table.add_row(
            reward,
            number(one["correlation"]),
            number(one["total_a"]["value"]),
            number(one["total_b"]["value"]),
            number(change["value"], signed=True),
            f"{number(change['low'], signed=True)} to {number(change['high'], signed=True)}",
        )
    return table


def differences(report: Mapping[str, Any]) -> Table:
    """Every metric of every subject against the baseline: means, paired difference, interval, wins."""
    baseline = report["baseline"]
    others = [label for label in report["subjects"] if label != baseline]
    table = Table(*["metric", baseline, "subject's", "difference", "95% interval", "+/-"], box=None)
    for label in others:
        if len(others) > 1:
            table.add_row(label, style="underline")
        for name, metric in _metrics(report).items():
            difference = metric["differences"][label]
            table.add_row(
                name + (" (held out)" if metric.get("held_out") else ""),
                number(metric["means"][baseline]["mean"]),
                number(metric["means"][label]["mean"]),
                number(difference["mean"], signed=True),
                f"{number(difference['low'], signed=True)} to {number(difference['high'], signed=True)}",
                f"{difference['wins']}/{difference['losses']}",
                style="bold" if name == OBJECTIVE else None,
            )
    return table


def listing(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A list of things; the ids, in the first column, are never cut."""
    table = Table(box=None)
    widest = max((len(row[0]) for row in rows), default=0)
    for place, header in enumerate(headers):
        table.add_column(header, no_wrap=True, min_width=0 if place else widest)
    for row in rows:
        table.add_row(*row)
    return table


def objective_difference(report: Mapping[str, Any]) -> dict[str, Any]:
    """Paired difference of the weighted objective between the first subject and the baseline."""
    label = next(label for label in report["subjects"] if label != report["baseline"])
    difference: dict[str, Any] = report["objective"]["differences"][label]
    return difference


def number(value: float | None, *, signed: bool = False) -> str:
    """Four decimals; a dash where nothing was measured."""
    if value is None:
        return "-"
    value = round(value, 4) + 0.0  # no negative zero
    return f"{value:+.4f}" if signed else f"{value:.4f}"


def _metrics(report: Mapping[str, Any]) -> dict[str, Any]:
    objective = report["objective"]
    return ({OBJECTIVE: objective} if objective else {}) | dict(report["metrics"])
