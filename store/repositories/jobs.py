"""Jobs as their owners see them: create, read, cancel, resume, follow.

The state machine is queued -> running -> succeeded | failed | cancelled, with cancelling between running and
cancelled. What a running attempt may write is in :mod:`store.repositories.attempts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import fsum
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from store.errors import InvalidTransition, NotFound
from store.ids import JOB_PREFIXES, new_id
from store.models import ACTIVE, INTERNAL_KINDS, TERMINAL, Job, JobEvent, no_cost
from store.repositories.pagination import newest_first
from store.types import utcnow


def create(
    session: Session,
    *,
    workspace_id: str,
    kind: str,
    request: Mapping[str, Any],
    config: Mapping[str, Any],
    parent_id: str | None = None,
    resume_from: str | None = None,
    fingerprint: str | None = None,
    id: str | None = None,
) -> Job:
    """A queued job. Its message counts as published now: the caller publishes right after the commit."""
    job = Job(
        id=id or new_id(JOB_PREFIXES[kind]),
        workspace_id=workspace_id,
        kind=kind,
        request=dict(request),
        config=dict(config),
        parent_id=parent_id,
        resume_from=resume_from,
        fingerprint=fingerprint,
        published_at=utcnow(),
    )
    session.add(job)
    session.flush()
    add_status_event(session, job)
    return job


def create_measured(
    session: Session,
    parent: Job,
    *,
    kind: str,
    request: Mapping[str, Any],
    config: Mapping[str, Any],
    cost: Mapping[str, float],
    warnings: Sequence[str],
) -> Job:
    """A job that has already succeeded, because its parent did its work on the way."""
    now = utcnow()
    job = Job(
        id=new_id(JOB_PREFIXES[kind]),
        workspace_id=parent.workspace_id,
        kind=kind,
        status="succeeded",
        phase="finished",
        attempt=1,
        request=dict(request),
        config=dict(config),
        cost={name: cost.get(name, 0) for name in no_cost()},
        warnings=list(warnings),
        parent_id=parent.id,
        started_at=parent.phase_started_at or now,
        finished_at=now,
    )
    session.add(job)
    session.flush()
    add_status_event(session, job)
    return job


def get(session: Session, job_id: str, workspace_id: str | None = None, *, kind: str | None = None) -> Job:
    """The job; with ``workspace_id`` or ``kind``, only when it is of that workspace or kind.

    To a workspace its jobs of internal kinds do not exist.

    Raises:
        NotFound: there is no such job for the caller.
    """
    job = session.get(Job, job_id)
    if job is None or workspace_id not in (None, job.workspace_id) or kind not in (None, job.kind):
        raise NotFound(kind or "job", job_id)
    if workspace_id is not None and job.kind in INTERNAL_KINDS:
        raise NotFound(kind or "job", job_id)
    return job


def reusable(session: Session, workspace_id: str, fingerprint: str) -> Job | None:
    """The newest succeeded job of a workspace with ``fingerprint``, else the oldest one under way."""
    query = select(Job).where(Job.workspace_id == workspace_id, Job.fingerprint == fingerprint)
    done = query.where(Job.status == "succeeded").order_by(Job.created_at.desc(), Job.id.desc())
    under_way = query.where(Job.status.in_(("queued", "running"))).order_by(Job.created_at, Job.id)
    return session.scalar(done.limit(1)) or session.scalar(under_way.limit(1))


def page(
    session: Session,
    workspace_id: str,
    *,
    kind: str | None = None,
    status: str | None = None,
    limit: int = 20,
    cursor: str | None = None,
) -> tuple[Sequence[Job], str | None]:
    """Jobs of a workspace, newest first, and the cursor of the next page. Raises InvalidCursor."""
    query = select(Job).where(Job.workspace_id == workspace_id, Job.kind.not_in(INTERNAL_KINDS))
    if kind is not None:
        query = query.where(Job.kind == kind)
    if status is not None:
        query = query.where(Job.status == status)
    return newest_first(session, query, Job, limit=limit, cursor=cursor)


def children(session: Session, parent_id: str, *, kind: str | None = None) -> Sequence[Job]:
    """Jobs that another job made (the profiles of a training), oldest first."""
    query = select(Job).where(Job.parent_id == parent_id).order_by(Job.created_at, Job.id)
    return session.scalars(query if kind is None else query.where(Job.kind == kind)).all()


def add_up_shards(session: Session, job: Job) -> None:
    """Make the cost of a job that has shards their sum: each row once, with all its attempts."""
    query = select(Job.cost).where(Job.parent_id == job.id, Job.kind.in_(INTERNAL_KINDS))
    if costs := session.scalars(query.order_by(Job.id)).all():
        job.cost = {name: type(zero)(fsum(cost[name] for cost in costs)) for name, zero in no_cost().items()}
        session.flush()


def cancel_shards(session: Session, parent_id: str) -> None:
    """Ask every shard that has not ended to stop; the caller holds the parent's lock."""
    query = select(Job.id).where(
        Job.parent_id == parent_id, Job.kind.in_(INTERNAL_KINDS), Job.status.in_(("queued", "running"))
    )
    for shard_id in session.scalars(query.order_by(Job.id)).all():
        shard = lock(session, shard_id)
        if shard.status in ("queued", "running"):
            _cancel(session, shard)


def request_cancel(session: Session, job_id: str, workspace_id: str | None = None) -> Job:
    """Cancel a queued job at once, or ask a running one to stop; asking again changes nothing.

    Its shards, if it has any, stop with it.

    Raises:
        NotFound: no such job.
        InvalidTransition: the job has succeeded or failed.
    """
    job = lock(session, job_id, workspace_id)
    if job.status in ("cancelling", "cancelled"):
        return job
    if job.status not in ("queued", "running"):
        raise InvalidTransition(f"job {job_id} has already {job.status}")
    _cancel(session, job)
    cancel_shards(session, job.id)
    return job


def _cancel(session: Session, job: Job) -> None:
    """Move a queued or running job, which the caller has locked, towards its cancellation."""
    if job.status == "queued":
        job.status, job.finished_at = "cancelled", utcnow()
    else:
        job.status = "cancelling"
    job.stop_requested = True
    add_status_event(session, job)


def requeue(session: Session, job_id: str, workspace_id: str | None = None) -> Job:
    """Queue a failed or cancelled training again; it goes on from its newest checkpoint, if it has one.

    Raises:
        NotFound: no such job.
        InvalidTransition: the job is not a training, or neither failed nor cancelled.
    """
    job = lock(session, job_id, workspace_id)
    if job.kind != "training":
        raise InvalidTransition(f"only a training can be resumed, and {job_id} is a {job.kind}")
    if job.status not in ("failed", "cancelled"):
        raise InvalidTransition(
            f"only a failed or cancelled job can be resumed, and {job_id} is {job.status}"
        )
    job.crashes, job.error, job.finished_at, job.result = 0, None, None, None
    back_to_queue(job)
    job.published_at = utcnow()
    add_status_event(session, job)
    return job


def lock(session: Session, job_id: str, workspace_id: str | None = None) -> Job:
    """The job, fresh, its row locked until the transaction ends. Raises NotFound.

    All writers of a job take this lock (or the one of ``attempts.hold``) first, so the events of one job are
    committed in the order of their ``seq``, and a reader that has seen one has seen all before it.
    """
    get(session, job_id, workspace_id)
    session.execute(update(Job).where(Job.id == job_id).values(attempt=Job.attempt))
    return session.get_one(Job, job_id, populate_existing=True)


def phase_progress(job: Job) -> tuple[int, int]:
    """How far the job's current phase has counted, and to what: a resumed training counts all its epochs."""
    before = job.phase_start - job.phase_offset
    return job.done + before, job.total + before


def back_to_queue(job: Job) -> None:
    """Give the job up: nobody's, and waiting to be claimed."""
    job.status, job.phase = "queued", "queued"
    job.worker = job.lease_expires_at = job.published_at = None
    job.stop_requested = False


def add_event(session: Session, job_id: str, type: str, data: Mapping[str, Any]) -> JobEvent:
    """Append an event; the caller holds the job's lock."""
    event = JobEvent(job_id=job_id, type=type, data=dict(data))
    session.add(event)
    session.flush()
    return event


def add_status_event(session: Session, job: Job) -> JobEvent:
    """Append the event that tells the job's present status."""
    data = {"status": job.status, "attempt": job.attempt, "error": job.error}
    return add_event(session, job.id, "status", data)


def events(session: Session, job_id: str, after_seq: int = 0, limit: int = 100) -> Sequence[JobEvent]:
    """Events of a job with ``seq > after_seq``, in order; the caller has checked that the job is visible."""
    query = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.seq > after_seq)
    return session.scalars(query.order_by(JobEvent.seq).limit(limit)).all()


def is_terminal(job: Job) -> bool:
    """Whether the job has ended."""
    return job.status in TERMINAL


def unpublished(session: Session, before: datetime, *, kind: str | None = None) -> Sequence[Job]:
    """Queued jobs whose message was published before ``before``, or never; oldest first.

    So was one whose message lies ahead by as much: the clock has been put back since.
    """
    ahead = utcnow() + (utcnow() - before)
    overdue = or_(Job.published_at.is_(None), Job.published_at < before, Job.published_at > ahead)
    query = select(Job).where(Job.status == "queued", overdue)
    if kind is not None:
        query = query.where(Job.kind == kind)
    return session.scalars(query.order_by(Job.created_at, Job.id)).all()


def take_to_publish(session: Session, job: Job) -> bool:
    """Mark ``job`` as published now; False when another sweeper or a claim was first."""
    same = Job.published_at.is_(None) if job.published_at is None else Job.published_at == job.published_at
    result = session.execute(
        update(Job)
        .where(Job.id == job.id, Job.status == "queued", same)
        .values(published_at=utcnow())
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    )
    return result.first() is not None


def count(session: Session, *, status: str, kind: str | None = None) -> int:
    """How many jobs there are in a state."""
    query = select(func.count()).select_from(Job).where(Job.status == status)
    return session.scalar(query if kind is None else query.where(Job.kind == kind)) or 0


def counts(session: Session, workspace_id: str) -> dict[tuple[str, str], int]:
    """How many jobs a workspace has of each (kind, status) that occurs."""
    query = select(Job.kind, Job.status, func.count()).where(Job.workspace_id == workspace_id)
    rows = session.execute(query.group_by(Job.kind, Job.status))
    return {(kind, status): number for kind, status, number in rows}


def leases(session: Session) -> dict[str, datetime]:
    """When the leases of running and cancelling jobs end, by job, the first to end first."""
    query = select(Job.id, Job.lease_expires_at).where(Job.status.in_(ACTIVE))
    rows = session.execute(query.order_by(Job.lease_expires_at))
    return {id: lease for id, lease in rows if lease is not None}
