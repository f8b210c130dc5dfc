"""Allocation matrices: stored once, never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.errors import NotFound
from store.ids import new_id
from store.models import Allocation
from store.repositories.pagination import newest_first


def create(
    session: Session,
    *,
    workspace_id: str,
    allocation: Mapping[str, Any],
    profile_id: str | None = None,
    training_id: str | None = None,
    stage: int | None = None,
    epoch: int | None = None,
    reason: str | None = None,
) -> Allocation:
    """Store an allocation.

    Args:
        session: the session.
        workspace_id: its owner.
        allocation: ``rewards``, ``steps``, ``budgets``, ``method``, ``temperature``, ``matrix``,
            ``diagnostics``, and if known ``gains`` and ``sigmas``: plain data, as the engine reports it.
        profile_id: the profile its gains come from.
        training_id: the training that computed it.
        stage: the training's stage.
        epoch: epochs that the training had finished.
        reason: why it computed it.
    """
    row = Allocation(
        id=new_id("alloc"),
        workspace_id=workspace_id,
        profile_id=profile_id,
        training_id=training_id,
        stage=stage,
        epoch=epoch,
        reason=reason,
        method=allocation["method"],
        temperature=allocation["temperature"],
        steps=allocation["steps"],
        rewards=list(allocation["rewards"]),
        budgets=dict(allocation["budgets"]),
        matrix=list(allocation["matrix"]),
        gains=allocation.get("gains"),
        sigmas=allocation.get("sigmas"),
        diagnostics=dict(allocation["diagnostics"]),
    )
    session.add(row)
    session.flush()
    return row


def to_dict(row: Allocation) -> dict[str, Any]:
    """The allocation as plain data; what ``create`` took, and its id."""
    names = ("id", "rewards", "steps", "sigmas", "budgets", "method", "temperature", "matrix", "gains")
    return {name: getattr(row, name) for name in (*names, "diagnostics")}


def get(session: Session, allocation_id: str, workspace_id: str | None = None) -> Allocation:
    """The allocation. Raises NotFound."""
    row = session.get(Allocation, allocation_id)
    if row is None or workspace_id not in (None, row.workspace_id):
        raise NotFound("allocation", allocation_id)
    return row


def page(
    session: Session, workspace_id: str, *, limit: int = 20, cursor: str | None = None
) -> tuple[Sequence[Allocation], str | None]:
    """Allocations of a workspace, newest first. Raises InvalidCursor."""
    query = select(Allocation).where(Allocation.workspace_id == workspace_id)
    return newest_first(session, query, Allocation, limit=limit, cursor=cursor)


def of_training(session: Session, training_id: str) -> Sequence[Allocation]:
    """Allocations that a training computed, in the order it did: a refreshed stage has several."""
    query = select(Allocation).where(Allocation.training_id == training_id)
    return session.scalars(query.order_by(Allocation.created_at, Allocation.id)).all()


def find_same(
    session: Session, training_id: str, stage: int, epoch: int, allocation: Mapping[str, Any]
) -> Allocation | None:
    """The allocation that the training computed at this point before, if it came to the same matrix.

    An attempt that ends before its first checkpoint leaves its allocation behind; the next one computes it
    again, and where arithmetic is exact comes to the same.
    """
    query = select(Allocation).filter_by(training_id=training_id, stage=stage, epoch=epoch)
    return next((row for row in session.scalars(query) if row.matrix == list(allocation["matrix"])), None)
