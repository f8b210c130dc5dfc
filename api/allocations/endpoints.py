"""HTTP of allocations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response, status

from api.allocations import service
from api.allocations.schemas import (
    EXAMPLE_GAINS,
    EXAMPLE_PROFILE,
    AllocationPage,
    AllocationRequest,
    AllocationResult,
    AllocationView,
)
from api.auth import Editor, Viewer
from api.body import describes, json_body
from api.context import Services
from api.idempotency import Key, respond
from api.pagination import Cursor, Id, Limit

router = APIRouter(prefix="/v1/allocations", tags=["allocations"])
Body = Annotated[AllocationRequest, json_body(AllocationRequest)]
DESCRIPTION = describes(AllocationRequest, from_profile=EXAMPLE_PROFILE, from_gains=EXAMPLE_GAINS)


@router.post(
    "",
    operation_id="create_allocation",
    summary="Compute and store an allocation",
    status_code=status.HTTP_201_CREATED,
    response_model=AllocationView,
    openapi_extra=DESCRIPTION,
)
def create_allocation(caller: Editor, context: Services, request: Body, key: Key = None) -> Response:
    """Budgets and a profile (or gains) in, the matrix out; it is kept and never changes."""
    answer = service.create(context, caller, key, request, status.HTTP_201_CREATED)
    return respond(answer, "/v1/allocations")


@router.post(
    "/preview",
    operation_id="preview_allocation",
    summary="Compute an allocation",
    openapi_extra=DESCRIPTION,
)
def preview_allocation(caller: Viewer, context: Services, request: Body) -> AllocationResult:
    """The same matrix, stored nowhere."""
    return service.compute(context, caller, request)


@router.get("", operation_id="list_allocations", summary="List allocations")
def list_allocations(
    caller: Viewer, context: Services, limit: Limit = 20, cursor: Cursor = None
) -> AllocationPage:
    """Allocations computed on request or by trainings, newest first."""
    return service.page(context, caller, limit=limit, cursor=cursor)


@router.get(
    "/{id}.csv",
    operation_id="get_allocation_csv",
    summary="Get an allocation as CSV",
    response_class=Response,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def get_allocation_csv(id: Id, caller: Viewer, context: Services) -> Response:
    """One line per reward: its budget, then its weight at each step."""
    headers = {"Content-Disposition": f'attachment; filename="{id}.csv"'}
    content = service.to_csv(service.get(context, caller, id))
    return Response(content, media_type="text/csv", headers=headers)


@router.get("/{id}", operation_id="get_allocation", summary="Get an allocation")
def get_allocation(id: Id, caller: Viewer, context: Services) -> AllocationView:
    """The matrix, what it was computed from, and its diagnostics."""
    return service.get(context, caller, id)
