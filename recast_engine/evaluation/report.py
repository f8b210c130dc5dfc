"""The evaluation as one self-contained HTML page: no script, no request, light and dark."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray
from PIL import Image

from recast_engine.evaluation.heatmap import heatmap_png
from recast_engine.evaluation.verdict import DIVERSITY_FLOOR, signed

MAX_CELL = 192
"""Side in pixels that images are reduced to on the page; the sample files keep them as drawn."""
GAP = 2
PLOT_FLOOR = 0.25
"""The interval plots reach at least this far, in standard deviations of the baseline."""

WORDS = {
    "up": "higher",
    "down": "lower",
    "unclear": "not confirmed",
    "none": "no difference",
}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("recast_engine.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["signed"] = lambda value: "–" if value is None else signed(value)
    environment.filters["p"] = _p_value
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    return environment


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}".replace("-", "−") if abs(value) > 1e-9 else "0"


def _p_value(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def data_uri(picture: bytes, kind: str = "png") -> str:
    """An encoded picture as an image source that needs no request."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def strip(images: NDArray[np.uint8]) -> dict[str, Any]:
    """Images (N, H, W, 3) side by side as ``{src, width, height, count}``.

    Small images are kept as they are (PNG); larger ones are reduced to ``MAX_CELL`` (WebP). Between two
    images stay ``GAP`` transparent pixels.
    """
    cells = [Image.fromarray(image) for image in images]
    if max(cells[0].size) > MAX_CELL:
        for cell in cells:
            cell.thumbnail((MAX_CELL, MAX_CELL), Image.Resampling.LANCZOS)
    width, height = cells[0].size
    row = Image.new("RGBA", (len(cells) * (width + GAP) - GAP, height))
    for number, cell in enumerate(cells):
        row.paste(cell, (number * (width + GAP), 0))
    kind = "png" if max(images.shape[1:3]) <= MAX_CELL else "webp"
    buffer = io.BytesIO()
    row.save(buffer, format=kind, quality=88)
    src = data_uri(buffer.getvalue(), kind)
    return {"src": src, "width": row.width, "height": row.height, "count": len(cells)}


def _effect(difference: Mapping[str, Any], scale: float | None, reach: float) -> dict[str, float] | None:
    """Mean and interval in percent of the plot's width, 50 being no difference."""
    if not scale or difference["low"] is None:
        return None

    def place(value: float) -> float:
        return round(50 + 50 * max(-1.0, min(1.0, value / scale / reach)), 2)

    return {
        "mean": place(difference["mean"]),
        "low": place(difference["low"]),
        "high": place(difference["high"]),
    }


def _rows(report: Mapping[str, Any], label: str) -> tuple[list[dict[str, Any]], float]:
    """Table rows of one subject, the objective first, and the reach of their common plot scale."""
    rows: list[dict[str, Any]] = []
    if report["objective"] is not None:
        rows.append(
            {
                "name": "weighted objective",
                "kind": "in standard deviations of the baseline",
                "held_out": False,
                "scale": 1.0,
            }
            | {"means": report["objective"]["means"], "difference": report["objective"]["differences"][label]}
        )
    for name, metric in report["metrics"].items():
        rows.append(
            {"name": name, "kind": metric["summary"], "held_out": metric["held_out"]}
            | {"scale": metric["baseline_std"], "means": metric["means"]}
            | {"difference": metric["differences"][label]}
        )
    ends = [
        abs(row["difference"][end]) / row["scale"]
        for row in rows
        if row["scale"] and row["difference"]["low"] is not None
        for end in ("low", "high")
    ]
    reach = max([PLOT_FLOOR, *(min(3.0, end) for end in ends)]) * 1.08
    for row in rows:
        row["effect"] = _effect(row["difference"], row["scale"], reach)
        way = row["difference"].get("direction")
        row["direction"], row["words"] = way or "", WORDS[way] if way else ""
    return rows, reach


def _contributions(report: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    """Share of every reward in the objective's change, widths in percent of the largest."""
    if report["objective"] is None:
        return []
    parts = report["objective"]["contributions"][label]
    largest = max([1e-12, *(abs(value) for value in parts.values() if value is not None)])
    return [
        {
            "name": name,
            "budget": report["objective"]["budgets"][name],
            "value": value,
            "width": round(100 * abs(value) / largest, 1) if value is not None else 0,
        }
        for name, value in parts.items()
    ]


def _pictures(
    report: Mapping[str, Any], shown: Mapping[str, NDArray[np.uint8]], prompts: Sequence[str]
) -> Any:
    """One entry per shown prompt: the prompt, and every subject's images of it, the baseline first."""
    order = sorted(report["subjects"], key=lambda label: label != report["baseline"])
    return [
        {"prompt": prompt, "strips": [{"label": label} | strip(shown[label][row]) for label in order]}
        for row, prompt in enumerate(prompts)
    ]


def render_report(
    report: Mapping[str, Any],
    shown: Mapping[str, NDArray[np.uint8]],
    prompts: Sequence[str],
    allocations: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page.

    Args:
        report: what ``evaluate`` returns.
        shown: subject -> images (rows, columns, H, W, 3), the same prompts and seeds for all.
        prompts: the prompt of every row.
        allocations: stored allocations that the subjects were trained with (``rewards``, ``budgets``,
            ``matrix``, optionally ``sigmas``, ``method``, ``title``), drawn as heatmaps.
    """
    comparisons = []
    for label in report["subjects"]:
        if label != report["baseline"]:
            rows, reach = _rows(report, label)
            parts = _contributions(report, label)
            comparisons.append({"label": label, "rows": rows, "reach": reach, "parts": parts})
    cell = next(iter(shown.values())).shape[2]
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            comparisons=comparisons,
            pictures=_pictures(report, shown, prompts),
            pixelated=cell < 128,
            zoom=max(1, round(96 / cell)) if cell < 128 else 1,
            heatmaps=[{"src": data_uri(heatmap_png(one)), **_matrix(one)} for one in allocations],
            diversity_floor=DIVERSITY_FLOOR,
        )
    )


def _matrix(allocation: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers behind a heatmap, for readers who cannot see it."""
    rows = [
        {"name": reward, "values": values, "total": sum(values) / len(values)}
        for reward, values in zip(allocation["rewards"], allocation["matrix"], strict=True)
    ]
    return {"title": allocation.get("title", ""), "steps": len(allocation["matrix"][0]), "rows": rows}
