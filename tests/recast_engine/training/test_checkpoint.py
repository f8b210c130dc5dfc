"""Checkpoints: whole, verified, and never half there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import LoRAConfig
from recast_engine.errors import CheckpointError, ConfigError, NonFinite
from recast_engine.training import checkpoint as checkpoints
from recast_engine.training.adapters import POLICY, TRAINING_ADAPTERS, AdapterSet, attached
from recast_engine.training.checkpoint import STATE, TENSORS, Position
from recast_engine.training.guards import Watch
from recast_engine.training.retention import Kept


def _optimizer(adapters: AdapterSet) -> torch.optim.Optimizer:
    return torch.optim.AdamW(adapters.parameters(POLICY), lr=1e-2, fused=True)


def _step(adapters: AdapterSet, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in adapters.parameters(POLICY):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


POSITION = Position(
    3,
    1,
    0,
    ({"matrix": [[1.0, 0.5]], "rewards": ["a"]},),
    {"a": (0.1, 0.2)},
    Watch(0.25, (0.5, 0.125), 2),
    (Kept(2, 0, 0.75), Kept(3, 0, None)),
    ("epoch-000001",),
)


def test_restoring_continues_bit_for_bit(backbone: SD3Backbone, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, alpha=8.0)
    with attached(backbone, lora) as adapters:
        optimizer = _optimizer(adapters)
        _step(adapters, optimizer)
        adapters.blend("ema", POLICY, 0.3)
        saved = checkpoints.capture(POSITION, {"seed": 1}, adapters, optimizer)
        path = checkpoints.write(tmp_path, saved)
        _step(adapters, optimizer)
        expected = {name: [p.clone() for p in adapters.parameters(name)] for name in TRAINING_ADAPTERS}
    loaded = checkpoints.read(path)
    assert path.name == "epoch-000003"
    assert loaded.position == POSITION
    assert loaded.config == {"seed": 1}
    with attached(backbone, lora, seed=99) as adapters:
        optimizer = _optimizer(adapters)
        checkpoints.restore(loaded, adapters, optimizer)
        _step(adapters, optimizer)
        for name in TRAINING_ADAPTERS:
            assert all(map(torch.equal, adapters.parameters(name), expected[name]))
    with attached(backbone, LoRAConfig(rank=2, alpha=8.0)) as adapters, pytest.raises(ConfigError):
        checkpoints.restore(loaded, adapters, _optimizer(adapters))


def _write(folder: Path, *epochs: int) -> None:
    for epoch in epochs:
        tensors = {"policy/a": torch.full((3,), float(epoch))}
        checkpoints.write(folder, checkpoints.Checkpoint(Position(epoch=epoch), {}, tensors))


def test_no_draft_is_left(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-000001", "epoch-000002"]
    assert all({file.name for file in path.iterdir()} == {TENSORS, STATE} for path in tmp_path.iterdir())


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Positions without what the guard and the retention remember."""
    whole = {"epoch": 3, "step": 1, "stage": 0, "allocations": [{"a": 1}], "baseline": {"a": [0.1, 0.2]}}
    position = Position.load(whole)
    assert position == Position(3, 1, 0, ({"a": 1},), {"a": (0.1, 0.2)})


def test_weights_that_are_not_finite_are_never_captured(backbone: SD3Backbone) -> None:
    with attached(backbone, LoRAConfig(rank=2, alpha=2.0)) as adapters:
        optimizer = _optimizer(adapters)
        adapters.parameters("old")[3].data[0, 0] = float("inf")
        with pytest.raises(NonFinite, match="after optimiser step 1"):
            checkpoints.capture(POSITION, {}, adapters, optimizer)


@pytest.mark.parametrize("file", [TENSORS, STATE])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_newest_falls_back_and_says_so(tmp_path: Path, file: str, damage: str) -> None:
    _write(tmp_path, 1, 2)
    path = tmp_path / "epoch-000002" / file
    content = path.read_bytes()
    if damage == "flip":
        place = content.index(b'"epoch": 2') + 9 if file == STATE else len(content) - 2
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    for start in (tmp_path, tmp_path / "epoch-000002"):
        checkpoint, complaints = checkpoints.newest(start)
        assert checkpoint.position.epoch == 1
        assert len(complaints) == 1
        assert "epoch-000002" in complaints[0]
    with pytest.raises(CheckpointError, match="epoch-000002"):
        checkpoints.read(tmp_path / "epoch-000002")


def test_an_older_checkpoint_can_be_asked_for(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2)
    checkpoint, complaints = checkpoints.newest(tmp_path / "epoch-000001")
    assert (checkpoint.position.epoch, complaints) == (1, [])


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is none"):
        checkpoints.newest(tmp_path)
    _write(tmp_path, 1)
    envelope = json.loads((tmp_path / "epoch-000001" / STATE).read_text())
    envelope["state"]["format"] = 99
    (tmp_path / "epoch-000001" / STATE).write_text(json.dumps(envelope))
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoints.newest(tmp_path)
