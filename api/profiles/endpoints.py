"""HTTP of profiles."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from api.auth import Editor, Viewer
from api.body import describes, json_body
from api.context import Services
from api.idempotency import Key, respond
from api.jobs import service as jobs_service
from api.jobs.schemas import Estimate, JobPage, Status
from api.pagination import Cursor, Id, Limit
from api.profiles import comparison, service
from api.profiles.schemas import (
    EXAMPLE,
    EXAMPLE_COMPARISON,
    ComparisonRequest,
    ComparisonView,
    CreatedProfile,
    Gains,
    ProfileView,
)
from recast_engine.config import MAX_STEPS, ProfileConfig, Shift

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])
Body = Annotated[ProfileConfig, json_body(ProfileConfig)]
ComparisonBody = Annotated[ComparisonRequest, json_body(ComparisonRequest)]
DESCRIPTION = describes(ProfileConfig, miniature=EXAMPLE)


@router.post(
    "",
    operation_id="create_profile",
    summary="Measure a profile",
    status_code=status.HTTP_202_ACCEPTED,
    response_model=CreatedProfile,
    responses={status.HTTP_200_OK: {"model": CreatedProfile, "description": "A profile is reused"}},
    openapi_extra=DESCRIPTION,
)
def create_profile(caller: Editor, context: Services, config: Body, key: Key = None) -> Response:
    """Queues a job that measures how well each reward can be told apart at each noise level.

    A profile that would come out the same is answered at once instead: the stored one, or the one being
    measured. `"reuse": false` measures again.
    """
    answer = service.create(
        context, caller, key, config, created=status.HTTP_202_ACCEPTED, reused=status.HTTP_200_OK
    )
    return respond(answer, "/v1/profiles")


@router.post(
    "/estimate",
    operation_id="estimate_profile",
    summary="Estimate a profile's cost",
    openapi_extra=DESCRIPTION,
)
def estimate_profile(caller: Viewer, context: Services, config: Body) -> Estimate:
    """Checks the request and counts its work, none where a profile would be reused; nothing is started."""
    return service.estimate(context, caller, config)


@router.post(
    "/compare",
    operation_id="compare_profiles",
    summary="Compare two profiles",
    openapi_extra=describes(ComparisonRequest, two_profiles=EXAMPLE_COMPARISON),
)
def compare_profiles(caller: Viewer, context: Services, request: ComparisonBody) -> ComparisonView:
    """Timing, totals and resulting allocations of two measured profiles; nothing is stored."""
    return comparison.compare(context, caller, request)


@router.get("", operation_id="list_profiles", summary="List profiles")
def list_profiles(
    caller: Viewer,
    context: Services,
    status: Status | None = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> JobPage:
    """Profiles, those that trainings measured too, newest first, as jobs."""
    return jobs_service.page(context, caller, kind=service.KIND, status=status, limit=limit, cursor=cursor)


@router.get("/{id}", operation_id="get_profile", summary="Get a profile")
def get_profile(id: Id, caller: Viewer, context: Services) -> ProfileView:
    """The job, and once measured the curves."""
    return service.get(context, caller, id)


@router.get("/{id}/gains", operation_id="get_profile_gains", summary="Resample a profile to steps")
def get_profile_gains(
    id: Id,
    caller: Viewer,
    context: Services,
    steps: Annotated[int, Query(ge=1, le=MAX_STEPS)],
    shift: Annotated[Shift | None, Query(allow_inf_nan=False, description="null: the model's own")] = None,
) -> Gains:
    """Gains of each reward for a sampler with any number of steps."""
    return service.gains(context, caller, id, steps, shift)
