"""What is lost when processes are killed: nothing but time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from recast import service
from recast.client import Client
from recast.home import Home
from recast.memory import descendants
from tests.recast.processes import alive, eventually

EPOCHS = 6
BODY: dict[str, Any] = {
    "model": "miniature",
    "prompt_set": "pset_miniature_train",
    "stages": [{"budgets": {"clipscore": 1}, "epochs": EPOCHS, "allocation": {"method": "static"}}],
    "sampling": {"steps": 4, "prompts_per_epoch": 2, "images_per_prompt": 4},
    "optimizer": {"batch_size": 8, "timesteps_per_image": 1},
    "lora": {"rank": 4, "alpha": 8},
    "checkpoint_every": 1,
    "samples_every": 100,
}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def processes(home: Home, part: str) -> list[int]:
    """Processes below the service whose command line contains ``part``."""
    record = service.running(home)
    assert record is not None
    return [pid for pid in descendants(record.pid) if part in command(pid)]


def test_a_killed_worker_costs_only_the_time_since_the_last_checkpoint(home: Home) -> None:
    with Client(home=home.root) as client:
        job = client.create_training(BODY)
        for event in client.events(job["id"]):
            if event.type == "file" and event.data["kind"] == "checkpoint" and event.data["step"] >= 2:
                break
        [worker] = processes(home, "workers.main")
        engines = processes(home, "workers.engine")
        os.kill(worker, signal.SIGKILL)
        assert eventually(lambda: not any(alive(pid) for pid in engines), 10)
        finished = client.wait(job["id"])
        assert finished["attempt"] == 2
        series = client.metrics(job["id"], ["objective"])["series"]["objective"]
        assert series["steps"] == list(range(1, EPOCHS + 1))
        epochs = [event.data["step"] for event in client.events(job["id"]) if event.type == "metrics"]
        assert epochs.count(1) == 1  # the second attempt did not begin at the beginning
        assert len([adapter for adapter in client.adapters(job["id"]) if adapter["final"]]) == 1


def test_a_killed_api_comes_back_and_followers_miss_and_repeat_nothing(home: Home) -> None:
    with Client(home=home.root) as client:
        job = client.create_training({**BODY, "seed": 3})
        followed, kills = [], 2
        for event in client.events(job["id"]):
            followed.append(event.seq)
            if event.type == "metrics" and kills:
                kills -= 1
                assert eventually(lambda: len(processes(home, "-m recast.api_process")) == 1, 30)
                [api] = processes(home, "-m recast.api_process")
                os.kill(api, signal.SIGKILL)
        assert kills == 0
        assert client.wait(job["id"])["attempt"] == 1
        assert followed == [event.seq for event in client.events(job["id"])]


def test_a_service_ends_when_its_home_is_moved_away_and_goes_on_when_it_is_back(
    home: Home, tmp_path: Path
) -> None:
    with Client(home=home.root) as client:
        job = client.create_training({**BODY, "seed": 2})
        for event in client.events(job["id"]):
            if event.type == "file" and event.data["kind"] == "checkpoint":
                break
    record = service.running(home)
    assert record is not None
    pids = descendants(record.pid)
    away = tmp_path / "away"
    home.root.rename(away)
    assert eventually(lambda: not any(alive(pid) for pid in pids), 60)
    said = (away / "logs" / "service.log").read_text().splitlines()[-1]
    assert f"Error: {home.root} was moved or deleted while its service ran" in said
    if home.root.exists():  # what the engine's leaving made there
        home.root.rename(tmp_path / "made anew")
    away.rename(home.root)
    service.start_in_background(home, 0, bound=True)
    with Client(home=home.root) as client:
        if client.job(job["id"])["status"] == "failed":  # its engine missed a file first
            assert client.job(job["id"])["error"]["type"] == "storage-error"
            client.resume(job["id"])
        assert client.wait(job["id"])["status"] == "succeeded"


def test_a_killed_service_leaves_no_process_and_goes_on_when_started_again(home: Home) -> None:
    with Client(home=home.root) as client:
        job = client.create_training({**BODY, "seed": 1})
        for event in client.events(job["id"]):
            if event.type == "file" and event.data["kind"] == "checkpoint":
                break
    record = service.running(home)
    assert record is not None
    pids = descendants(record.pid)
    assert len(pids) >= 5  # supervisor, broker, API, worker, engine
    os.kill(record.pid, signal.SIGKILL)
    assert eventually(lambda: not any(alive(pid) for pid in pids), 15)
    service.start_in_background(home, 0, bound=True)
    with Client(home=home.root) as client:
        assert client.wait(job["id"])["attempt"] == 2
