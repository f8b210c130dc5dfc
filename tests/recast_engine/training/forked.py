"""Trainings in processes of their own: several ranks at once, or one that is killed again and again.

    python -m tests.recast_engine.training.forked devices|kills|moments PIPELINE FOLDER [SEED]

A fresh process loads torch and the pipeline once and forks for every training. (The test process itself may
not be forked: it has run backward passes, after which torch refuses them in a child.)
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import EstimatorConfig, StageAllocation, TrainingConfig
from recast_engine.profiling import running
from recast_engine.training import checkpoint, refresh, rollouts, update
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.loop import train
from tests.recast_engine.training.tiny import PROMPTS, PixelScorer, Recorder, training_config

EPOCHS = 3
SITES = ("sampling", "scoring", "backward", "write", "stored")


def device_config() -> TrainingConfig:
    """Batches and groups that two ranks cannot halve evenly, accumulation, KL, a profile to measure and to
    keep running, by which the allocation is projected anew."""
    budgets = {"redness": 1.0, "text": 1.0}
    optimizer = {"batch_size": 5, "accumulation": 2, "kl_weight": 0.01}
    config = training_config(budgets, EPOCHS, **optimizer)
    estimator = EstimatorConfig(levels=3, prompts=4, images_per_prompt=2, sampling_steps=2)
    allocation = StageAllocation(estimator=estimator, refresh="every_n", refresh_every=2)
    stage = replace(config.stages[0], allocation=allocation)
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
) -> Recorder:
    """One training, and what it told."""
    rewards, told = tuple(config.stages[0].budgets), Recorder()
    train(
        backbone,
        PixelScorer(*rewards),
        PROMPTS,
        config,
        observer=told,
        workdir=folder,
        devices=devices,
        **options,
    )
    return told


def run_and_count(
    backbone: SD3Backbone, config: TrainingConfig, folder: Path, devices: Devices = ALONE, **options: Any
) -> None:
    """One training, whose cost is written beside ``folder``."""
    told = run(backbone, config, folder, devices, **options)
    if devices.leads:
        counts = {
            name: sum(cost[name] for cost in told.costs) for name in ("model_evaluations", "reward_calls")
        }
        folder.with_suffix(".json").write_text(json.dumps(counts))


def run_ranks(backbone: SD3Backbone, folder: Path, size: int = 2, **options: Any) -> None:
    """A training on ``size`` ranks, each in a process."""

    def rank_of(rank: int) -> Callable[[], None]:
        def work() -> None:
            dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=size)
            config = replace(device_config(), devices=size)
            run_and_count(backbone, config, folder, Devices(rank, size), **options)
            dist.destroy_process_group()

        return work

    codes = [ended(child) for child in [fork(rank_of(rank)) for rank in range(size)]]
    assert codes == [0] * size, codes


def devices(backbone: SD3Backbone, folder: Path) -> None:
    """One device; two; two again; and two that go on from the first epoch of the two before."""
    assert ended(fork(lambda: run_and_count(backbone, device_config(), folder / "one"))) == 0
    run_ranks(backbone, folder / "two")
    run_ranks(backbone, folder / "again")
    run_ranks(backbone, folder / "resumed", resume_from=folder / "two" / "checkpoints" / "epoch-000002")


@dataclass(frozen=True)
class Moment:
    """When a training is killed: the ``count``-th time that it comes to ``site``, before or after it."""

    site: str
    count: int
    before: bool = False


def on_every_visit(backbone: SD3Backbone, visit: Callable[[str, bool], None]) -> None:
    """From now on call ``visit(site, before)`` before and after each thing that this process does at a site.

    ``backward`` is visited inside: before anything of the model, and once its last layers are through.
    """
    sampling = [False]

    def watched(owner: Any, name: str, site: str, only: Callable[[], bool] = lambda: True) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            told = only()
            if told:
                visit(site, True)
            result = real(*args, **options)
            if told:
                visit(site, False)
            return result

        setattr(owner, name, wrapped)

    def sample(*args: Any, **options: Any) -> Any:
        sampling[0] = True
        try:
            return drawn(*args, **options)
        finally:
            sampling[0] = False

    def nft_loss(
        clean: Tensor, noisy: Tensor, sigma: Tensor, velocity: Tensor, *args: Any, **options: Any
    ) -> Any:
        loss = lossed(clean, noisy, sigma, velocity, *args, **options)
        loss.total.register_hook(lambda _: visit("backward", True))
        velocity.register_hook(lambda _: visit("backward", False))
        return loss

    drawn, rollouts.sample = rollouts.sample, sample
    lossed, update.nft_loss = update.nft_loss, nft_loss
    watched(backbone, "velocity", "sampling", lambda: sampling[0])
    watched(PixelScorer, "__call__", "scoring")
    watched(checkpoint, "save_file", "write")
    watched(checkpoint, "_flush", "write")
    watched(Recorder, "file", "stored")


def kill_at(moment: Moment, backbone: SD3Backbone) -> None:
    """Make this process kill itself at ``moment``."""
    seen = [0]

    def visit(site: str, before: bool) -> None:
        if (site, before) == (moment.site, moment.before):
            seen[0] += 1
            if seen[0] == moment.count:
                os.kill(os.getpid(), signal.SIGKILL)

    on_every_visit(backbone, visit)


def visits(backbone: SD3Backbone, config: TrainingConfig, folder: Path) -> dict[str, int]:
    """A training undisturbed; how often it came to each site."""
    target = folder / "visits.json"

    def work() -> None:
        counts = dict.fromkeys(SITES, 0)

        def visit(site: str, before: bool) -> None:
            counts[site] += before

        on_every_visit(backbone, visit)
        run(backbone, config, folder / "whole")
        target.write_text(json.dumps(counts))

    assert ended(fork(work)) == 0
    return dict(json.loads(target.read_text()))


def attempt(backbone: SD3Backbone, config: TrainingConfig, folder: Path, moment: Moment | None = None) -> int:
    """One attempt at the training in ``folder``, from its newest checkpoint; its exit code."""

    def work() -> None:
        if moment is not None:
            kill_at(moment, backbone)
        saved = folder / "checkpoints"
        options: Mapping[str, Any] = {"resume_from": saved} if list(saved.glob("epoch-*")) else {}
        run(backbone, config, folder, **options)

    return ended(fork(work))


def kills(backbone: SD3Backbone, folder: Path) -> None:
    """A training undisturbed, and one killed at each site in turn."""
    config = training_config({"redness": 1.0, "text": 1.0}, EPOCHS, kl_weight=0.01)
    visits(backbone, config, folder)
    for site, count in zip(SITES, (7, 2, 3, 2, 2), strict=True):
        code = attempt(backbone, config, folder / "killed", Moment(site, count))
        assert code == -signal.SIGKILL, (site, code)
    assert attempt(backbone, config, folder / "killed") == 0


def moments(backbone: SD3Backbone, folder: Path, seed: int) -> None:
    """A training undisturbed, and one for each of 20 random moments that is killed then and resumed.

    Moments are spread evenly over sampling, scoring, backward and the writing of checkpoints, and over the
    visits of each.
    """
    config, rng = device_config(), random.Random(seed)
    counts = visits(backbone, config, folder)
    for number in range(20):
        site = SITES[:4][number % 4]
        moment = Moment(site, rng.randint(1, counts[site]), before=rng.random() < 0.5)
        target = folder / f"killed-{number:02d}"
        code = attempt(backbone, config, target, moment)
        assert code == -signal.SIGKILL, (moment, code)
        saved = sorted(path.name for path in (target / "checkpoints").glob("epoch-*"))
        assert attempt(backbone, config, target) == 0
        print(moment, "resumed from", saved[-1] if saved else "the start", flush=True)


def main() -> None:
    mode, pipeline, folder, *seed = sys.argv[1:]
    torch.set_num_threads(1)
    running.FEWEST_PROMPTS, refresh.IMAGES_PER_UNIT = 2, 2  # four prompts are all there are here
    backbone = SD3Backbone.from_pretrained(pipeline, id="tiny")
    if mode == "devices":
        devices(backbone, Path(folder))
    elif mode == "kills":
        kills(backbone, Path(folder))
    else:
        moments(backbone, Path(folder), int(seed[0]))


if __name__ == "__main__":
    main()
