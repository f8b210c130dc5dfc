"""HTTP of jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from api.auth import Editor, Viewer
from api.context import Services
from api.jobs import service
from api.jobs.schemas import EventPage, JobPage, JobView, Kind, Status
from api.jobs.stream import stream
from api.pagination import Cursor, Id, Limit
from api.refusals import FieldError, Invalid

MAX_SEQ = 2**63 - 1
router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("", operation_id="list_jobs", summary="List jobs")
def list_jobs(
    caller: Viewer,
    context: Services,
    kind: Kind | None = None,
    status: Status | None = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> JobPage:
    """Profiles, trainings and evaluations, newest first."""
    return service.page(context, caller, kind=kind, status=status, limit=limit, cursor=cursor)


@router.get("/{id}", operation_id="get_job", summary="Get a job")
def get_job(id: Id, caller: Viewer, context: Services) -> JobView:
    """State, progress and cost of one job of any kind."""
    return service.get(context, caller, id)


@router.get(
    "/{id}/events",
    operation_id="follow_job",
    summary="Follow a job",
    response_model=EventPage,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
def follow_job(
    id: Id,
    caller: Viewer,
    context: Services,
    request: Request,
    last_event_id: Annotated[
        str | None, Header(description="go on after this event of a stream cut short", max_length=30)
    ] = None,
    after: Annotated[int, Query(ge=0, le=MAX_SEQ, description="only events with a greater `seq`")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="events per page, as JSON")] = 100,
) -> Response:
    """Server-sent events, closed after the job's last one; with `Accept: application/json` one page."""
    start = max(after, _seq(last_event_id))
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse(service.event_page(context, caller, id, start, limit).model_dump(mode="json"))
    service.get(context, caller, id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        stream(context, id, start), media_type="text/event-stream; charset=utf-8", headers=headers
    )


def _seq(last_event_id: str | None) -> int:
    if not last_event_id:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdecimal()) or int(last_event_id) > MAX_SEQ:
        raise Invalid([FieldError(("header", "Last-Event-ID"), "is not the id of an event")])
    return int(last_event_id)


@router.post("/{id}/cancel", operation_id="cancel_job", summary="Cancel a job")
def cancel_job(id: Id, caller: Editor, context: Services) -> JobView:
    """A queued job ends at once, a running one writes a checkpoint and stops; repeating changes nothing."""
    return service.cancel(context, caller, id)


@router.post("/{id}/resume", operation_id="resume_job", summary="Resume a training")
def resume_job(id: Id, caller: Editor, context: Services) -> JobView:
    """A failed or cancelled training goes on from its last checkpoint."""
    return service.resume(context, caller, id)
