"""Checkpoints of a training: a folder of safetensors and JSON, whole or not there at all.

Random draws of a training depend only on its seed and the epoch (``rollouts``), so the position is all the
random state there is. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from recast_engine.errors import CheckpointError, NonFinite
from recast_engine.training.adapters import POLICY, TRAINING_ADAPTERS, AdapterSet
from recast_engine.training.guards import Watch
from recast_engine.training.retention import Kept, checkpoint_name

TENSORS, STATE = "tensors.safetensors", "state.json"
FORMAT = 2

REFRESH = "refresh"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Position:
    """Where a training stands, between two epochs.

    Attributes:
        epoch: epochs finished, over the whole run; also the last metrics step.
        step: optimiser steps taken.
        stage: stage of the next epoch, from 0.
        allocations: every one made or taken so far, in order (JSON data, with ``stage``, ``epoch`` and
            ``reason``); that of ``stage`` may still be to make.
        baseline: per reward (mean, standard deviation) that the stage's objective is standardised by.
        watch: what the collapse guard remembers.
        kept: checkpoints that are stored, by rising epoch.
        dropped: names of those that were to be deleted once the newest was stored.
        refresh: the stage's running profile (``Refresher.state``, whose tensors the checkpoint has); empty
            without one.
    """

    epoch: int = 0
    step: int = 0
    stage: int = 0
    allocations: tuple[Mapping[str, Any], ...] = ()
    baseline: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    kept: tuple[Kept, ...] = ()
    dropped: tuple[str, ...] = ()
    refresh: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Position:
        """From the JSON data of ``dataclasses.asdict``."""
        watch = dict(data.get("watch", {}))
        if watch.get("held_out") is not None:
            watch["held_out"] = tuple(watch["held_out"])
        return cls(
            **{
                **data,
                "allocations": tuple(data["allocations"]),
                "baseline": {reward: (mean, std) for reward, (mean, std) in data["baseline"].items()},
                "watch": Watch(**watch),
                "kept": tuple(Kept(**one) for one in data.get("kept", ())),
                "dropped": tuple(data.get("dropped", ())),
            }
        )


@dataclass(frozen=True)
class Checkpoint:
    """A training's whole state: position, config, and tensors (adapters and optimiser moments)."""

    position: Position
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def refresh(self) -> dict[str, Tensor]:
        """The running profile's tensors."""
        prefix = f"{REFRESH}/"
        return {
            name.removeprefix(prefix): value
            for name, value in self.tensors.items()
            if name.startswith(prefix)
        }

    @property
    def name(self) -> str:
        """``epoch-000010``."""
        return checkpoint_name(self.position.epoch)

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def capture(
    position: Position,
    config: Mapping[str, Any],
    adapters: AdapterSet,
    optimizer: torch.optim.Optimizer,
    refresh: Mapping[str, Tensor] = MappingProxyType({}),
) -> Checkpoint:
    """Copy the state as it is now; ``refresh`` holds the running profile's tensors.

    Raises:
        NonFinite: a weight is not finite, so that no such adapter is ever saved.
    """
    tensors = {
        f"{name}/{key}": value for name in TRAINING_ADAPTERS for key, value in adapters.state(name).items()
    }
    for key, parameter in adapters.state(POLICY).items():
        moments = optimizer.state.get(parameter, {})
        tensors.update({f"optimizer.{kind}/{key}": moments[kind] for kind in _MOMENTS if kind in moments})
    copies = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}
    if not all(bool(torch.isfinite(value).all()) for value in copies.values()):
        raise NonFinite(f"the adapter's weights are not finite after optimiser step {position.step}")
    running = {f"{REFRESH}/{key}": value for key, value in refresh.items()}  # NaN where there is no score
    return Checkpoint(position, config, copies | running)


def restore(checkpoint: Checkpoint, adapters: AdapterSet, optimizer: torch.optim.Optimizer) -> None:
    """Put the state back. Raises ConfigError when the adapters differ in modules or rank."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        part, _, key = name.partition("/")
        parts.setdefault(part, {})[key] = tensor
    for name in TRAINING_ADAPTERS:
        adapters.load_state(name, parts.get(name, {}))
    for key, parameter in adapters.state(POLICY).items():
        if key in parts.get(f"optimizer.{_MOMENTS[0]}", {}):
            optimizer.state[parameter] = {
                "step": torch.tensor(float(checkpoint.position.step), device=parameter.device),
                **{kind: parts[f"optimizer.{kind}"][key].to(parameter, copy=True) for kind in _MOMENTS},
            }


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``folder/epoch-NNNNNN`` under a temporary name, flush it to disk, then rename it."""
    folder.mkdir(parents=True, exist_ok=True)
    target, draft = folder / checkpoint.name, folder / f".{checkpoint.name}.partial"
    for leftover in (draft, target):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir()
    save_file(dict(checkpoint.tensors), draft / TENSORS)
    state = {
        "format": FORMAT,
        "position": asdict(checkpoint.position),
        "config": dict(checkpoint.config),
        "tensors_sha256": _sha256((draft / TENSORS).read_bytes()),
    }
    (draft / STATE).write_text(
        json.dumps({"state": state, "sha256": _canonical_hash(state)}), encoding="utf-8"
    )
    for path in (draft / TENSORS, draft / STATE, draft):
        _flush(path)
    draft.rename(target)
    _flush(folder)
    return target


def read(path: Path) -> Checkpoint:
    """Read the checkpoint folder ``path``. Raises CheckpointError saying what is wrong with it."""
    try:
        envelope = json.loads((path / STATE).read_text(encoding="utf-8"))
        state = envelope["state"]
        if _canonical_hash(state) != envelope["sha256"]:
            raise CheckpointError(f"checkpoint {path.name}: {STATE} does not match its checksum")
        if state["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path.name}: format {state['format']}, expected {FORMAT}")
        if _sha256((path / TENSORS).read_bytes()) != state["tensors_sha256"]:
            raise CheckpointError(f"checkpoint {path.name}: {TENSORS} does not match its checksum")
        tensors = load_file(path / TENSORS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {type(error).__name__}: {error}") from None
    return Checkpoint(Position.load(state["position"]), state["config"], tensors)


def newest(path: Path) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint at ``path``, and what was wrong with newer ones.

    Args:
        path: a checkpoint folder (the ones before it are its siblings), or a folder of checkpoints.

    Raises:
        CheckpointError: there is none that is whole.
    """
    if path.name.startswith("epoch-"):
        candidates: Sequence[Path] = [p for p in _newest_first(path.parent) if p.name <= path.name] or [path]
    else:
        candidates = _newest_first(path)
    complaints: list[str] = []
    for candidate in candidates:
        try:
            return read(candidate), complaints
        except CheckpointError as error:
            complaints.append(str(error))
    raise CheckpointError("no usable checkpoint: " + ("; ".join(complaints) or "there is none"))


def _newest_first(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("epoch-*") if p.is_dir()), reverse=True)


def _canonical_hash(state: Any) -> str:
    return _sha256(json.dumps(state, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
