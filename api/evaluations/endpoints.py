"""HTTP of evaluations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response, status

from api.auth import Editor, Viewer
from api.body import describes, json_body
from api.context import Services
from api.evaluations import service
from api.evaluations.schemas import EXAMPLE, EvaluationView
from api.files import Download, serve
from api.idempotency import Key, respond
from api.jobs import service as jobs_service
from api.jobs.schemas import Estimate, JobPage, JobView, Status
from api.pagination import Cursor, Id, Limit
from recast_engine.config import EvaluationConfig

router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])
Body = Annotated[EvaluationConfig, json_body(EvaluationConfig)]
DESCRIPTION = describes(EvaluationConfig, miniature=EXAMPLE)
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; img-src data:; font-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)


@router.post(
    "",
    operation_id="create_evaluation",
    summary="Start an evaluation",
    status_code=status.HTTP_202_ACCEPTED,
    response_model=JobView,
    openapi_extra=DESCRIPTION,
)
def create_evaluation(caller: Editor, context: Services, config: Body, key: Key = None) -> Response:
    """Compares adapters and the base model on the same prompts and the same seeds."""
    answer = service.create(context, caller, key, config, status.HTTP_202_ACCEPTED)
    return respond(answer, "/v1/evaluations")


@router.post(
    "/estimate",
    operation_id="estimate_evaluation",
    summary="Estimate an evaluation's cost",
    openapi_extra=DESCRIPTION,
)
def estimate_evaluation(caller: Viewer, context: Services, config: Body) -> Estimate:
    """Checks the request and counts its work; nothing is started."""
    return service.estimate(context, caller, config)


@router.get("", operation_id="list_evaluations", summary="List evaluations")
def list_evaluations(
    caller: Viewer,
    context: Services,
    status: Status | None = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> JobPage:
    """Evaluations, newest first, as jobs."""
    return jobs_service.page(context, caller, kind=service.KIND, status=status, limit=limit, cursor=cursor)


@router.get("/{id}", operation_id="get_evaluation", summary="Get an evaluation")
def get_evaluation(id: Id, caller: Viewer, context: Services) -> EvaluationView:
    """The job, and once finished the report as data."""
    return service.get(context, caller, id)


@router.get(
    "/{id}/report",
    operation_id="get_evaluation_report",
    summary="Get an evaluation's report",
    response_class=Response,
    responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}},
)
def get_evaluation_report(id: Id, caller: Viewer, context: Services, request: Request) -> Response:
    """One self-contained HTML page."""
    row, file = service.html(context, caller, id)
    headers = {"Content-Security-Policy": REPORT_POLICY}
    media_type = "text/html; charset=utf-8"
    return serve(request, Download(file, row.bytes, f'"{row.sha256}"', media_type, headers=headers))
