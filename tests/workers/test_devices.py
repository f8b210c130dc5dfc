"""An engine of several processes, launched by torchrun as a worker launches it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.process import EngineProcess, launch_command


@contextmanager
def engine(workdir: Path, do: str) -> Iterator[EngineProcess]:
    (workdir / "request.json").write_text(json.dumps({"do": do, "devices": 2}))
    with EngineProcess(workdir, "tests.workers.ranks:run", 2, devices=2) as process:
        yield process


def events(process: EngineProcess, seconds: float = 60.0) -> list[dict[str, Any]]:
    """Until the engine has ended and said all."""
    heard: list[dict[str, Any]] = []
    deadline = time.monotonic() + seconds
    while not process.ended() and time.monotonic() < deadline:
        if (event := process.next_event(0.1)) is not None:
            heard.append(event)
    return heard


def gone(workdir: Path, seconds: float = 10.0) -> bool:
    """Whether every rank's process ends."""
    pids = [int(path.read_text()) for path in workdir.glob("pid-*")]
    assert len(pids) == 2
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(there, timeout=seconds)[1]


def test_one_device_needs_no_launcher(tmp_path: Path) -> None:
    engine_of = ["-m", "workers.engine", str(tmp_path), "--runner", "m:f"]
    assert launch_command(tmp_path, "m:f", 1) == [sys.executable, *engine_of]
    several = launch_command(tmp_path, "m:f", 3)
    assert several[:5] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    assert several[-5:] == engine_of


def test_the_first_rank_alone_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with engine(tmp_path, "add") as process:
        heard = events(process)
        assert process.exit_code() == 0
    assert [event["type"] for event in heard] == ["phase", "result"]
    assert heard[0]["name"] == "of rank 0"
    assert heard[1]["result"] == {"total": 3.0, "threads": "1"}  # 1 + 2; the cores are shared out
    assert not list(temporary.glob("torchelastic*"))  # the launcher's own files go with the attempt


def test_a_rank_that_fails_ends_all_with_its_error(tmp_path: Path) -> None:
    with engine(tmp_path, "raise") as process:
        heard = events(process)
    assert heard[-1]["error"] == {"type": "non-finite", "detail": "loss is not finite at optimiser step 3"}
    assert gone(tmp_path)


def test_more_devices_than_the_machine_has_are_named_with_the_remedy(tmp_path: Path) -> None:
    with engine(tmp_path, "lack") as process:
        heard = events(process)
    assert {event["type"] for event in heard} == {"error"}  # of one rank or both
    detail = (
        "devices: 2 are configured, the worker's machine has 1: ask for at most 1, or have a worker with more"
    )
    assert heard[0]["error"] == {"type": "invalid-config", "detail": detail}


def test_a_rank_that_is_killed_ends_all_without_a_word(tmp_path: Path) -> None:
    """As an engine that is killed; the worker counts it as a crash and tries again."""
    with engine(tmp_path, "die") as process:
        heard = events(process)
        assert process.exit_code() == 1
    assert [event["type"] for event in heard] == ["phase"]
    assert gone(tmp_path)


def test_stopping_is_agreed_and_leaving_leaves_nobody(tmp_path: Path) -> None:
    with engine(tmp_path, "loop") as process:
        while process.next_event(60.0) is None:
            pass
        process.tell("stop")
        heard = events(process)
        assert [event["type"] for event in heard] == ["stopped"]
        assert process.exit_code() == 0
    for path in tmp_path.glob("pid-*"):
        path.unlink()
    with engine(tmp_path, "loop") as process:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            time.sleep(0.1)
    assert gone(tmp_path)
