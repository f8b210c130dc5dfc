"""HTTP of adapters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.adapters import service
from api.adapters.schemas import AdapterPage, AdapterView, Format
from api.auth import Viewer
from api.context import Services
from api.files import Download, serve
from api.pagination import Cursor, Id, Limit

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
BINARY = {"schema": {"type": "string", "format": "binary"}}


@router.get("", operation_id="list_adapters", summary="List adapters")
def list_adapters(caller: Viewer, context: Services, limit: Limit = 20, cursor: Cursor = None) -> AdapterPage:
    """Adapters of every training, newest first."""
    return service.page(context, caller, limit=limit, cursor=cursor)


@router.get("/{id}", operation_id="get_adapter", summary="Get an adapter")
def get_adapter(id: Id, caller: Viewer, context: Services) -> AdapterView:
    """Base model, shape, hash and provenance."""
    return service.get(context, caller, id)


@router.get(
    "/{id}/download",
    operation_id="download_adapter",
    summary="Download an adapter",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": BINARY, "application/zip": BINARY}},
        206: {
            "description": "The part that Range asked for",
            "content": {"application/octet-stream": BINARY},
        },
        304: {"description": "The file with this ETag is current"},
    },
)
def download_adapter(
    id: Id,
    caller: Viewer,
    context: Services,
    request: Request,
    format: Annotated[
        Format,
        Query(
            description="`diffusers`: for `load_lora_weights`; `peft`: a zip of config and weights; `comfyui`"
        ),
    ] = "diffusers",
) -> Response:
    """The file, with a strong ETag; conditional and range requests work in every format."""
    adapter = service.get(context, caller, id)
    file, size = service.open_file(context, caller, id, format)
    media_type = "application/zip" if format == "peft" else "application/octet-stream"
    name = service.filename(adapter, format)
    return serve(request, Download(file, size, service.etag(adapter, format), media_type, name))
