"""An engine without torch: does what the job's config says under ``fake``, through the real protocol."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recast_engine.errors import RewardFailure
from recast_engine.observer import Observer, Stopped

ALLOCATION = {
    "rewards": ["geneval", "ocr"],
    "steps": 2,
    "sigmas": [1.0, 0.5, 0.0],
    "budgets": {"geneval": 0.75, "ocr": 0.25},
    "method": "recast",
    "temperature": 1.0,
    "matrix": [[0.7, 0.8], [0.3, 0.2]],
    "gains": [[0.1, 0.2], [0.2, 0.1]],
    "diagnostics": {"row_residual": 0.0, "column_residual": 0.0, "iterations": 3},
}
PROFILE = {
    "rewards": ["geneval", "ocr"],
    "levels": [1.0, 0.5, 0.0],
    "curves": {"geneval": {"divergence": [0.0, 0.1, 0.3]}, "ocr": {"divergence": [0.0, 0.2, 0.3]}},
    "warnings": ["few prompts"],
    "cost": {"model_evaluations": 7, "seconds": 1.5},
}


def run(workdir: Path, observer: Observer) -> Mapping[str, Any]:
    """Run the request in ``workdir`` as ``fake`` asks: {"do": name, ...}."""
    request = json.loads((workdir / "request.json").read_text())
    fake = request["config"].get("fake", {})
    action = {
        "profile": _profile,
        "train": _train,
        "evaluate": _evaluate,
        "raise": _raise,
        "refuse": _refuse,
        "die": _die,
        "exit": lambda *_: sys.exit(3),
        "hang": _hang,
        "chatter": _chatter,
    }[fake.get("do", "train")]
    return action(request, workdir, observer, fake)


def _profile(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    observer.phase("profiling", 3)
    for level in range(3):
        observer.cost(model_evaluations=10, reward_calls=2, device_seconds=0.25)
        observer.advance(level + 1)
    observer.finding("profile", {"stage": None, "profile": PROFILE})
    return {"rewards": PROFILE["rewards"]}


def _checkpoint(workdir: Path, observer: Observer, epoch: int) -> None:
    folder = workdir / f"epoch-{epoch:06d}"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"epoch": epoch}))
    (folder / "weights.bin").write_bytes(bytes([epoch]) * 100)
    observer.file("checkpoint", folder.name, folder, {"epoch": epoch, "step": 10 * epoch, "stage": 0})


def _train(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    epochs, pause = fake.get("epochs", 3), fake.get("pause", 0.0)
    first = 0
    if request["resume_from"]:
        folder = Path(request["resume_from"])
        first = json.loads((folder / "state.json").read_text())["epoch"]
        assert folder.name == f"epoch-{first:06d}"
        assert (folder / "weights.bin").read_bytes() == bytes([first]) * 100
    else:
        observer.phase("profiling", 1)
        observer.finding("stage", {"stage": 0, "status": "started"})
        observer.finding("profile", {"stage": 0, "profile": PROFILE})
        observer.finding(
            "allocation",
            {"stage": 0, "epoch": 0, "reason": "start", "profile_stage": 0, "allocation": ALLOCATION},
        )
        observer.advance(1)
    observer.phase("training", epochs)
    observer.advance(first)
    for epoch in range(first + 1, epochs + 1):
        time.sleep(pause)
        observer.metrics(epoch, {"objective": epoch / 10, "grad_norm": float("nan")})
        observer.advance(epoch)
        _checkpoint(workdir, observer, epoch)
        if epoch == fake.get("die_at") and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if fake.get("die_always"):
            os.kill(os.getpid(), signal.SIGKILL)
        if observer.should_stop():
            raise Stopped
    adapter = workdir / "final.safetensors"
    adapter.write_bytes(b"adapter")
    meta = {"epoch": epochs, "step": 10 * epochs, "rank": 4, "alpha": 8.0, "base_model": "miniature"}
    observer.file("adapter", adapter.name, adapter, {**meta, "final": True})
    return {"epochs": epochs, "resumed_at": first}


def _evaluate(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    seen = {name: Path(path).read_bytes().decode() for name, path in request["adapters"].items()}
    report = workdir / "report.html"
    report.write_text("<html></html>")
    observer.file("report", "report.html", report, {})
    observer.finding("warning", {"text": "one reward failed on 2 images"})
    observer.finding("evaluation", {"verdict": "better", "adapters": seen, "odd": float("inf")})
    return {"verdict": "better"}


def _raise(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    raise RuntimeError(f"secret path {workdir}")


def _refuse(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    raise RewardFailure("ocr failed on 40% of the images")


def _die(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    print("last words", flush=True)
    os.kill(os.getpid(), getattr(signal, fake.get("signal", "SIGKILL")))
    time.sleep(60)
    return {}


def _hang(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    observer.phase("hanging", 1)
    time.sleep(600)
    return {}


def _chatter(request: Any, workdir: Path, observer: Observer, fake: Any) -> Mapping[str, Any]:
    """Prints between events, and advances far more often than anybody can write."""
    observer.phase("talking", 20_000)
    observer.cost(reward_calls=1)
    for number in range(20_000):
        observer.advance(number + 1)
    print("noise on standard output", flush=True)
    observer.phase("again", 5)
    observer.cost(reward_calls=1)
    observer.advance(3)
    return {"threads": os.environ["OMP_NUM_THREADS"], "policy": os.environ["OMP_WAIT_POLICY"]}
