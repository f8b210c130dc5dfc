"""Killed trainings end in the same bits, and several devices in the same adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from recast_engine.errors import ConfigError
from recast_engine.training.adapters import load_adapter
from recast_engine.training.devices import ALONE, Devices, joined
from tests.recast_engine.training import forked

REPOSITORY = Path(__file__).parents[3]


def _fork(mode: str, pipeline: Path, folder: Path, *more: str) -> str:
    command = [sys.executable, "-m", forked.__name__, mode, str(pipeline), str(folder), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _bytes(folder: Path) -> bytes:
    return (folder / "final.safetensors").read_bytes()


def test_a_training_killed_everywhere_ends_in_the_same_bits(tiny_pipeline: Path, tmp_path: Path) -> None:
    """While sampling, scoring, in the update, between writing and renaming a checkpoint, and after that."""
    _fork("kills", tiny_pipeline, tmp_path)
    assert _bytes(tmp_path / "killed") == _bytes(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7])
def test_twenty_trainings_killed_at_random_moments_end_in_the_same_bits(
    tiny_pipeline: Path, tmp_path: Path, seed: int
) -> None:
    """Each is killed once, while sampling, scoring, in the backward pass or writing a checkpoint."""
    print(_fork("moments", tiny_pipeline, tmp_path, str(seed)))
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) == 20
    for folder in killed:
        assert _bytes(folder) == _bytes(tmp_path / "whole"), folder.name


def test_two_devices_train_as_one_and_resume_to_the_bit(tiny_pipeline: Path, tmp_path: Path) -> None:
    _fork("devices", tiny_pipeline, tmp_path)
    one, two = (load_adapter(tmp_path / name / "final.safetensors").weights for name in ("one", "two"))
    assert set(one) == set(two)
    for name in ("one", "two"):
        with safe_open(tmp_path / name / "final.safetensors", "pt") as file:
            made = json.loads(file.metadata()["recast.allocations"])
        assert [allocation["epoch"] for allocation in made] == [0, 2]  # the running profile was acted upon
    largest = max(float(tensor.abs().max()) for name, tensor in one.items() if "lora_B" in name)
    assert largest > 1e-3  # it has learnt something
    costs = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")]
    assert costs[0] == costs[1]  # all devices' work is counted, not the first one's alone
    assert costs[0]["model_evaluations"] > 0
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-5)
    tensors = [load_adapter(tmp_path / name / "final.safetensors").weights for name in ("again", "resumed")]
    for same in tensors:
        assert all(torch.equal(same[name], tensor) for name, tensor in two.items())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "checkpoints",
        "final.safetensors",
        "samples",
    ]


def test_shares_cover_everything_once() -> None:
    for size in (1, 2, 3, 7):
        for count in (0, 1, 6, 7, 20):
            shares = [Devices(rank, size).share(count) for rank in range(size)]
            assert [row for share in shares for row in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_as_many_processes_as_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(1) as devices:
        assert devices is ALONE
    with pytest.raises(ConfigError, match="2 are configured, but 1"), joined(2):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="1 are configured, but 2"), joined(1):
        pass


def test_no_more_devices_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank says so, before any waits for the others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(ConfigError, match=r"^devices: 4 are .* has 2: ask for at most 2, or "), joined(4):
            pass
