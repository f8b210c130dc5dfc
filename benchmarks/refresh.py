"""What watching for drift costs and finds: a training of the miniature with `frozen`, one with `on_drift`.

    python benchmarks/refresh.py [--epochs 20] [--prompts 16] [--images 12] [--seed 0] [--threads 1]

Both trainings have the same seed and rest on the same profile. Reports the share of extra model evaluations,
the re-projections with their reasons, and, from profiles measured before and after each training with the
same prompts and seeds, each reward's total and what the change would do to the allocation. Prints one JSON
object. About five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recast_engine import miniature
from recast_engine.backbones.base import Backbone
from recast_engine.backbones.load import load_backbone
from recast_engine.config import (
    EstimatorConfig,
    LoRAConfig,
    OptimizerConfig,
    Refresh,
    SamplingConfig,
    StageAllocation,
    StageConfig,
    TrainingConfig,
)
from recast_engine.observer import NullObserver
from recast_engine.profiling import Profile
from recast_engine.profiling.comparison import compare
from recast_engine.profiling.measure import measure_profile
from recast_engine.prompts import Prompt, parse_prompts
from recast_engine.rewards.scoring import Scorer, load_scorer
from recast_engine.training.adapters import loaded_adapter
from recast_engine.training.loop import train

BUDGETS = {"clipscore": 0.2, "hpsv2": 0.15, "pickscore": 0.15, "geneval": 0.3, "ocr": 0.2}  # the quickstart's
STEPS = 10


class Listener(NullObserver):
    """Keeps allocations, the last metrics, and the seconds of all epochs."""

    def __init__(self) -> None:
        self.allocations: list[Mapping[str, Any]] = []
        self.history: list[Mapping[str, float]] = []
        self.evaluations = 0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.history.append(values)

    def finding(self, kind: str, payload: Mapping[str, Any]) -> None:
        if kind == "allocation":
            self.allocations.append(payload)

    def cost(self, *, model_evaluations: int = 0, **_: float) -> None:
        self.evaluations += model_evaluations


def training(
    backbone: Backbone,
    scorer: Scorer,
    prompts: list[Prompt],
    profile: Profile,
    refresh: Refresh,
    arguments: argparse.Namespace,
    folder: Path,
) -> tuple[Path, dict[str, Any]]:
    """One training from the base model; its adapter, and what happened."""
    allocation = StageAllocation(profile="before", refresh=refresh)
    stage = StageConfig(budgets=BUDGETS, epochs=arguments.epochs, allocation=allocation)
    config = TrainingConfig(
        model="miniature",
        prompt_set="train",
        stages=(stage,),
        lora=LoRAConfig(rank=16, alpha=32.0),
        sampling=SamplingConfig(
            steps=STEPS, prompts_per_epoch=arguments.prompts, images_per_prompt=arguments.images
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            beta=0.2,
            advantage_clip=1.0,
            kl_weight=0.0,
            weight_decay=0.0,
            timesteps_per_image=3,
        ),
        seed=arguments.seed,
        samples_every=100_000,
        checkpoint_every=100_000,
    )
    listener, started = Listener(), time.perf_counter()
    result = train(
        backbone,
        scorer,
        prompts,
        config,
        observer=listener,
        workdir=folder / refresh,
        profiles={"before": profile.to_dict()},
    )
    last = listener.history[-1]
    return result.adapter, {
        "objective": last["objective"],
        "seconds": round(time.perf_counter() - started, 1),
        "model_evaluations": listener.evaluations,
        "share_of_evaluations": last.get("refresh/share", 0.0),
        "allocations": [{"epoch": a["epoch"], "reason": a["reason"]} for a in listener.allocations],
        "running": {name: last[name] for name in last if name.startswith(("drift/", "profile/"))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per epoch")
    parser.add_argument("--images", type=int, default=12, help="images per prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    estimator = EstimatorConfig(levels=5, prompts=48, images_per_prompt=6, advantage_clip=1.0)
    prompts = parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))
    backbone, scorer = load_backbone("miniature"), load_scorer(tuple(BUDGETS), "miniature")
    before = measure_profile(backbone, scorer, prompts, estimator, seed=arguments.seed)
    sigmas = backbone.sigmas(STEPS).tolist()
    report: dict[str, Any] = {"summed_total_before": sum(before.totals.values())}
    with tempfile.TemporaryDirectory() as folder:
        for refresh in ("frozen", "on_drift"):
            adapter, facts = training(backbone, scorer, prompts, before, refresh, arguments, Path(folder))
            with loaded_adapter(backbone, adapter):
                after = measure_profile(backbone, scorer, prompts, estimator, seed=arguments.seed)
            found = compare(before, after, sigmas, budgets=BUDGETS)
            report[refresh] = facts | {
                "summed_total_after": sum(after.totals.values()),
                "verdicts": [reward.verdict for reward in found.rewards.values()],
                "largest_weight_change": found.largest_weight_change,
                "mean_weight_change": found.mean_weight_change,
            }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
