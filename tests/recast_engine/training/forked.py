"""Trainings in processes of their own: several ranks at once, or one that is killed again and again.

    python -m tests.recast_engine.training.forked devices|kills PIPELINE FOLDER [TIMES]

A fresh process loads torch and the pipeline once and forks for every training. (The test process itself may
not be forked: it has run backward passes, after which torch refuses them in a child.)
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import EstimatorConfig, StageAllocation, TrainingConfig
from recast_engine.training import checkpoint, update
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.loop import train
from tests.recast_engine.training.tiny import PROMPTS, PixelScorer, Recorder, training_config

EPOCHS = 3
SITES = ("sampling", "scoring", "backward", "flush", "stored")


def device_config() -> TrainingConfig:
    """Batches and groups that two ranks cannot halve evenly, accumulation, KL, and a profile to measure."""
    budgets = {"redness": 1.0, "text": 1.0}
    optimizer = {"batch_size": 5, "accumulation": 2, "kl_weight": 0.01}
    config = training_config(budgets, EPOCHS, **optimizer)
    estimator = EstimatorConfig(levels=3, prompts=4, images_per_prompt=2, sampling_steps=2)
    stage = replace(config.stages[0], allocation=StageAllocation(method="recast", estimator=estimator))
    sampling = replace(config.sampling, prompts_per_epoch=3, images_per_prompt=4)
    return replace(config, stages=(stage,), sampling=sampling)


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a child; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:  # the child must not go on as its parent
        if code:
            traceback.print_exc()
        os._exit(code)


def ended(child: int) -> int:
    """Its exit code; negative: the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(
    backbone: SD3Backbone, config: TrainingConfig, folder: Path, devices: Devices = ALONE, **options: Any
) -> None:
    """One training."""
    rewards = tuple(config.stages[0].budgets)
    train(
        backbone,
        PixelScorer(*rewards),
        PROMPTS,
        config,
        observer=Recorder(),
        workdir=folder,
        devices=devices,
        **options,
    )


def run_ranks(backbone: SD3Backbone, folder: Path, size: int = 2, **options: Any) -> None:
    """A training on ``size`` ranks, each in a process."""

    def rank_of(rank: int) -> Callable[[], None]:
        def work() -> None:
            dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=size)
            run(backbone, replace(device_config(), devices=size), folder, Devices(rank, size), **options)
            dist.destroy_process_group()

        return work

    codes = [ended(child) for child in [fork(rank_of(rank)) for rank in range(size)]]
    assert codes == [0] * size, codes


def devices(backbone: SD3Backbone, folder: Path) -> None:
    """One device; two; two again; and two that go on from the first epoch of the two before."""
    assert ended(fork(lambda: run(backbone, device_config(), folder / "one"))) == 0
    run_ranks(backbone, folder / "two")
    run_ranks(backbone, folder / "again")
    run_ranks(backbone, folder / "resumed", resume_from=folder / "two" / "checkpoints" / "epoch-000002")


def kill_at(site: str, count: int, backbone: SD3Backbone) -> None:
    """Make this process kill itself when it comes to ``site`` for the ``count``-th time."""
    left = [count]

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            result = real(*args, **options)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    owner, name = {
        "sampling": (backbone, "velocity"),
        "scoring": (PixelScorer, "__call__"),
        "backward": (update, "nft_loss"),
        "flush": (checkpoint, "_flush"),
        "stored": (Recorder, "file"),
    }[site]
    setattr(owner, name, deadly(getattr(owner, name)))


def kills(backbone: SD3Backbone, folder: Path, times: int) -> None:
    """A training undisturbed, and one killed at each site in turn, or at ``times`` random moments."""
    config = training_config({"redness": 1.0, "text": 1.0}, EPOCHS + times // 4, kl_weight=0.01)
    started = time.monotonic()
    assert ended(fork(lambda: run(backbone, config, folder / "whole"))) == 0
    whole, rng = time.monotonic() - started, random.Random(7)
    deaths: dict[str, int] = dict.fromkeys(SITES, 0)

    def attempt(prepare: Callable[[], None] = lambda: None) -> int:
        def work() -> None:
            prepare()
            saved = folder / "killed" / "checkpoints"
            options: Mapping[str, Any] = {"resume_from": saved} if list(saved.glob("epoch-*")) else {}
            run(backbone, config, folder / "killed", **options)

        return fork(work)

    if times == 0:
        for site, count in zip(SITES, (7, 2, 3, 2, 2), strict=True):
            code = ended(attempt(partial(kill_at, site, count, backbone)))
            assert code == -signal.SIGKILL, (site, code)
            deaths[site] += 1
    for _ in range(times):
        child = attempt()
        time.sleep(rng.uniform(0.0, whole / 4))
        os.kill(child, signal.SIGKILL)
        assert ended(child) in (0, -signal.SIGKILL)
    assert ended(attempt()) == 0
    print(deaths if times == 0 else f"{times} kills within {whole:.1f} s of work")


def main() -> None:
    mode, pipeline, folder, *times = sys.argv[1:]
    torch.set_num_threads(1)
    backbone = SD3Backbone.from_pretrained(pipeline, id="tiny")
    if mode == "devices":
        devices(backbone, Path(folder))
    else:
        kills(backbone, Path(folder), int(times[0]))


if __name__ == "__main__":
    main()
