"""The training run (METHOD section 6), from prompts and budgets to an adapter."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recast_engine.backbones.base import Backbone
from recast_engine.config import TrainingConfig
from recast_engine.observer import NullObserver, Observer, Stopped
from recast_engine.prompts import Prompt
from recast_engine.training import stages
from recast_engine.training.adapters import OLD, POLICY, attached
from recast_engine.training.checkpointing import resume, write_checkpoint
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.export import export_adapter
from recast_engine.training.gradients import checkpointed_layers
from recast_engine.training.guards import collapsed, watch_epoch
from recast_engine.training.metrics import Meter, epoch_metrics, extend_baseline, moments
from recast_engine.training.old_policy import old_policy_decay
from recast_engine.training.retention import best, require_room
from recast_engine.training.rollouts import (
    Scorer,
    choose_prompts,
    draw_rollouts,
    image_seeds,
    update_generator,
)
from recast_engine.training.samples import draw_samples
from recast_engine.training.stages import Stage
from recast_engine.training.state import TrainingState
from recast_engine.training.timing import NOTHING_STORED, Stored, Timing
from recast_engine.training.update import TimedAdvantages, update_policy


@dataclass(frozen=True)
class TrainingResult:
    """What a training came to; ``adapter`` is the EMA of the policy, in the diffusers format."""

    adapter: Path
    sha256: str
    epochs: int
    steps: int
    metrics: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data, without the path of this machine."""
        return {
            "adapter": {"name": self.adapter.name, "sha256": self.sha256},
            "epochs": self.epochs,
            "steps": self.steps,
            "metrics": dict(self.metrics),
        }


def train(
    backbone: Backbone,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    config: TrainingConfig,
    *,
    observer: Observer,
    workdir: Path,
    allocations: Stored = NOTHING_STORED,
    profiles: Stored = NOTHING_STORED,
    initial_adapter: Path | None = None,
    resume_from: Path | None = None,
    devices: Devices = ALONE,
) -> TrainingResult:
    """Train a LoRA adapter towards the budgets of ``config.stages``, one stage after another.

    Args:
        scorer: of every reward that some stage has a budget for, and of the collapse guard's held-out one.
        workdir: checkpoints, sample grids and the final adapter are written here.
        allocations, profiles: the stored ones that the stages name, by id.
        initial_adapter: adapter file to start from; None starts from the base model.
        resume_from: a checkpoint folder, or a folder of them, to go on from: a resumed run gives bit for bit
            what an uninterrupted one gives (on the CPU, with as many devices).
        devices: the processes that train together, of which the first reports and writes.

    Raises:
        ConfigError: what the config asks for does not fit the prompts, adapter, profile or allocation.
        RewardFailure: a reward failed on too many images.
        NonFinite: a loss or gradient is not finite.
        CheckpointError: nothing whole to resume from.
        DiskFull: there is no room for a checkpoint.
        Collapsed: the collapse guard paused the training; a checkpoint was reported.
        DeviceLost: another device's process is gone.
        Stopped: the observer asked to stop; a checkpoint of the last finished epoch was reported.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    watched = config.collapse.held_out
    held_out = () if watched is None else (scorer.select((watched,)),)
    with (
        attached(backbone, config.lora, seed=config.seed) as adapters,
        checkpointed_layers(backbone, config.gradient_checkpointing),
    ):
        heard = observer if devices.leads else NullObserver()
        state = TrainingState(backbone, adapters, prompts, config, heard, workdir, devices)
        with_moments = 2 * state.snapshot.bytes
        require_room(workdir, with_moments, checkpoints=config.retention.last + 1)
        if resume_from is not None:
            resume(state, resume_from)
        elif initial_adapter is not None:
            state.start_from(initial_adapter)
        try:
            for index in range(state.position.stage, len(config.stages)):
                stage = stages.prepare(index, config.stages[index], scorer, prompts)
                _train_stage(state, stage, (stage.scorer, *held_out), allocations, profiles)
        except Stopped:
            write_checkpoint(state)
            raise
        path, digest = export_adapter(state)
        return TrainingResult(path, digest, state.position.epoch, state.position.step, state.last_metrics)


def _train_stage(
    state: TrainingState, stage: Stage, scorers: Sequence[Scorer], allocations: Stored, profiles: Stored
) -> None:
    """Settle the stage's allocation, then train its epochs; the next stage has an objective of its own."""
    if state.position.epoch == 0:
        draw_samples(state)
    _report(state, stage, "started")
    timing = Timing(state, stage, allocations, profiles)
    state.observer.phase("training", state.epochs)
    state.observer.advance(state.position.epoch)
    while state.position.epoch < state.last_epoch(stage.index):
        timing.refresh()
        _epoch(state, stage, scorers, timing)
    state.refresher = None
    state.advance(stage=stage.index + 1, baseline={})
    _report(state, stage, "finished")


def _report(state: TrainingState, stage: Stage, status: str) -> None:
    facts = {"stage": stage.index, "status": status, "epoch": state.position.epoch}
    state.observer.finding("stage", facts)


def _epoch(state: TrainingState, stage: Stage, scorers: Sequence[Scorer], timing: Timing) -> None:
    """Sample with the old policy, score, update the policy, let the old policy and the EMA follow."""
    config, number, meter = state.config, state.position.epoch, Meter(state.backbone, state.devices)
    chosen = choose_prompts(len(stage.prompts), config.sampling.prompts_per_epoch, number, config.seed)
    rollouts = draw_rollouts(
        state.backbone,
        state.adapters,
        scorers,
        [stage.prompts[index] for index in chosen],
        config.sampling,
        image_seeds(config.seed, number, len(chosen) * config.sampling.images_per_prompt),
        state.observer,
        state.devices,
    )
    began = time.perf_counter()
    report = update_policy(
        state.backbone,
        state.adapters,
        state.optimizer,
        rollouts,
        TimedAdvantages.of(rollouts, timing.matrix, config.optimizer),
        state.sigmas,
        config.optimizer,
        step=state.position.step,
        generator=update_generator(config.seed, number),
        observer=state.observer,
        devices=state.devices,
    )
    seconds = {"seconds/training": time.perf_counter() - began}
    calls = rollouts.reward_calls
    calls += timing.watch(rollouts, chosen, meter.evaluations)  # by the old policy before it moves on
    state.adapters.blend(OLD, POLICY, old_policy_decay(config.optimizer.old_policy, report.step))

    baseline = extend_baseline(state.position.baseline, rollouts.scores)
    metrics = epoch_metrics(stage, rollouts, report, baseline, config.optimizer)
    watch, doubts = watch_epoch(
        state.position.watch,
        config.collapse,
        objective=metrics["objective"],
        diversity=metrics["diversity"],
        held_out=moments(rollouts.held_out),
    )
    doubted = {"guard/doubts": float(watch.doubts)}
    state.last_metrics = {**metrics, **doubted, **seconds, **timing.metrics()}
    state.advance(epoch=number + 1, step=report.step, baseline=baseline, watch=watch)
    meter.report(state.observer, calls)
    state.observer.metrics(number + 1, state.last_metrics)
    state.observer.advance(number + 1)
    _write_due_files(state)
    if watch.doubts >= config.collapse.epochs:
        _pause(state, doubts)


def _write_due_files(state: TrainingState) -> None:
    epoch, config = state.position.epoch, state.config
    last = epoch == state.epochs
    if last or epoch % config.samples_every == 0:
        draw_samples(state)
    if last or epoch % config.checkpoint_every == 0:
        write_checkpoint(state)


def _pause(state: TrainingState, doubts: Sequence[str]) -> None:
    """Leave in good order: the checkpoint that a resumed attempt goes on from has no doubts yet."""
    state.advance(watch=replace(state.position.watch, doubts=0))
    write_checkpoint(state, rated=False)
    raise collapsed(state.config.collapse, doubts, state.position.epoch, best(state.position.kept))
