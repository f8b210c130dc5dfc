"""Adapters: metadata, and their file in the format that a client's tool loads."""

from __future__ import annotations

from typing import IO

from api.adapters import formats
from api.adapters.schemas import AdapterPage, AdapterView, Format
from api.context import Caller, Context
from recast_engine.backbones.catalogue import models
from store.models import Adapter
from store.repositories import adapters


def view(row: Adapter) -> AdapterView:
    """The adapter as clients see it."""
    return AdapterView(
        id=row.id,
        training=row.training_id,
        step=row.step,
        epoch=row.epoch,
        final=row.final,
        base_model=row.base_model,
        rank=row.rank,
        alpha=row.alpha,
        sha256=row.sha256,
        bytes=row.bytes,
        provenance=row.provenance,
        created_at=row.created_at,
    )


def get(context: Context, caller: Caller, adapter_id: str) -> AdapterView:
    """The adapter. Raises NotFound."""
    with context.read() as session:
        return view(adapters.get(session, adapter_id, caller.workspace_id))


def page(
    context: Context, caller: Caller, *, limit: int, cursor: str | None, training_id: str | None = None
) -> AdapterPage:
    """Adapters of the workspace, or of one of its trainings, newest first. Raises InvalidCursor."""
    with context.read() as session:
        rows, following = adapters.page(
            session, caller.workspace_id, training_id=training_id, limit=limit, cursor=cursor
        )
        return AdapterPage(data=[view(row) for row in rows], next_cursor=following)


def etag(adapter: AdapterView, form: Format) -> str:
    """A strong ETag: the same adapter in the same format is always the same bytes."""
    return f'"{adapter.sha256}"' if form == "diffusers" else f'"{adapter.sha256}-{form}-{formats.VERSION}"'


def filename(adapter: AdapterView, form: Format) -> str:
    """What the downloaded file is called."""
    return {
        "diffusers": "pytorch_lora_weights.safetensors",
        "peft": f"{adapter.id}-peft.zip",
        "comfyui": f"{adapter.id}-comfyui.safetensors",
    }[form]


def open_file(context: Context, caller: Caller, adapter_id: str, form: Format) -> tuple[IO[bytes], int]:
    """The adapter's file in format ``form``, open, and its size. Raises NotFound, ArtifactMissing."""
    with context.read() as session:
        row = adapters.get(session, adapter_id, caller.workspace_id)
        artifact = adapters.artifact(session, row)
    source = context.artifacts.open(artifact.key)
    if form == "diffusers":
        return source, artifact.bytes
    shape = formats.Shape(_public_name(row.base_model), row.rank, row.alpha)
    with source:
        convert = formats.to_peft if form == "peft" else formats.to_comfyui
        return convert(source, shape)


def _public_name(model: str) -> str:
    """The hub id of a base model; models shipped with the engine have none and keep their own id."""
    info = models().get(model)
    return info.repository or model if info is not None else model
