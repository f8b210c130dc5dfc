"""Jobs as clients see them: submitted, listed, followed, cancelled, resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from api.context import Caller, Context
from api.idempotency import Answer, Create, once
from api.jobs.schemas import Cost, EventPage, EventView, JobError, JobPage, JobView, Progress
from store.models import Job, JobEvent
from store.repositories import jobs
from store.types import utcnow


def view(job: Job) -> JobView:
    """The shape that all jobs share."""
    return JobView(**fields(job))


def fields(job: Job) -> dict[str, Any]:
    """The fields of :func:`view`, for views that add more."""
    done, total = jobs.phase_progress(job)
    return {
        "id": job.id,
        "kind": job.kind,
        "status": job.status,
        "progress": Progress(phase=job.phase, done=done, total=total, eta_seconds=_eta(job)),
        "error": JobError(**job.error) if job.error else None,
        "attempt": job.attempt,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "cost": Cost(**job.cost),
        "parent": job.parent_id,
        "warnings": job.warnings,
        "result": job.result,
    }


def _eta(job: Job) -> float | None:
    """Seconds left in the current phase at its mean pace so far; None when nothing is known."""
    advanced = job.done - job.phase_offset
    if job.status != "running" or job.phase_started_at is None or advanced <= 0:
        return None
    elapsed = (utcnow() - job.phase_started_at).total_seconds()
    return round(max(elapsed, 0.0) / advanced * (job.total - job.done), 1)


def submit(
    context: Context,
    caller: Caller,
    key: str | None,
    kind: str,
    request: Mapping[str, Any],
    status: int,
    resolve: Callable[[], Mapping[str, Any]],
) -> Answer:
    """Check a request with ``resolve``, store a queued job with its config, tell the workers.

    Raises:
        Conflict: a reused Idempotency-Key. Whatever ``resolve`` raises starts nothing.
    """

    def prepare() -> Create:
        config = resolve()
        return lambda session: view(
            jobs.create(session, workspace_id=caller.workspace_id, kind=kind, request=request, config=config)
        )

    answer = once(context, caller, key, (kind, request), status, prepare)
    if not answer.repeated:
        context.publish(kind, answer.body["id"])
    return answer


def get(context: Context, caller: Caller, job_id: str) -> JobView:
    """The job. Raises NotFound."""
    with context.read() as session:
        return view(jobs.get(session, job_id, caller.workspace_id))


def page(
    context: Context,
    caller: Caller,
    *,
    kind: str | None,
    status: str | None,
    limit: int,
    cursor: str | None,
) -> JobPage:
    """Jobs of the caller's workspace, newest first. Raises InvalidCursor."""
    with context.read() as session:
        rows, following = jobs.page(
            session, caller.workspace_id, kind=kind, status=status, limit=limit, cursor=cursor
        )
        return JobPage(data=[view(row) for row in rows], next_cursor=following)


def cancel(context: Context, caller: Caller, job_id: str) -> JobView:
    """Ask the job to stop. Raises NotFound, InvalidTransition."""
    with context.write.begin() as session:
        return view(jobs.request_cancel(session, job_id, caller.workspace_id))


def resume(context: Context, caller: Caller, job_id: str) -> JobView:
    """Queue a failed or cancelled training again. Raises NotFound, InvalidTransition."""
    with context.write.begin() as session:
        answer = view(jobs.requeue(session, job_id, caller.workspace_id))
    context.publish(answer.kind, job_id)
    return answer


def events(
    context: Context, job_id: str, after: int, limit: int, caller: Caller | None = None
) -> tuple[Sequence[JobEvent], bool]:
    """Events after ``after``, and whether the job is over and these are its last. Raises NotFound.

    The state is read before the events: a terminal state is committed together with its event, so no event
    can follow what this returns as the last. ``caller`` is checked unless an earlier call did.
    """
    with context.read() as session:
        job = jobs.get(session, job_id, caller.workspace_id if caller else None)
        over = jobs.is_terminal(job)
        rows = jobs.events(session, job_id, after, limit)
    return rows, over and len(rows) < limit


def event_page(context: Context, caller: Caller, job_id: str, after: int, limit: int) -> EventPage:
    """Events after ``after``, oldest first. Raises NotFound."""
    rows, last = events(context, job_id, after, limit, caller)
    data = [EventView(seq=row.seq, type=row.type, data=row.data, created_at=row.created_at) for row in rows]
    return EventPage(data=data, next_after=None if last else (rows[-1].seq if rows else after))
