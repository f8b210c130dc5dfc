"""What keeps jobs moving when messages or workers are lost; every worker runs one."""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import datetime, timedelta
from functools import partial

from kombu.exceptions import KombuError
from redis.exceptions import RedisError
from sqlalchemy.orm import Session

from recast_engine.proposals.environment import usable_sources
from store import queue
from store.database import transact
from store.models import Job
from store.repositories import attempts, idempotency, jobs, shards, workers
from store.types import utcnow
from workers import workdirs
from workers.runtime import Runtime

log = logging.getLogger(__name__)

FORGET_SECONDS = 24 * 3600.0
TIDY_SECONDS = 3600.0


class Sweeper:
    """A thread that sweeps every ``sweep_seconds`` and tells that its worker is alive."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._closed = threading.Event()
        self._tidied_at = -math.inf
        self._unrenewed: dict[str, tuple[datetime, float]] = {}  # job -> lease, and since when it is so
        self._thread = threading.Thread(target=self._loop, name="sweeper", daemon=True)

    def start(self) -> None:
        """Begin; the worker counts as alive from here on."""
        self.beat()
        self._thread.start()

    def close(self) -> None:
        """End, and record that the worker has left."""
        self._closed.set()
        self._thread.join()
        transact(self._runtime.sessions, lambda session: workers.leave(session, self._runtime.worker))

    def _loop(self) -> None:
        while not self._closed.wait(self._runtime.settings.sweep_seconds):
            try:
                self.beat()
                self.sweep()
                if time.monotonic() - self._tidied_at >= TIDY_SECONDS:
                    self.tidy()
            except Exception:
                log.exception("sweep failed; the next one comes in time")

    def beat(self) -> None:
        """Record that the worker is alive."""
        runtime = self._runtime
        sources = usable_sources()
        transact(
            runtime.sessions, lambda session: workers.beat(session, runtime.worker, runtime.queues, sources)
        )

    def tidy(self) -> None:
        """Drop what nobody uses: dead workers, old Idempotency-Keys, work folders, half-written files."""
        now, keep = utcnow(), self._runtime.settings.idempotency_seconds

        def forget(session: Session) -> None:
            workers.forget(session, now - timedelta(seconds=FORGET_SECONDS))
            idempotency.forget(session, now - timedelta(seconds=keep))

        transact(self._runtime.sessions, forget)
        workdirs.sweep(self._runtime)
        self._runtime.artifacts.drop_drafts(FORGET_SECONDS)
        self._tidied_at = time.monotonic()

    def sweep(self) -> None:
        """Take jobs from dead workers, publish queued jobs that no message serves, drop what is merged."""
        for job_id, lease in self._dead_leases():
            self._reap(job_id, lease)
        for kind in queue.QUEUES:
            self._republish(kind)
        self._drop_spent_scores()

    def _dead_leases(self) -> list[tuple[str, datetime]]:
        """Jobs and their leases that are over by the clock, or by the time that nobody has renewed them.

        The clock alone would wait for a lease that was written before it was put back.
        """
        now, tick = utcnow(), time.monotonic()
        leases = transact(self._runtime.reads, jobs.leases)
        known = self._unrenewed
        self._unrenewed = {
            job_id: known[job_id] if job_id in known and known[job_id][0] == lease else (lease, tick)
            for job_id, lease in leases.items()
        }
        patience = 2 * self._runtime.settings.lease_seconds
        return [
            (job_id, lease)
            for job_id, (lease, since) in self._unrenewed.items()
            if lease < now or tick - since > patience
        ]

    def _reap(self, job_id: str, lease: datetime) -> None:
        limit = self._runtime.settings.worker_attempts
        job = transact(self._runtime.sessions, lambda session: attempts.reap(session, job_id, lease, limit))
        if job is not None:
            log.warning("the worker of %s is dead: job is now %s", job_id, job.status)

    def _drop_spent_scores(self) -> None:
        """Delete the score files of shards whose profile has ended: bytes first, so none is forgotten."""
        for artifact in transact(self._runtime.reads, shards.spent_scores):
            self._runtime.artifacts.delete_prefix(artifact.key)
            transact(self._runtime.sessions, partial(shards.forget_scores, artifact_id=artifact.id))

    def _republish(self, kind: str) -> None:
        """Publish jobs of a kind whose message is overdue, unless the queue holds a message for each.

        Jobs that wait behind others have their messages in the queue; without this look a long backlog would
        gather a new message per job and sweep.
        """
        runtime = self._runtime
        before = utcnow() - timedelta(seconds=runtime.settings.republish_seconds)

        def overdue(session: Session) -> tuple[list[Job], int]:
            found = jobs.unpublished(session, before, kind=kind)
            return list(found), jobs.count(session, status="queued", kind=kind)

        late, waiting = transact(runtime.sessions, overdue)
        if not late:
            return
        try:
            if queue.depth(runtime.settings.broker_url, kind) >= waiting:
                return
        except (KombuError, RedisError, OSError) as error:
            log.warning("broker not reachable: %s", error)
            return
        for job in late:
            if transact(runtime.sessions, partial(jobs.take_to_publish, job=job)):
                log.info("%s: its message is overdue, publishing again", job.id)
                runtime.publish(job.kind, job.id)
