"""Adapters that trainings exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from store.errors import NotFound
from store.ids import new_id
from store.models import Adapter, Artifact
from store.repositories.pagination import newest_first


def create(
    session: Session,
    *,
    workspace_id: str,
    artifact: Artifact,
    step: int,
    epoch: int,
    base_model: str,
    rank: int,
    alpha: float,
    final: bool,
    provenance: Mapping[str, Any],
) -> Adapter:
    """An adapter whose file is ``artifact``; of one artifact there is one adapter.

    A training has one final adapter: an attempt that ends after handing it over leaves it to the next, which
    hands over the same file again (and gets the same adapter), or another one that takes its place as final.
    """
    same = select(Adapter).filter_by(training_id=artifact.job_id, step=step, epoch=epoch, final=final)
    if (known := session.scalar(same.where(Adapter.sha256 == artifact.sha256))) is not None:
        return known
    if final:
        others = update(Adapter).where(
            Adapter.training_id == artifact.job_id, Adapter.artifact_id != artifact.id
        )
        session.execute(others.values(final=False))
    row = session.scalar(select(Adapter).where(Adapter.artifact_id == artifact.id))
    if row is None:
        row = Adapter(id=new_id("adapt"), workspace_id=workspace_id, training_id=artifact.job_id)
        row.artifact_id = artifact.id
        session.add(row)
    row.step, row.epoch, row.base_model, row.rank, row.alpha = step, epoch, base_model, rank, alpha
    row.sha256, row.bytes, row.final = artifact.sha256, artifact.bytes, final
    row.provenance = dict(provenance)
    session.flush()
    return row


def get(session: Session, adapter_id: str, workspace_id: str | None = None) -> Adapter:
    """The adapter. Raises NotFound."""
    row = session.get(Adapter, adapter_id)
    if row is None or workspace_id not in (None, row.workspace_id):
        raise NotFound("adapter", adapter_id)
    return row


def page(
    session: Session,
    workspace_id: str,
    *,
    training_id: str | None = None,
    limit: int = 20,
    cursor: str | None = None,
) -> tuple[Sequence[Adapter], str | None]:
    """Adapters of a workspace, or of one of its trainings, newest first. Raises InvalidCursor."""
    query = select(Adapter).where(Adapter.workspace_id == workspace_id)
    if training_id is not None:
        query = query.where(Adapter.training_id == training_id)
    return newest_first(session, query, Adapter, limit=limit, cursor=cursor)


def artifact(session: Session, adapter: Adapter) -> Artifact:
    """The adapter's file (diffusers format)."""
    return session.get_one(Artifact, adapter.artifact_id)
