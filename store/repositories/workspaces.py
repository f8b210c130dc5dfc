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


def lock(session: Session, workspace_id: str) -> None:
    """Keep others that lock the workspace waiting until the transaction ends: look, then create, as one.

    SQLite's writers wait for each other anyway; PostgreSQL's lock lets rows refer to the workspace meanwhile.
    """
    session.execute(select(Workspace.id).where(Workspace.id == workspace_id).with_for_update(key_share=True))


def by_name(session: Session, name: str) -> Workspace | None:
    """The workspace called ``name``, if there is one."""
    return session.scalar(select(Workspace).where(Workspace.name == name))
