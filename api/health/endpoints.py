"""HTTP of health, readiness, metrics and the OpenAPI document; the first two need no key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response, status
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from api.auth import Viewer
from api.context import Services
from api.health import service
from api.health.schemas import Health, Readiness

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="get_health", summary="Is the process alive")
def get_health() -> Health:
    """Touches nothing else."""
    return Health(status="ok")


@router.get(
    "/readyz",
    operation_id="get_readiness",
    summary="Can jobs run",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Something that jobs need is missing"}},
)
def get_readiness(request: Request) -> Response:
    """Database, broker, and a live worker for every queue."""
    found = request.app.state.probe.readiness()
    code = status.HTTP_200_OK if found.ready else status.HTTP_503_SERVICE_UNAVAILABLE
    return JSONResponse(found.model_dump(), status_code=code, headers={"Cache-Control": "no-store"})


@router.get("/openapi.json", operation_id="get_openapi", summary="This document")
def get_openapi(caller: Viewer, request: Request) -> dict[str, Any]:
    """The OpenAPI document that clients are generated from."""
    document: dict[str, Any] = request.app.openapi()
    return document


@router.get(
    "/metrics",
    operation_id="get_metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def get_metrics(caller: Viewer, context: Services, request: Request) -> Response:
    """Requests of this process, and the jobs of the key's workspace."""
    content = request.app.state.metrics.render(service.job_counts(context, caller))
    return Response(content, media_type=CONTENT_TYPE_LATEST)
