"""What every part of a worker process shares."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy.orm import Session, sessionmaker

from store import queue
from store.artifacts import ArtifactStore
from store.database import make_engine, session_factory
from store.ids import new_id
from store.settings import Settings
from workers.tracking.base import Tracker
from workers.tracking.catalogue import connections


@dataclass(frozen=True)
class Runtime:
    """A worker's settings and connections; ``stopping`` is set when the process should leave.

    ``trackers`` connect to what shows the metrics of trainings beside the store.
    """

    settings: Settings
    sessions: sessionmaker[Session]
    artifacts: ArtifactStore
    worker: str
    concurrency: int = 1
    kinds: tuple[str, ...] = tuple(queue.QUEUES)
    trackers: Mapping[str, Callable[[], Tracker]] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def create(
        cls, settings: Settings, *, concurrency: int = 1, kinds: tuple[str, ...] = tuple(queue.QUEUES)
    ) -> Runtime:
        """A runtime with its own database engine and a worker name that no other process has.

        Raises:
            TrackerUnavailable: a tracker of the settings cannot be used.
        """
        return cls(
            settings=settings,
            sessions=session_factory(make_engine(settings.database_url)),
            artifacts=ArtifactStore(settings.artifacts_url),
            worker=f"{socket.gethostname()}-{os.getpid()}-{new_id('w')[-6:]}",
            concurrency=concurrency,
            kinds=kinds,
            trackers=connections(settings),
        )

    @property
    def queues(self) -> tuple[str, ...]:
        """Names of the queues this worker serves."""
        return tuple(queue.QUEUES[kind] for kind in self.kinds)

    @property
    def engine_threads(self) -> int:
        """CPU threads that one engine process gets."""
        return self.settings.engine_threads or max(1, len(os.sched_getaffinity(0)) // self.concurrency)

    @property
    def reads(self) -> sessionmaker[Session]:
        """Sessions that only read, and take no write lock."""
        return session_factory(self.sessions.kw["bind"], read_only=True)

    def publish(self, kind: str, job_id: str) -> bool:
        """Tell all workers about a job."""
        return queue.publish(self.settings.broker_url, kind, job_id)

    def publish_group(self, kind: str, job_ids: Sequence[str]) -> bool:
        """Tell all workers about several jobs at once."""
        return queue.publish_group(self.settings.broker_url, kind, job_ids)
