"""A training's checkpoints while it runs: taking one up, writing the next, deleting those not kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recast_engine import config as configs
from recast_engine.errors import ConfigError
from recast_engine.training import checkpoint as checkpoints
from recast_engine.training.adapters import POLICY
from recast_engine.training.retention import Kept, require_room, retain
from recast_engine.training.state import TrainingState

_SAME_ON_RESUME = ("model", "prompt_set", "lora", "sampling", "optimizer", "seed")


def resume(state: TrainingState, path: Path) -> None:
    """Take up the newest whole checkpoint at ``path``, a checkpoint folder or a folder of them.

    Raises:
        ConfigError: it is of a training with other settings.
        CheckpointError: there is none that is whole.
    """
    checkpoint, complaints = checkpoints.newest(path)
    for complaint in complaints:
        state.observer.finding("warning", {"text": f"{complaint}; went on from {checkpoint.name}"})
    mine = configs.dump(state.config)
    changed = [key for key in _SAME_ON_RESUME if mine[key] != checkpoint.config[key]]
    if changed:
        raise ConfigError(f"cannot resume: {', '.join(changed)} differ from the checkpoint's")
    checkpoints.restore(checkpoint, state.adapters, state.optimizer)
    state.position, state.snapshot = checkpoint.position, checkpoint
    _delete(state, checkpoint.position.dropped)  # it may not have come to that


def write_checkpoint(state: TrainingState, *, rated: bool = True) -> None:
    """Write and report the state after the last finished epoch, then delete what need not be kept.

    Args:
        rated: whether it may count among the best.

    Raises:
        DiskFull: there is no room for it.
        DeviceLost: the devices' weights differ.
    """
    position = state.snapshot.position
    state.devices.require_same(state.adapters.parameters(POLICY), "the policy")
    before = {one.epoch: one for one in position.kept}
    mine = before.pop(position.epoch, None)
    if mine is None:
        rated = rated and not position.watch.doubts
        objective = state.last_metrics.get("objective") if rated else None
        mine = Kept(position.epoch, position.stage, objective)
    kept, gone = retain([*before.values(), mine], state.config.retention)
    dropped = tuple(one.name for one in gone)
    state.position = replace(state.position, kept=kept, dropped=dropped)
    state.snapshot = replace(state.snapshot, position=replace(position, kept=kept, dropped=dropped))
    if state.devices.leads:
        require_room(state.workdir, state.snapshot.bytes)
        path = checkpoints.write(_folder(state), state.snapshot)
        facts = {"epoch": position.epoch, "step": position.step, "stage": position.stage}
        state.observer.file("checkpoint", path.name, path, {**facts, "objective": mine.objective})
        _delete(state, dropped)


def _delete(state: TrainingState, names: Sequence[str]) -> None:
    for name in names:
        if state.devices.leads:
            shutil.rmtree(_folder(state) / name, ignore_errors=True)
        state.observer.discard("checkpoint", name)


def _folder(state: TrainingState) -> Path:
    return state.workdir / "checkpoints"
