"""HTTP of prompt sets."""

from __future__ import annotations

from fastapi import APIRouter, Response, status

from api.auth import Editor, Viewer
from api.context import Services
from api.idempotency import Key, respond
from api.pagination import Cursor, Id, Limit
from api.prompt_sets import service
from api.prompt_sets.schemas import PromptSetPage, PromptSetView
from api.prompt_sets.upload import PARAMETERS, REQUEST_BODY, Upload

router = APIRouter(prefix="/v1/prompt-sets", tags=["prompt sets"])


@router.post(
    "",
    operation_id="create_prompt_set",
    summary="Upload a prompt set",
    status_code=status.HTTP_201_CREATED,
    response_model=PromptSetView,
    openapi_extra={"requestBody": REQUEST_BODY, "parameters": PARAMETERS},
)
def create_prompt_set(caller: Editor, context: Services, upload: Upload, key: Key = None) -> Response:
    """One prompt per line: plain text, or JSON with GenEval metadata; malformed lines are named."""
    answer = service.create(context, caller, key, upload, status.HTTP_201_CREATED)
    return respond(answer, "/v1/prompt-sets")


@router.get("", operation_id="list_prompt_sets", summary="List prompt sets")
def list_prompt_sets(
    caller: Viewer, context: Services, limit: Limit = 20, cursor: Cursor = None
) -> PromptSetPage:
    """The workspace's own and the built-in ones, newest first."""
    return service.page(context, caller, limit=limit, cursor=cursor)


@router.get("/{id}", operation_id="get_prompt_set", summary="Get a prompt set")
def get_prompt_set(id: Id, caller: Viewer, context: Services) -> PromptSetView:
    """Counts by tag, and what each reward can use of it."""
    return service.get(context, caller, id)


@router.get(
    "/{id}/content",
    operation_id="get_prompt_set_content",
    summary="Get the prompts",
    response_class=Response,
    responses={200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}},
)
def get_prompt_set_content(id: Id, caller: Viewer, context: Services) -> Response:
    """The prompts as canonical JSONL."""
    return Response(service.content(context, caller, id), media_type="application/jsonl")
