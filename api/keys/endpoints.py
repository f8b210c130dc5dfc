"""HTTP of API keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response, status

from api.auth import Admin
from api.body import describes, json_body
from api.context import Services
from api.idempotency import Key, respond
from api.keys import service
from api.keys.schemas import KeyPage, KeyRequest, KeyView, NewKey
from api.pagination import Cursor, Id, Limit

router = APIRouter(prefix="/v1/keys", tags=["keys"])
Body = Annotated[KeyRequest, json_body(KeyRequest)]


@router.post(
    "",
    operation_id="create_key",
    summary="Make an API key",
    status_code=status.HTTP_201_CREATED,
    response_model=NewKey,
    openapi_extra=describes(KeyRequest, editor={"name": "studio", "role": "editor"}),
)
def create_key(caller: Admin, context: Services, request: Body, key: Key = None) -> Response:
    """The answer shows the secret, once; only its hash is kept."""
    return respond(service.create(context, caller, key, request, status.HTTP_201_CREATED), "/v1/keys")


@router.get("", operation_id="list_keys", summary="List API keys")
def list_keys(caller: Admin, context: Services, limit: Limit = 20, cursor: Cursor = None) -> KeyPage:
    """Keys of the workspace, revoked ones too, newest first."""
    return service.page(context, caller, limit=limit, cursor=cursor)


@router.delete("/{id}", operation_id="revoke_key", summary="Revoke an API key")
def revoke_key(id: Id, caller: Admin, context: Services) -> KeyView:
    """The key stops working at once; repeating changes nothing."""
    return service.revoke(context, caller, id)
