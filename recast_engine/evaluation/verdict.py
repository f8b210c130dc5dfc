"""What the figures of an evaluation support, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

SIGNIFICANT = 0.05
DIVERSITY_FLOOR = 0.8
"""Share of the baseline's diversity below which a collapse is suspected."""
FEW_PROMPTS = 20

Direction = Literal["up", "down", "none", "unclear"]
Finding = dict[str, str]


def direction(difference: Mapping[str, Any], p_value: float | None) -> Direction:
    """What a paired difference shows.

    ``up`` or ``down``: the interval of the mean leaves zero out, ``p_value`` is below 5%, and most prompts go
    the same way; ``unclear``: one of the two only, or most prompts go against the mean; ``none``: no
    difference found.
    """
    low, high = difference["low"], difference["high"]
    if low is None or high is None:
        return "none"
    leaves_zero_out = low > 0 or high < 0
    rejected = p_value is not None and p_value < SIGNIFICANT
    if leaves_zero_out and rejected and (low > 0) == (difference["wins"] > difference["losses"]):
        return "up" if low > 0 else "down"
    return "unclear" if leaves_zero_out or rejected else "none"


def objective_direction(difference: Mapping[str, Any]) -> Direction:
    """By the interval alone: the objective is one comparison that was named beforehand."""
    if difference["low"] is None:
        return "none"
    return "up" if difference["low"] > 0 else "down" if difference["high"] < 0 else "none"


def signed(value: float) -> str:
    """Three significant digits with a sign, a real minus."""
    text = f"{value:+.3g}" if abs(value) > 1e-9 else "0"
    return text.replace("-", "−")


def interval(difference: Mapping[str, Any]) -> str:
    """ "+0.12 (95% interval +0.05 to +0.19)"."""
    if difference["mean"] is None:
        return "not measured"
    if difference["low"] is None:
        return f"{signed(difference['mean'])} (one prompt: no interval)"
    low, high = signed(difference["low"]), signed(difference["high"])
    return f"{signed(difference['mean'])} (95% interval {low} to {high})"


def write(report: Mapping[str, Any]) -> tuple[str, list[Finding]]:
    """The verdict as one text, and the same as findings ``{"tone", "text"}`` for a page.

    Tones: ``good``, ``bad``, ``neutral``, ``caution``.
    """
    others = [label for label in report["subjects"] if label != report["baseline"]]
    findings: list[Finding] = []
    for label in others:
        findings += [_headline(report, label), *_metrics(report, label), *_diversity(report, label)]
    if not others:
        findings.append(_finding("neutral", "Only the baseline was evaluated: there is nothing to compare."))
    findings += _failures(report)
    findings.append(_scope(report))
    return " ".join(finding["text"] for finding in findings), findings


def _finding(tone: str, text: str) -> Finding:
    return {"tone": tone, "text": text}


def _headline(report: Mapping[str, Any], label: str) -> Finding:
    pair = f"“{label}” against “{report['baseline']}”"
    if report["objective"] is None:
        return _count_metrics(report, label, pair)
    difference = report["objective"]["differences"][label]
    if difference["low"] is None:
        return _finding("caution", f"{pair}: too little was scored to compare the weighted objective.")
    figures = (
        f"{interval(difference)} standard deviations of the baseline's scores; higher on "
        f"{difference['wins']} of {difference['prompts']} prompts, lower on {difference['losses']}"
    )
    if difference["direction"] == "up":
        return _finding("good", f"{pair}: the weighted objective is higher: {figures}.")
    if difference["direction"] == "down":
        return _finding("bad", f"{pair}: the weighted objective is lower: {figures}.")
    return _finding("neutral", f"{pair}: no difference found in the weighted objective: {figures}.")


def _directions(report: Mapping[str, Any], label: str) -> dict[str, Direction]:
    return {name: metric["differences"][label]["direction"] for name, metric in report["metrics"].items()}


def _count_metrics(report: Mapping[str, Any], label: str, pair: str) -> Finding:
    shown = list(_directions(report, label).values())
    up, down = shown.count("up"), shown.count("down")
    if not up and not down:
        return _finding("neutral", f"{pair}: no clear difference found in any of {len(shown)} metrics.")
    tone = "good" if not down else "bad" if not up else "caution"
    return _finding(tone, f"{pair}: of {len(shown)} metrics, {up} clearly higher and {down} clearly lower.")


def _metrics(report: Mapping[str, Any], label: str) -> list[Finding]:
    """One sentence per kind of outcome, and one for the held-out metrics."""
    shown = _directions(report, label)
    trained = {name: way for name, way in shown.items() if not report["metrics"][name]["held_out"]}
    held_out = {name: way for name, way in shown.items() if report["metrics"][name]["held_out"]}

    def figures(name: str) -> str:
        difference = report["metrics"][name]["differences"][label]
        text = f"{name} {interval(difference)}"
        if shown[name] != "unclear":
            return text
        return f"{text}, higher on {difference['wins']} of {difference['prompts']} prompts"

    sentences = {
        "up": ("good", "Clearly higher: {}."),
        "down": ("bad", "Clearly lower: {}."),
        "unclear": ("caution", "Suggested but not confirmed after correction for {count} metrics: {}."),
        "none": ("neutral", "No difference found: {}."),
    }
    findings = []
    for way, (tone, sentence) in sentences.items():
        names = [name for name, found in trained.items() if found == way]
        if names:
            text = sentence.format("; ".join(figures(name) for name in names), count=len(shown))
            findings.append(_finding(tone, text))
    meaning = {
        "up": ("good", "rises too, so the gain is not only in what was optimised"),
        "down": ("bad", "falls: training may be exploiting its rewards"),
        "unclear": ("caution", "points one way without being confirmed"),
        "none": ("neutral", "shows no difference"),
    }
    for name, way in held_out.items():
        tone, words = meaning[way]
        findings.append(_finding(tone, f"Held out from training, {figures(name)} {words}."))
    return findings


def _diversity(report: Mapping[str, Any], label: str) -> list[Finding]:
    ratio = report["diversity"][label]["ratio"]
    if ratio is None or ratio >= DIVERSITY_FLOOR:
        return []
    text = f"Images of one prompt differ {1 - ratio:.0%} less than the baseline's"
    return [_finding("caution", f"{text}: look for a collapse of variety.")]


def _failures(report: Mapping[str, Any]) -> list[Finding]:
    parts = [
        f"{metric['means'][label]['failed']} scores of {name} for “{label}”"
        for name, metric in report["metrics"].items()
        for label in report["subjects"]
        if metric["means"][label]["failed"]
    ]
    if not parts:
        return []
    return [_finding("caution", f"Failed and left out, not counted as 0: {', '.join(parts)}.")]


def _scope(report: Mapping[str, Any]) -> Finding:
    used, images = report["prompts"]["used"], report["images_per_subject"]
    text = f"This rests on {used} prompts and {images} images a subject at {report['steps']} steps"
    if used < FEW_PROMPTS:
        text += "; with so few prompts an effect must be large to be found, and a miss means little"
    return _finding("neutral", f"{text}. It says nothing about other kinds of prompts or about human taste.")
