"""What the worker that holds a job may write: every write is refused once its attempt is over.

An attempt begins with a claim, a compare-and-set on the status ``queued`` that raises the attempt number and
takes a lease. Each later write first locks the row under the condition that the same attempt is still
active; when that matches nothing, the writer is stale and everything it wanted to write is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import and_, not_, select, update
from sqlalchemy.orm import Session

from store.errors import StaleAttempt
from store.models import ACTIVE, INTERNAL_KINDS, TERMINAL, Job, JobEvent
from store.repositories import jobs
from store.types import utcnow


@dataclass(frozen=True)
class Claim:
    """The right to write to a job, as long as its attempt is the job's newest and active."""

    job_id: str
    kind: str
    attempt: int
    worker: str


def claim(session: Session, job_id: str, worker: str, lease_seconds: float) -> Claim | None:
    """Take a queued job; None when it is not queued any more (taken, cancelled, ended) or does not exist."""
    now = utcnow()
    taken = session.execute(
        update(Job)
        .where(Job.id == job_id, Job.status == "queued")
        .values(
            status="running",
            attempt=Job.attempt + 1,
            worker=worker,
            lease_expires_at=now + timedelta(seconds=lease_seconds),
            phase="starting",
            phase_started_at=now,
            phase_offset=0,
            phase_start=0,
            done=0,
            total=0,
            stop_requested=False,
        )
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    ).first()
    if taken is None:
        return None
    job = session.get_one(Job, job_id, populate_existing=True)
    job.started_at = job.started_at or now
    jobs.add_status_event(session, job)
    return Claim(job.id, job.kind, job.attempt, worker)


def is_over(session: Session, job_id: str, attempt: int) -> bool:
    """Whether the job is known and its attempt of that number goes on no more."""
    goes_on = and_(Job.attempt == attempt, Job.status.in_(ACTIVE))
    return session.scalar(select(Job.id).where(Job.id == job_id, not_(goes_on))) is not None


def hold(session: Session, claim: Claim) -> Job:
    """The job of a live attempt, fresh, its row locked until the transaction ends.

    Raises:
        StaleAttempt: the attempt is over.
    """
    locked = session.execute(
        update(Job)
        .where(Job.id == claim.job_id, Job.attempt == claim.attempt, Job.status.in_(ACTIVE))
        .values(attempt=Job.attempt)
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    ).first()
    if locked is None:
        raise StaleAttempt(claim.job_id, claim.attempt)
    return session.get_one(Job, claim.job_id, populate_existing=True)


def heartbeat(session: Session, claim: Claim, lease_seconds: float) -> bool:
    """Renew the lease; True when the job's owner wants it stopped. Raises StaleAttempt."""
    job = hold(session, claim)
    job.lease_expires_at = utcnow() + timedelta(seconds=lease_seconds)
    session.flush()
    return job.stop_requested


def begin_phase(session: Session, claim: Claim, name: str, total: int, start: int = 0) -> None:
    """A phase begins that counts from ``start`` to ``total``, after all that is done so far.

    Raises:
        StaleAttempt: the attempt is over.
    """
    job = hold(session, claim)
    job.phase, job.phase_started_at = name, utcnow()
    job.phase_offset, job.phase_start = job.done, start
    job.total = job.done + max(total - start, 0)
    _progress_event(session, job)


def progress(session: Session, claim: Claim, done: int) -> None:
    """The current phase has counted to ``done``; going back is ignored. Raises StaleAttempt."""
    job = hold(session, claim)
    reached = min(job.phase_offset + done - job.phase_start, job.total)
    if reached <= job.done:
        return
    job.done = reached
    _progress_event(session, job)


def _progress_event(session: Session, job: Job) -> None:
    phase_done, phase_total = jobs.phase_progress(job)
    data = {
        "phase": job.phase,
        "done": job.done,
        "total": job.total,
        "phase_done": phase_done,
        "phase_total": phase_total,
    }
    jobs.add_event(session, job.id, "progress", data)


def add_event(session: Session, claim: Claim, type: str, data: Mapping[str, Any]) -> JobEvent:
    """Append an event to the job. Raises StaleAttempt."""
    hold(session, claim)
    return jobs.add_event(session, claim.job_id, type, data)


def add_warning(session: Session, claim: Claim, text: str) -> None:
    """Add a warning to the job, once, and tell it as an event. Raises StaleAttempt."""
    job = hold(session, claim)
    if text not in job.warnings:
        job.warnings = [*job.warnings, text]
        jobs.add_event(session, job.id, "warning", {"text": text})


def came_further(session: Session, claim: Claim) -> None:
    """The next attempt goes on from further on: crashes so far are no row. Raises StaleAttempt."""
    hold(session, claim).crashes = 0
    session.flush()


def add_cost(session: Session, claim: Claim, cost: Mapping[str, float]) -> None:
    """Add to the job's cost, which counts all attempts. Raises StaleAttempt."""
    job = hold(session, claim)
    job.cost = {name: value + cost.get(name, 0) for name, value in job.cost.items()}
    session.flush()


def finish(
    session: Session,
    claim: Claim,
    status: str,
    *,
    result: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> Job:
    """End the job as succeeded, failed or cancelled. Raises StaleAttempt."""
    return _end(session, hold(session, claim), status, result=result, error=error)


def release(session: Session, claim: Claim) -> Job:
    """Give the job back to the queue because its worker leaves; a job being cancelled ends instead.

    Raises:
        StaleAttempt: the attempt is over.
    """
    job = hold(session, claim)
    if job.status == "cancelling":
        return _end(session, job, "cancelled")
    return _queue_again(session, job)


def crash(session: Session, claim: Claim, error: Mapping[str, Any], limit: int) -> Job:
    """The attempt ended without a word: queue the job again, or fail it with ``error`` at the limit.

    Raises:
        StaleAttempt: the attempt is over.
    """
    return _crash(session, hold(session, claim), error, limit)


def reap(session: Session, job_id: str, lease: datetime, limit: int) -> Job | None:
    """Take a job from a worker whose ``lease`` is dead; None when it was renewed, or the attempt has ended.

    A job being cancelled ends as cancelled. A running one is queued again, or fails after ``limit`` crashes.
    """
    locked = session.execute(
        update(Job)
        .where(Job.id == job_id, Job.status.in_(ACTIVE), Job.lease_expires_at == lease)
        .values(attempt=Job.attempt)
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    ).first()
    if locked is None:
        return None
    job = session.get_one(Job, job_id, populate_existing=True)
    error = {
        "type": "worker-lost",
        "detail": f"{limit} workers in a row disappeared while running this job; it may need more memory",
    }
    return _crash(session, job, error, limit)


def _crash(session: Session, job: Job, error: Mapping[str, Any], limit: int) -> Job:
    if job.status == "cancelling":
        return _end(session, job, "cancelled")
    job.crashes += 1
    if job.crashes >= limit:
        return _end(session, job, "failed", error=error)
    return _queue_again(session, job)


def _queue_again(session: Session, job: Job) -> Job:
    jobs.back_to_queue(job)
    jobs.add_status_event(session, job)
    return job


def _end(
    session: Session,
    job: Job,
    status: str,
    *,
    result: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> Job:
    job.status, job.finished_at = status, utcnow()
    job.result = dict(result) if result is not None else None
    job.error = dict(error) if error is not None else None
    job.lease_expires_at = None
    if status == "succeeded":
        job.done = job.total
    jobs.add_status_event(session, job)
    jobs.cancel_shards(session, job.id)
    jobs.add_up_shards(session, job)
    if job.kind in INTERNAL_KINDS:
        _settle(session, job)
    return job


def _settle(session: Session, shard: Job) -> None:
    """A shard that outlived its profile, by the moments it takes to stop, still counts in its cost."""
    parent = session.get_one(Job, shard.parent_id, populate_existing=True)
    if parent.status in TERMINAL:
        jobs.add_up_shards(session, jobs.lock(session, parent.id))
