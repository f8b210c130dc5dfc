"""HTTP of the catalogues."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.auth import Viewer
from api.catalogue import service
from api.catalogue.schemas import ModelList, ProposalSourceList, RewardList
from api.context import Services

router = APIRouter(prefix="/v1", tags=["catalogue"])


@router.get("/models", operation_id="list_models", summary="List base models")
def list_models(caller: Viewer) -> ModelList:
    """Every base model this installation knows, with what is missing where one cannot be used."""
    return ModelList(data=service.models())


@router.get("/rewards", operation_id="list_rewards", summary="List rewards")
def list_rewards(
    caller: Viewer,
    model: Annotated[str | None, Query(max_length=80, description="availability for this model only")] = None,
) -> RewardList:
    """Every reward this installation knows, with its objective and the prompt metadata it needs."""
    return RewardList(data=service.rewards(model))


@router.get("/proposal-sources", operation_id="list_proposal_sources", summary="List sources of proposals")
def list_proposal_sources(caller: Viewer, context: Services) -> ProposalSourceList:
    """Where the external-proposal estimator can take images from.

    Keys and SDKs are where the workers run, which this process may not share: availability is what the live
    workers say of themselves.
    """
    return ProposalSourceList(data=service.proposal_sources(context))
