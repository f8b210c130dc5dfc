"""HTTP of trainings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, status

from api.adapters import service as adapters_service
from api.adapters.schemas import AdapterPage
from api.auth import Editor, Viewer
from api.body import describes, json_body
from api.context import Services
from api.files import Download, serve
from api.idempotency import Key, respond
from api.jobs import service as jobs_service
from api.jobs.schemas import Estimate, JobPage, JobView, Status
from api.pagination import Cursor, Id, Limit
from api.trainings import service
from api.trainings.schemas import EXAMPLE, CheckpointList, Metrics, SampleList, TrainingView
from recast_engine.config import TrainingConfig

router = APIRouter(prefix="/v1/trainings", tags=["trainings"])
Body = Annotated[TrainingConfig, json_body(TrainingConfig)]
DESCRIPTION = describes(TrainingConfig, miniature=EXAMPLE)
MAX_POINTS = 100_000


@router.post(
    "",
    operation_id="create_training",
    summary="Start a training",
    status_code=status.HTTP_202_ACCEPTED,
    response_model=JobView,
    openapi_extra=DESCRIPTION,
)
def create_training(caller: Editor, context: Services, config: Body, key: Key = None) -> Response:
    """Checks everything that the request names and queues the job; the resolved config is kept."""
    answer = service.create(context, caller, key, config, status.HTTP_202_ACCEPTED)
    return respond(answer, "/v1/trainings")


@router.post(
    "/estimate",
    operation_id="estimate_training",
    summary="Estimate a training's cost",
    openapi_extra=DESCRIPTION,
)
def estimate_training(caller: Viewer, context: Services, config: Body) -> Estimate:
    """Checks the request and counts its work; nothing is started."""
    return service.estimate(context, caller, config)


@router.get("", operation_id="list_trainings", summary="List trainings")
def list_trainings(
    caller: Viewer,
    context: Services,
    status: Status | None = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> JobPage:
    """Trainings, newest first, as jobs."""
    return jobs_service.page(context, caller, kind=service.KIND, status=status, limit=limit, cursor=cursor)


@router.get("/{id}", operation_id="get_training", summary="Get a training")
def get_training(id: Id, caller: Viewer, context: Services) -> TrainingView:
    """The job, its resolved config, and its stages with their profiles and allocations."""
    return service.get(context, caller, id)


@router.get("/{id}/metrics", operation_id="get_training_metrics", summary="Get a training's metrics")
def get_training_metrics(
    id: Id,
    caller: Viewer,
    context: Services,
    names: Annotated[
        list[str] | None,
        Query(max_length=100, description="only these; repeat the parameter or separate by commas"),
    ] = None,
    after: Annotated[int | None, Query(ge=-1, le=2**31, description="only later epochs")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_POINTS, description="points at most, but one epoch")] = 20_000,
) -> Metrics:
    """Time series: each reward, the loss and its terms, gradient norm, share of groups without spread.

    `allocation/version` counts the stage's allocations. With a refresh there are also
    `profile/<reward>/total` (running divergence of clean images), `drift/<reward>/statistic` and `/p_value`
    (against the profile in force), and `refresh/share` (extra model evaluations, of those of the stage).
    """
    wanted = None if names is None else _split(names)
    return service.metrics(context, caller, id, names=wanted, after=after, limit=limit)


def _split(names: list[str]) -> list[str]:
    """Metric names from repeated or comma-separated values; what no metric can be called is left out."""
    parts = (part.strip() for name in names for part in name.split(","))
    return [part for part in parts if part and part.isascii() and part.isprintable()][:100]


@router.get("/{id}/samples", operation_id="list_training_samples", summary="List sample grids")
def list_training_samples(id: Id, caller: Viewer, context: Services) -> SampleList:
    """Grids of images drawn along the way, with the prompt and the seed of each image."""
    return service.samples(context, caller, id)


@router.get(
    "/{id}/samples/{sample_id}",
    operation_id="get_training_sample",
    summary="Get a sample grid",
    response_class=Response,
    responses={200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_training_sample(
    id: Id, sample_id: Id, caller: Viewer, context: Services, request: Request
) -> Response:
    """The grid as PNG."""
    row, file = service.sample_image(context, caller, id, sample_id)
    return serve(request, Download(file, row.bytes, f'"{row.sha256}"', "image/png"))


@router.get("/{id}/checkpoints", operation_id="list_training_checkpoints", summary="List checkpoints")
def list_training_checkpoints(id: Id, caller: Viewer, context: Services) -> CheckpointList:
    """What the training can go on from."""
    return service.checkpoints(context, caller, id)


@router.get("/{id}/adapters", operation_id="list_training_adapters", summary="List a training's adapters")
def list_training_adapters(
    id: Id, caller: Viewer, context: Services, limit: Limit = 20, cursor: Cursor = None
) -> AdapterPage:
    """Adapters that the training exported, newest first."""
    service.check(context, caller, id)
    return adapters_service.page(context, caller, training_id=id, limit=limit, cursor=cursor)
