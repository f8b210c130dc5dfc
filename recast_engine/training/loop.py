"""The training run (METHOD section 6), from prompts and budgets to an adapter."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recast_engine import __version__
from recast_engine import config as configs
from recast_engine.backbones.base import Backbone
from recast_engine.backbones.catalogue import model_info
from recast_engine.config import TrainingConfig
from recast_engine.errors import Collapsed, ConfigError
from recast_engine.observer import NullObserver, Observer, Stopped
from recast_engine.profiling import Profile
from recast_engine.prompts import Prompt, prompt_set_hash
from recast_engine.training import checkpoint as checkpoints
from recast_engine.training import stages
from recast_engine.training.adapters import (
    EMA,
    OLD,
    POLICY,
    TRAINING_ADAPTERS,
    AdapterSet,
    attached,
    load_adapter,
    save_adapter,
)
from recast_engine.training.checkpoint import Checkpoint, Position, checkpoint_name
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.guards import Watch, watch_epoch
from recast_engine.training.metrics import epoch_metrics, extend_baseline, moments
from recast_engine.training.old_policy import old_policy_decay
from recast_engine.training.refresh import Refresher
from recast_engine.training.retention import Kept, require_room, retain
from recast_engine.training.retention import best as best_kept
from recast_engine.training.rollouts import (
    Rollouts,
    Scorer,
    choose_prompts,
    draw_rollouts,
    image_seeds,
    update_generator,
)
from recast_engine.training.samples import draw_grid, fixed_choice
from recast_engine.training.stages import Stage
from recast_engine.training.update import TimedAdvantages, update_policy

_ALLOCATION_FACTS = (
    "stage",
    "epoch",
    "reason",
    "method",
    "temperature",
    "rewards",
    "budgets",
    "sigmas",
    "matrix",
)

Stored = Mapping[str, Mapping[str, Any]]
"""Rows of the store as plain JSON data, by id."""

NOTHING_STORED: Stored = MappingProxyType({})

_SAME_ON_RESUME = ("model", "prompt_set", "lora", "sampling", "optimizer", "seed")


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
    with attached(backbone, config.lora, seed=config.seed) as adapters:
        heard = observer if devices.leads else NullObserver()
        run = _Run(backbone, adapters, scorer, prompts, config, heard, workdir, devices)
        if resume_from is not None:
            run.resume(resume_from)
        elif initial_adapter is not None:
            run.start_from(initial_adapter)
        try:
            for index in range(run.position.stage, len(config.stages)):
                stage = stages.prepare(index, config.stages[index], scorer, prompts)
                run.begin_stage(stage, allocations, profiles)
                while run.position.epoch < run.last_epoch(index):
                    run.refresh_allocation(stage)
                    run.epoch(stage)
                run.end_stage(stage)
        except Stopped:
            run.write_checkpoint()
            raise
        return run.finish()


class _Run:
    """A training in progress: the adapters, the optimiser, and the position between epochs."""

    def __init__(
        self,
        backbone: Backbone,
        adapters: AdapterSet,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        config: TrainingConfig,
        observer: Observer,
        workdir: Path,
        devices: Devices,
    ) -> None:
        self.backbone = backbone
        self.adapters = adapters
        self.devices = devices
        watched = config.collapse.held_out
        self.held_out = () if watched is None else (scorer.select((watched,)),)
        self.prompts = prompts
        self.config = config
        self.observer = observer
        self.workdir = workdir
        self.sigmas = backbone.sigmas(config.sampling.steps, config.sampling.shift)
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            adapters.parameters(POLICY),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.last_metrics: dict[str, float] = {}
        self.matrix: NDArray[np.float64] = np.empty((0, 0))
        self.refresher: Refresher | None = None
        self.position = Position()
        self.snapshot = self._capture()
        workdir.mkdir(parents=True, exist_ok=True)
        require_room(workdir, 2 * self.snapshot.bytes, checkpoints=config.retention.last + 1)  # with moments

    def last_epoch(self, stage: int) -> int:
        """Epochs finished when ``stage`` is."""
        return sum(stage.epochs for stage in self.config.stages[: stage + 1])

    def start_from(self, path: Path) -> None:
        """Start all adapters from a file."""
        loaded = load_adapter(path)
        lora = self.config.lora
        if (loaded.rank, loaded.alpha) != (lora.rank, lora.alpha):
            raise ConfigError(
                f"lora: the adapter to start from has rank {loaded.rank} and alpha {loaded.alpha:g}, "
                f"the config asks for rank {lora.rank} and alpha {lora.alpha:g}"
            )
        for name in TRAINING_ADAPTERS:
            self.adapters.load_state(name, loaded.weights)
        self.snapshot = self._capture()

    def resume(self, path: Path) -> None:
        """Take up the newest whole checkpoint at ``path``."""
        checkpoint, complaints = checkpoints.newest(path)
        for complaint in complaints:
            self.observer.finding("warning", {"text": f"{complaint}; went on from {checkpoint.name}"})
        mine = configs.dump(self.config)
        changed = [key for key in _SAME_ON_RESUME if mine[key] != checkpoint.config[key]]
        if changed:
            raise ConfigError(f"cannot resume: {', '.join(changed)} differ from the checkpoint's")
        checkpoints.restore(checkpoint, self.adapters, self.optimizer)
        self.position, self.snapshot = checkpoint.position, checkpoint
        self._delete(checkpoint.position.dropped)  # it may not have come to that

    def begin_stage(self, stage: Stage, allocations: Stored, profiles: Stored) -> None:
        """Settle the stage's allocation and its running profile, once."""
        if self.position.epoch == 0:
            self._draw_samples()
        self._report_stage(stage, "started")
        if made := self._made(stage):
            _, self.matrix = stages.stored_allocation(stage, made[-1], self.config.sampling.steps)
            self.refresher = self._restored_refresher(stage)
        else:
            self._first_allocation(stage, allocations, profiles)
        self.observer.phase("training", self.last_epoch(len(self.config.stages) - 1))
        self.observer.advance(self.position.epoch)

    def _first_allocation(self, stage: Stage, allocations: Stored, profiles: Stored) -> None:
        steps, wanted = self.config.sampling.steps, self.config.stages[stage.index].allocation
        self.refresher = None
        if isinstance(wanted, str):
            if wanted not in allocations:
                raise ConfigError(f"allocation {wanted!r} was not provided")
            allocation, _ = stages.stored_allocation(stage, allocations[wanted], steps)
            self._adopt(stage, allocation, None, "named")
            return

        def settle() -> tuple[dict[str, Any], dict[str, Any] | None, int | None]:
            made = stages.make_allocation(
                stage, self.backbone, self.adapters, wanted, self.config, profiles, self.observer
            )
            return made.allocation, None if made.profile is None else made.profile.to_dict(), made.measured

        allocation, profile, measured = self.devices.lead(settle)
        if wanted.refresh != "frozen" and profile is not None:
            reference = Profile.from_dict(profile)
            self.refresher = Refresher(stage, wanted, reference, self.config, self.position.epoch)
        self._adopt(stage, allocation, measured, "start of the stage")

    def _restored_refresher(self, stage: Stage) -> Refresher | None:
        wanted = self.config.stages[stage.index].allocation
        if isinstance(wanted, str) or wanted.refresh == "frozen":
            return None
        if not self.position.refresh:
            raise ConfigError(
                f"stages[{stage.index}].allocation.refresh: the checkpoint has no running profile"
            )
        facts, tensors = self.position.refresh, self.snapshot.refresh
        return Refresher.restore(stage, wanted, self.config, facts, tensors)

    def refresh_allocation(self, stage: Stage) -> None:
        """Project the stage's budgets anew if its policy says so."""
        wanted = self.config.stages[stage.index].allocation
        if self.refresher is None or isinstance(wanted, str):
            return
        found = self.refresher.decide(self.position.epoch)
        if found is not None:
            profile = {"stage": stage.index, "epoch": self.position.epoch, "profile": found.profile.to_dict()}
            self.observer.finding("profile", profile)
            allocation = stages.project(stage, wanted, found.profile, self.sigmas.numpy())
            self._adopt(stage, allocation, stage.index, found.reason)

    def _made(self, stage: Stage) -> list[Mapping[str, Any]]:
        """The stage's allocations so far, oldest first."""
        return [made for made in self.position.allocations if made["stage"] == stage.index]

    def _adopt(self, stage: Stage, allocation: dict[str, Any], measured: int | None, reason: str) -> None:
        """Train with ``allocation`` from the next epoch on, and report it.

        Args:
            measured: the stage, if its profile was measured in this training.
        """
        facts = {"stage": stage.index, "epoch": self.position.epoch, "reason": reason}
        self.matrix = np.asarray(allocation["matrix"])
        self.position = replace(
            self.position, allocations=(*self.position.allocations, {**allocation, **facts})
        )
        self.snapshot = self._capture()
        self.observer.finding("allocation", {**facts, "profile_stage": measured, "allocation": allocation})

    def epoch(self, stage: Stage) -> None:
        """Sample with the old policy, score, update the policy, let the old policy and the EMA follow."""
        started, evaluations = time.perf_counter(), self.backbone.evaluations
        number, optimizer = self.position.epoch, self.config.optimizer
        chosen = choose_prompts(
            len(stage.prompts), self.config.sampling.prompts_per_epoch, number, self.config.seed
        )
        rollouts = self._draw(stage, chosen)
        drawn = time.perf_counter()
        report = update_policy(
            self.backbone,
            self.adapters,
            self.optimizer,
            rollouts,
            TimedAdvantages.of(rollouts, self.matrix, optimizer),
            self.sigmas,
            optimizer,
            step=self.position.step,
            generator=update_generator(self.config.seed, number),
            observer=self.observer,
            devices=self.devices,
        )
        seconds = time.perf_counter() - drawn
        calls = int(rollouts.scores.applicable.sum())
        running = {"allocation/version": float(len(self._made(stage)))}
        if self.refresher is not None:  # before the old policy, which drew the images, moves on
            spent = self._everyones_evaluations(evaluations)
            calls += self.refresher.measure(
                self.backbone,
                self.adapters,
                rollouts,
                chosen,
                epoch=number,
                evaluations=spent,
                observer=self.observer,
                devices=self.devices,
            )
            running |= self.refresher.metrics()
        self.adapters.blend(OLD, POLICY, old_policy_decay(optimizer.old_policy, report.step))
        baseline = extend_baseline(self.position.baseline, rollouts.scores)
        metrics = epoch_metrics(stage, rollouts, report, baseline, optimizer)
        watch, doubts = self._watch(rollouts, metrics)
        self.last_metrics = {**metrics, "guard/doubts": float(watch.doubts), "seconds/training": seconds}
        self.last_metrics |= running
        self.position = replace(
            self.position, epoch=number + 1, step=report.step, baseline=baseline, watch=watch
        )
        self.snapshot = self._capture()
        self._report_cost(started, evaluations, calls)
        self.observer.metrics(number + 1, self.last_metrics)
        self.observer.advance(number + 1)
        self._write_due_files()
        if watch.doubts >= self.config.collapse.epochs:
            self._pause(doubts)

    def _everyones_evaluations(self, before: int) -> int:
        """Model evaluations of all devices together since this one had made ``before``."""
        return int(self.devices.add(torch.tensor(self.backbone.evaluations - before)))

    def _draw(self, stage: Stage, chosen: Sequence[int]) -> Rollouts:
        sampling, number = self.config.sampling, self.position.epoch
        seeds = image_seeds(self.config.seed, number, len(chosen) * sampling.images_per_prompt)
        return draw_rollouts(
            self.backbone,
            self.adapters,
            (stage.scorer, *self.held_out),
            [stage.prompts[index] for index in chosen],
            sampling,
            seeds,
            self.observer,
            self.devices,
        )

    def _watch(self, rollouts: Rollouts, metrics: Mapping[str, float]) -> tuple[Watch, list[str]]:
        return watch_epoch(
            self.position.watch,
            self.config.collapse,
            objective=metrics["objective"],
            diversity=metrics["diversity"],
            held_out=moments(rollouts.held_out),
        )

    def _pause(self, reasons: Sequence[str]) -> None:
        """Leave in good order: the checkpoint that a resumed attempt goes on from has no doubts yet."""
        self.position = replace(self.position, watch=replace(self.position.watch, doubts=0))
        self.snapshot = self._capture()
        self.write_checkpoint(rated=False)
        best = best_kept(self.position.kept)
        kept = "none was good" if best is None else f"{checkpoint_name(best.epoch)} is the best kept"
        raise Collapsed(
            f"paused after epoch {self.position.epoch}: for {self.config.collapse.epochs} epochs the "
            f"objective was above its start while {' and '.join(reasons)}; of the checkpoints {kept}. Resume "
            "to go on all the same, or train anew with a higher kl_weight or a lower learning_rate"
        )

    def _write_due_files(self) -> None:
        epoch, last = self.position.epoch, self.last_epoch(len(self.config.stages) - 1)
        if epoch % self.config.samples_every == 0 or epoch == last:
            self._draw_samples()
        if epoch % self.config.checkpoint_every == 0 or epoch == last:
            self.write_checkpoint()

    def end_stage(self, stage: Stage) -> None:
        """The next stage starts with an objective of its own."""
        self.refresher = None
        self.position = replace(self.position, stage=stage.index + 1, baseline={})
        self.snapshot = self._capture()
        self._report_stage(stage, "finished")

    def _report_stage(self, stage: Stage, status: str) -> None:
        facts = {"stage": stage.index, "status": status, "epoch": self.position.epoch}
        self.observer.finding("stage", facts)

    def finish(self) -> TrainingResult:
        """Write and report the final adapter."""
        path = self.workdir / "final.safetensors"
        position = self.position
        digest = self.devices.lead(lambda: self._write_adapter(path))
        return TrainingResult(path, digest, position.epoch, position.step, self.last_metrics)

    def _write_adapter(self, path: Path) -> str:
        """Returns the file's SHA-256."""
        lora, position = self.config.lora, self.position
        save_adapter(path, self.adapters.state(EMA), alpha=lora.alpha, provenance=self._provenance())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        facts = {
            "epoch": position.epoch,
            "step": position.step,
            "rank": lora.rank,
            "alpha": lora.alpha,
            "base_model": self.config.model,
            "final": True,
            "sha256": digest,
        }
        self.observer.file("adapter", path.name, path, facts)
        return digest

    def write_checkpoint(self, *, rated: bool = True) -> None:
        """Write and report the state after the last finished epoch, then delete what need not be kept.

        ``rated``: whether it may count among the best.
        """
        position = self.snapshot.position
        self.devices.require_same(self.adapters.parameters(POLICY), "the policy")
        before = {one.epoch: one for one in position.kept}
        mine = before.pop(position.epoch, None)
        if mine is None:
            rated = rated and not position.watch.doubts
            objective = self.last_metrics.get("objective") if rated else None
            mine = Kept(position.epoch, position.stage, objective)
        kept, gone = retain([*before.values(), mine], self.config.retention)
        dropped = tuple(checkpoint_name(one.epoch) for one in gone)
        self.position = replace(self.position, kept=kept, dropped=dropped)
        self.snapshot = replace(self.snapshot, position=replace(position, kept=kept, dropped=dropped))
        if self.devices.leads:
            require_room(self.workdir, self.snapshot.bytes)
            path = checkpoints.write(self.workdir / "checkpoints", self.snapshot)
            facts = {"epoch": position.epoch, "step": position.step, "stage": position.stage}
            self.observer.file("checkpoint", path.name, path, {**facts, "objective": mine.objective})
            self._delete(dropped)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            if self.devices.leads:
                shutil.rmtree(self.workdir / "checkpoints" / name, ignore_errors=True)
            self.observer.discard("checkpoint", name)

    def _capture(self) -> Checkpoint:
        facts, tensors = self.refresher.state() if self.refresher is not None else ({}, {})
        self.position = replace(self.position, refresh=facts)
        config = configs.dump(self.config)
        return checkpoints.capture(self.position, config, self.adapters, self.optimizer, tensors)

    def _draw_samples(self) -> None:
        if not self.devices.leads:
            return
        started, evaluations = time.perf_counter(), self.backbone.evaluations
        name = f"epoch-{self.position.epoch:06d}.png"
        path = self.workdir / "samples" / name
        with self.adapters.using(EMA):
            facts = draw_grid(
                self.backbone,
                fixed_choice(self.prompts, self.config.seed),
                steps=model_info(self.config.model).default_steps,
                batch_size=self.config.sampling.batch_size,
                path=path,
            )
        self._report_cost(started, evaluations)
        self.observer.file("samples", name, path, {"epoch": self.position.epoch, **facts})

    def _report_cost(self, started: float, evaluations: int, reward_calls: int = 0) -> None:
        self.observer.cost(
            model_evaluations=self.backbone.evaluations - evaluations,
            reward_calls=reward_calls,
            device_seconds=time.perf_counter() - started,
        )

    def _provenance(self) -> dict[str, str]:
        """Header entries that say how the adapter was made."""
        packages = ("torch", "diffusers", "transformers", "peft", "numpy")
        versions = {name: importlib.metadata.version(name) for name in packages}
        return {
            "recast.version": __version__,
            "recast.base_model": self.config.model,
            "recast.allocations": json.dumps(
                [{key: a[key] for key in _ALLOCATION_FACTS if key in a} for a in self.position.allocations]
            ),
            "recast.config": json.dumps(configs.dump(self.config), sort_keys=True),
            "recast.position": json.dumps({"epoch": self.position.epoch, "step": self.position.step}),
            "recast.prompt_set_sha256": prompt_set_hash(self.prompts),
            "recast.seed": str(self.config.seed),
            "recast.versions": json.dumps(versions, sort_keys=True),
        }
