"""Which workers are alive and what they serve."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from store.models import WorkerHeartbeat
from store.types import utcnow


def beat(session: Session, worker: str, queues: Sequence[str]) -> None:
    """Record that ``worker`` is alive and serves ``queues``."""
    row = session.get(WorkerHeartbeat, worker)
    if row is None:
        row = WorkerHeartbeat(worker=worker)
        session.add(row)
    row.queues, row.seen_at = list(queues), utcnow()
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
