"""Workspaces: the tenants."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.errors import NotFound
from store.ids import new_id
from store.models import Workspace


def create(session: Session, name: str) -> Workspace:
    """A workspace; names are unique (IntegrityError)."""
    workspace = Workspace(id=new_id("ws"), name=name)
    session.add(workspace)
    session.flush()
    return workspace


def get(session: Session, workspace_id: str) -> Workspace:
    """The workspace. Raises NotFound."""
    workspace = session.get(Workspace, workspace_id)
    if workspace is None:
        raise NotFound("workspace", workspace_id)
    return workspace


def by_name(session: Session, name: str) -> Workspace | None:
    """The workspace called ``name``, if there is one."""
    return session.scalar(select(Workspace).where(Workspace.name == name))
