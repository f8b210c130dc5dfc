"""Seconds per training epoch and per profile on the miniature, and what they are spent on.

    python benchmarks/training.py [--epochs 3] [--threads 2] [--rewards clipscore hpsv2 pickscore geneval ocr]

Prints one JSON object. The first epoch (which also warms caches) is left out of the means.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recast_engine import miniature
from recast_engine.backbones.load import load_backbone
from recast_engine.config import (
    EstimatorConfig,
    LoRAConfig,
    OptimizerConfig,
    SamplingConfig,
    StageAllocation,
    StageConfig,
    TrainingConfig,
)
from recast_engine.observer import NullObserver
from recast_engine.profiling.measure import measure_profile
from recast_engine.prompts import parse_prompts
from recast_engine.rewards.scoring import load_scorer
from recast_engine.training.loop import train

PARTS = ("sampling", "scoring", "training")


class History(NullObserver):
    """Keeps the metrics of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[Mapping[str, float]] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.epochs.append(values)


def training(rewards: tuple[str, ...], epochs: int) -> dict[str, Any]:
    """Seconds of an epoch of 8 x 16 images, 4 training steps an image."""
    stage = StageConfig(
        budgets=dict.fromkeys(rewards, 1.0), epochs=epochs + 1, allocation=StageAllocation(method="static")
    )
    config = TrainingConfig(
        model="miniature",
        prompt_set="train",
        stages=(stage,),
        lora=LoRAConfig(rank=16, alpha=32.0),
        sampling=SamplingConfig(steps=10, prompts_per_epoch=8, images_per_prompt=16),
        optimizer=OptimizerConfig(timesteps_per_image=4, kl_weight=0.0),
        samples_every=1000,
        checkpoint_every=1000,
    )
    history = History()
    prompts = parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))
    scorer = load_scorer(rewards, "miniature")
    with tempfile.TemporaryDirectory() as folder:
        train(load_backbone("miniature"), scorer, prompts, config, observer=history, workdir=Path(folder))
    seconds = {part: np.mean([m[f"seconds/{part}"] for m in history.epochs[1:]]) for part in PARTS}
    total = sum(seconds.values())
    return {
        "images": 128,
        "seconds_per_epoch": round(float(total), 2),
        "share": {part: round(float(value / total), 3) for part, value in seconds.items()},
    }


def profile(rewards: tuple[str, ...]) -> dict[str, Any]:
    """Seconds of a profile of 24 prompts x 8 images on 5 levels."""
    estimator = EstimatorConfig(levels=5, prompts=24, images_per_prompt=8)
    prompts = parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))
    backbone, scorer = load_backbone("miniature"), load_scorer(rewards, "miniature")
    started = time.perf_counter()
    result = measure_profile(backbone, scorer, prompts, estimator, seed=0, observer=NullObserver())
    return {
        "clean_images": 24 * 8,
        "levels": 5,
        "seconds": round(time.perf_counter() - started, 2),
        "cost": dict(result.cost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rewards", nargs="+", default=["clipscore", "hpsv2", "pickscore", "geneval", "ocr"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rewards = tuple(arguments.rewards)
    report = {
        "rewards": rewards,
        "threads": arguments.threads,
        "epoch": training(rewards, arguments.epochs),
        "profile": profile(rewards),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
