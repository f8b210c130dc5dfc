"""Compares subjects (base model, adapters) on the same prompts and seeds, and writes the report."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import safe_open

from recast_engine.backbones.base import Backbone
from recast_engine.config import EvaluationConfig, dump
from recast_engine.errors import ConfigError
from recast_engine.evaluation import objective as objectives
from recast_engine.evaluation import verdict
from recast_engine.evaluation.comparison import compare
from recast_engine.evaluation.drawing import SEED_RULE, Drawn, Plan, Scorer, draw, save_grid
from recast_engine.evaluation.report import render_report
from recast_engine.observer import Observer
from recast_engine.prompts import Prompt, prompt_set_hash
from recast_engine.training.adapters import ALLOCATIONS_KEY, loaded_adapter

VERSIONED = ("recast", "torch", "diffusers", "transformers", "peft", "numpy", "rapidocr")
"""Packages whose versions a report records."""


def evaluate(
    backbone: Backbone,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    adapters: Mapping[str, Path | None],
    *,
    observer: Observer,
    workdir: Path,
) -> dict[str, Any]:
    """Evaluate the subjects of ``config`` and return the report as JSON-safe data.

    Every subject draws the same prompts with the same seeds (``drawing.SEED_RULE``) by the plain Euler
    solver, so that a plain diffusers pipeline can draw any image again. Sample grids and ``report.html`` go
    to the observer as files.

    Args:
        adapters: label of every subject -> adapter file, None for the base model.
        workdir: an existing folder for the files.

    Returns:
        ``verdict`` (text), ``findings`` ([{tone, text}]), ``subjects`` (labels), ``baseline``, ``model``,
        ``prompts`` {used, available, sha256}, ``images_per_subject``, ``steps``, ``solver``, ``seeds``,
        ``images_per_prompt``, ``seed_rule``,
        ``metrics`` {reward: {objective, summary, held_out, higher_is_better, prompts, baseline_std,
        means {label: MeanInterval + failed}, differences {label: PairedDifference + p_holm, direction}}},
        ``objective`` None or {budgets, reference {reward: {mean, std}}, means, differences + direction,
        contributions {label: {reward: mean difference}}},
        ``diversity`` {label: {mean, ratio}}, ``samples`` [{label, name}], ``provenance`` {label: header of
        the adapter file}, ``config``, ``versions``, ``cost``. Numbers that do not exist are None.

    Raises:
        ConfigError: a subject without an entry in ``adapters``, or an objective over other rewards.
        Stopped: the observer asked to stop.
    """
    labels = [subject.label for subject in config.subjects]
    if missing := [label for label in labels if label not in adapters]:
        raise ConfigError(f"subjects without an adapter file: {', '.join(missing)}")
    budgets = None if config.objective is None else objectives.normalised(config.objective, scorer.rewards)
    plan = Plan.of(prompts, config)
    before = backbone.evaluations
    observer.phase("evaluating", len(labels) * plan.images)
    drawn: dict[str, Drawn] = {}
    for label in labels:
        with loaded_adapter(backbone, adapters[label]):
            drawn[label] = draw(
                backbone, scorer, plan, config.steps, observer=observer, done=len(drawn) * plan.images
            )
    report = _header(config, plan, prompts, labels)
    applies = scorer.applicable(plan.prompts)
    report |= compare(drawn, scorer.rewards, applies, config.baseline, budgets, seed=config.seeds[0])
    report["samples"] = _save_samples(drawn, plan, config.steps, observer, workdir)
    report["provenance"] = {label: _provenance(adapters[label]) for label in labels}
    report["cost"] = {
        "model_evaluations": backbone.evaluations - before,
        "reward_calls": sum(one.reward_calls for one in drawn.values()),
        "proposal_images": 0,
        "device_seconds": round(sum(one.seconds for one in drawn.values()), 3),
    }
    report["verdict"], report["findings"] = verdict.write(report)
    path = workdir / "report.html"
    shown = {label: one.shown for label, one in drawn.items()}
    page = render_report(
        report,
        shown,
        [plan.prompts[row].prompt for row in plan.shown],
        _allocations(report["provenance"]),
    )
    path.write_text(page, encoding="utf-8")
    observer.file("report", path.name, path, {})
    return report


def _header(
    config: EvaluationConfig, plan: Plan, prompts: Sequence[Prompt], labels: list[str]
) -> dict[str, Any]:
    return {
        "subjects": labels,
        "baseline": config.baseline,
        "model": config.model,
        "prompts": {"used": len(plan.prompts), "available": len(prompts), "sha256": prompt_set_hash(prompts)},
        "images_per_subject": plan.images,
        "images_per_prompt": config.images_per_prompt,
        "seeds": list(config.seeds),
        "seed_rule": SEED_RULE,
        "steps": config.steps,
        "solver": "euler",
        "config": dump(config),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in VERSIONED},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _save_samples(
    drawn: Mapping[str, Drawn], plan: Plan, steps: int, observer: Observer, workdir: Path
) -> list[dict[str, str]]:
    samples = []
    for number, (label, one) in enumerate(drawn.items()):
        slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
        path = workdir / f"evaluation-{number:02d}-{slug or 'subject'}.png"
        observer.file("samples", path.name, path, {"label": label, **save_grid(one, plan, steps, path)})
        samples.append({"label": label, "name": path.name})
    return samples


def _provenance(adapter: Path | None) -> dict[str, str]:
    """The adapter file's header: what was trained, as far as the trainer recorded it."""
    if adapter is None:
        return {}
    with safe_open(adapter, framework="numpy") as file:
        header: dict[str, str] = file.metadata() or {}
    return header


def _allocations(provenance: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """The allocations that the subjects were trained with, where their files carry them."""
    found = []
    for label, header in provenance.items():
        for allocation in json.loads(header.get(ALLOCATIONS_KEY, "[]")):
            stage, epoch = allocation["stage"] + 1, allocation["epoch"]  # a refreshed stage has several
            found.append(allocation | {"title": f"{label}, stage {stage}, from epoch {epoch + 1}"})
    return found
