"""Readiness: the database, the broker, and a live worker for every queue."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from api.context import Caller, Context
from api.health.schemas import Readiness
from store import queue
from store.models import JOB_KINDS, JOB_STATUSES
from store.repositories import jobs, workers
from store.types import utcnow

LOG = logging.getLogger(__name__)
FRESH_SECONDS = 2.0


class Probe:
    """Answers readiness, looking at most once in two seconds however often it is asked."""

    def __init__(self, context: Context):
        self._context = context
        self._lock = threading.Lock()
        self._answer: Readiness | None = None
        self._at = 0.0

    def readiness(self) -> Readiness:
        """The state of everything that a job needs."""
        with self._lock:
            if self._answer is None or time.monotonic() - self._at > FRESH_SECONDS:
                self._answer = _look(self._context)
                self._at = time.monotonic()
            return self._answer


def _look(context: Context) -> Readiness:
    served: set[str] = set()
    database = True
    since = utcnow() - timedelta(seconds=context.settings.lease_seconds)
    try:
        with context.read() as session:
            served = workers.served_queues(session, since)
    except SQLAlchemyError as error:
        LOG.warning("the database does not answer: %s", error)
        database = False
    broker = queue.reachable(context.settings.broker_url)
    queues = {name: name in served for name in queue.QUEUES.values()}
    ready = database and broker and all(queues.values())
    return Readiness(ready=ready, database=database, broker=broker, queues=queues)


def job_counts(context: Context, caller: Caller) -> dict[tuple[str, str], int]:
    """How many jobs of the caller's workspace are of each kind and status."""
    with context.read() as session:
        counted = jobs.counts(session, caller.workspace_id)
    return {(kind, status): counted.get((kind, status), 0) for kind in JOB_KINDS for status in JOB_STATUSES}
