from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from recast.tables import curves, differences, listing, number, objective_difference


def text(table: Table, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue().splitlines()


def metric(base: float, other: float, low: float | None, *, held_out: bool = False) -> dict[str, Any]:
    high = None if low is None else low + 0.2
    return {
        "held_out": held_out,
        "means": {"base": {"mean": base}, "tuned": {"mean": other}},
        "differences": {"tuned": {"mean": other - base, "low": low, "high": high, "wins": 5, "losses": 3}},
    }


def report(objective: bool = True) -> dict[str, Any]:
    return {
        "baseline": "base",
        "subjects": ["base", "tuned"],
        "objective": metric(-0.0, 0.125, 0.025) if objective else None,
        "metrics": {"ocr": metric(0.5, 0.25, -0.35), "aesthetic": metric(0.5, 0.5, None, held_out=True)},
    }


def test_a_report_becomes_a_row_per_metric() -> None:
    lines = text(differences(report()))
    assert len(lines) == 4
    assert lines[1].split() == [
        "weighted",
        "objective",
        "0.0000",
        "0.1250",
        "+0.1250",
        "+0.0250",
        "to",
        "+0.2250",
        "5/3",
    ]
    assert "-0.2500" in lines[2]
    assert "aesthetic (held out)" in lines[3]
    assert lines[3].split()[-4:] == ["-", "to", "-", "5/3"]
    assert len(text(differences(report(objective=False)))) == 3


def test_the_objectives_difference_is_the_first_subjects() -> None:
    assert objective_difference(report())["low"] == 0.025


def test_numbers_have_four_decimals_and_no_negative_zero() -> None:
    assert [number(None), number(-0.00001), number(0.5, signed=True)] == ["-", "0.0000", "+0.5000"]


def test_ids_are_never_cut() -> None:
    identifier = "train_01m8r2b1yd1t9pk5bxk9dqnmy3"
    lines = text(listing(["id", "name"], [[identifier, "a long name " * 9]]), width=50)
    assert lines[1].split()[0] == identifier
    assert len(text(listing(["id"], []))) == 1


def test_curves_list_divergence_by_noise_level() -> None:
    profile = {"levels": [0.0, 0.5, 1.0], "curves": {"ocr": {"divergence": [0.4, 0.1234, 0.0]}}}
    lines = text(curves(profile))
    assert "σ 0.50" in lines[0]
    assert lines[1].split() == ["ocr", "0.400", "0.123", "0.000"]
