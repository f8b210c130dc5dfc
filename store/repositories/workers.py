"""Which workers are alive and what they serve."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from store.models import WorkerHeartbeat
from store.types import utcnow


def beat(session: Session, worker: str, queues: Sequence[str], proposals: Sequence[str] = ()) -> None:
    """Record that ``worker`` is alive, serves ``queues`` and can use the sources ``proposals``."""
    row = session.get(WorkerHeartbeat, worker)
    if row is None:
        row = WorkerHeartbeat(worker=worker)
        session.add(row)
    row.queues, row.proposals, row.seen_at = list(queues), list(proposals), utcnow()
    session.flush()


def leave(session: Session, worker: str) -> None:
    """Record that ``worker`` has ended."""
    session.execute(delete(WorkerHeartbeat).where(WorkerHeartbeat.worker == worker))


def forget(session: Session, before: datetime) -> None:
    """Drop workers not seen since ``before``."""
    session.execute(delete(WorkerHeartbeat).where(WorkerHeartbeat.seen_at < before))


def served_queues(session: Session, since: datetime) -> set[str]:
    """Queues with a worker seen at ``since`` or later."""
    rows = session.scalars(select(WorkerHeartbeat).where(WorkerHeartbeat.seen_at >= since))
    return {queue for row in rows for queue in row.queues}


def proposal_sources(session: Session, queue: str, since: datetime) -> set[str] | None:
    """Sources of proposals that all workers of ``queue`` seen since ``since`` can use; None without one.

    All of them, because any of them may take the job.
    """
    rows = session.scalars(select(WorkerHeartbeat).where(WorkerHeartbeat.seen_at >= since))
    usable = [set(row.proposals) for row in rows if queue in row.queues]
    return set.intersection(*usable) if usable else None
