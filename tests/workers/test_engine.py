"""The engine process by itself, as its worker would speak with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from recast_engine.errors import NonFinite
from tests.workers.conftest import REPOSITORY
from workers.engine import PARENT_GONE, Commands, PipeObserver, describe
from workers.process import EngineProcess, thread_environment


def launch(workdir: Path, fake: dict[str, Any]) -> subprocess.Popen[str]:
    request = {"config": {"fake": fake}, "resume_from": None, "adapters": {}}
    (workdir / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "workers.engine", str(workdir)]
    return subprocess.Popen(
        [*command, "--runner", "tests.workers.fake_engine:run"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def events_until(process: subprocess.Popen[str], type: str) -> list[dict[str, Any]]:
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["type"] == type:
            return events
    return events


def tell(process: subprocess.Popen[str], command: str) -> None:
    assert process.stdin is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()


def test_a_file_is_kept_until_it_is_taken(tmp_path: Path) -> None:
    with launch(tmp_path, {"do": "evaluate"}) as process:
        file = events_until(process, "file")[-1]
        assert (file["n"], file["kind"], file["name"]) == (1, "report", "report.html")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        tell(process, "taken 1")
        rest = events_until(process, "result")
        assert [event["type"] for event in rest] == ["finding", "finding", "result"]
        assert process.wait(10) == 0


@pytest.mark.parametrize("how", ["command", "signal"])
def test_stop_is_heard(tmp_path: Path, how: str) -> None:
    with launch(tmp_path, {"do": "train", "epochs": 50, "pause": 0.05}) as process:
        events_until(process, "metrics")
        if how == "command":
            tell(process, "stop")
        else:
            process.send_signal(signal.SIGTERM)
        for number in range(1, 50):
            tell(process, f"taken {number}")
        kinds = [event["type"] for event in events_until(process, "stopped")]
        assert kinds[-1] == "stopped"
        assert "file" in kinds  # the checkpoint comes first
        assert process.wait(10) == 0


@pytest.mark.parametrize("fake", [{"do": "hang"}, {"do": "evaluate"}])
def test_an_engine_does_not_outlive_its_worker(tmp_path: Path, fake: dict[str, Any]) -> None:
    """It ends at once, even with SIGTERM ignored or while it waits for a file to be taken."""
    with launch(tmp_path, fake) as process:
        events_until(process, "file" if fake["do"] == "evaluate" else "phase")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(5) == PARENT_GONE


def test_events_are_plain_json_whatever_the_engine_says(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with path.open("wb") as stream, (tmp_path / "none").open("wb+") as silence:
        observer = PipeObserver(stream, Commands(silence))
        observer.metrics(1, {"a": np.float32(0.5), "b": float("nan"), "c": float("-inf")})
        payload = {
            "m": np.eye(2),
            "n": np.int64(3),
            "x": float("inf"),
            "t": (1, None),
            "p": tmp_path,
            7: True,
        }
        observer.finding("stage", payload)
    metrics, finding = (json.loads(line) for line in path.read_text().splitlines())
    assert metrics == {"type": "metrics", "step": 1, "values": {"a": 0.5}}
    assert finding["payload"] == {
        "m": [[1.0, 0.0], [0.0, 1.0]],
        "n": 3,
        "x": None,
        "t": [1, None],
        "p": str(tmp_path),
        "7": True,
    }


def test_errors_keep_their_type_and_lose_their_secrets() -> None:
    class OutOfMemoryError(RuntimeError):
        """Named as the one of a device library."""

    assert describe(NonFinite("loss at step 3")) == {"type": "non-finite", "detail": "loss at step 3"}
    assert describe(OutOfMemoryError("tried 3 GiB"))["type"] == "out-of-memory"
    full = {
        "type": "storage-error",
        "detail": "a file of the job could not be used (No space left on device): make sure that the storage "
        "has room, can be written and can be reached, then start the job again",
    }
    assert describe(OSError(28, "No space left on device", "/secret")) == full
    assert "could not be used (OSError)" in describe(OSError("cannot write mode P"))["detail"]
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert describe(SafetensorError(text)) == full
    internal = describe(KeyError("/secret"))
    assert internal["type"] == "internal"
    assert "secret" not in internal["detail"]


def test_leaving_kills_the_whole_group(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"config": {"fake": {"do": "hang"}}}))
    with EngineProcess(tmp_path, "tests.workers.fake_engine:run", 1) as engine:
        event = engine.next_event(20)
        assert event == {"type": "phase", "name": "hanging", "total": 1}
        assert not engine.ended()
    assert engine.exit_code() == -signal.SIGKILL


def test_an_engine_gets_its_share_of_threads() -> None:
    assert thread_environment(3) == {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "RECAST_ENGINE_THREADS": "3",
        "OMP_WAIT_POLICY": "passive",
    }
