"""What a CUDA device does with this package; prints a JSON object for each part. ``gpu_check.sh`` runs it.

1. SD3.5-Medium's architecture at 512 pixels with random weights, against the reference's compute pattern
   (``full_size.py``).
2. A short profile and training of the miniature through the engine's own entry point. Fails if a loss is not
   finite, if the adapter's weights stayed zero, or if the allocation misses a budget.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from full_size import SIZES, measure_what_fits
from safetensors.numpy import load_file

from recast_engine import miniature
from recast_engine.observer import NullObserver
from recast_engine.run import Request, run

REWARDS = ("clipscore", "hpsv2", "geneval")
STEPS = 10


class Listener(NullObserver):
    """Keeps metrics, allocations and the final adapter's weights."""

    def __init__(self) -> None:
        self.epochs: list[Mapping[str, float]] = []
        self.allocations: list[Mapping[str, Any]] = []
        self.adapter: dict[str, np.ndarray] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.epochs.append(values)

    def finding(self, kind: str, payload: Mapping[str, Any]) -> None:
        if kind == "allocation":
            self.allocations.append(payload["allocation"])

    def file(self, kind: str, name: str, path: Path, metadata: Mapping[str, Any]) -> None:
        if kind == "adapter":
            self.adapter = load_file(path)


def requests(epochs: int) -> dict[str, Request]:
    """The profile and the training, as a worker would hand them to the engine."""
    estimator = {"levels": 5, "prompts": 32, "images_per_prompt": 8, "sampling_steps": STEPS}
    common = {"model": "miniature", "prompt_set": "train", "seed": 0}
    stage = {
        "budgets": dict.fromkeys(REWARDS, 1.0),
        "epochs": epochs,
        "allocation": {"method": "recast", "estimator": estimator},
    }
    sampling = {"steps": STEPS, "prompts_per_epoch": 16, "images_per_prompt": 16, "batch_size": 256}
    optimizer = {"batch_size": 128}
    prompts = miniature.prompt_file("train")
    return {
        "profile": Request("profile", {**common, "rewards": list(REWARDS), "estimator": estimator}, prompts),
        "training": Request(
            "training", {**common, "stages": [stage], "sampling": sampling, "optimizer": optimizer}, prompts
        ),
    }


def check(listener: Listener) -> None:
    """What must hold on any device."""
    assert all(math.isfinite(value) for epoch in listener.epochs for value in epoch.values())
    assert any(np.abs(weights).max() > 0 for name, weights in listener.adapter.items() if "lora_B" in name)
    for allocation in listener.allocations:
        shares = np.sum(allocation["matrix"], axis=1) / STEPS
        np.testing.assert_allclose(shares, np.full(len(REWARDS), 1 / len(REWARDS)), atol=1e-9)


def full_size(size: str, device: torch.device) -> dict[str, Any]:
    """Part 1: 16 images in 10 steps, two optimiser steps over two noise levels of each."""
    return measure_what_fits(SIZES[size], device, images=16, steps=STEPS, training_batch=8, repeats=3)


def whole_miniature(epochs: int) -> dict[str, Any]:
    """Part 2."""
    seconds: dict[str, float] = {}
    listener = Listener()
    for name, request in requests(epochs).items():
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            run(request, Path(folder), listener)
            seconds[name] = round(time.perf_counter() - started, 2)
    check(listener)
    parts = ("sampling", "scoring", "training")
    last = {part: round(listener.epochs[-1][f"seconds/{part}"], 3) for part in parts}
    return {"seconds": seconds, "last_epoch_seconds": last, "images_per_epoch": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3, help="of the miniature; 0 leaves it out")
    parser.add_argument("--device", default="cuda", help="of the full-size architecture")
    parser.add_argument("--size", choices=SIZES, default="medium")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__}
    report["full_size"] = full_size(arguments.size, device)
    print(json.dumps(report, indent=2), flush=True)
    if arguments.epochs:
        print(json.dumps({"miniature": whole_miniature(arguments.epochs)}, indent=2))


if __name__ == "__main__":
    main()
