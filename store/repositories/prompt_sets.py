"""Prompt sets: uploaded ones of a workspace, and built-in ones that everybody sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from store.errors import NotFound
from store.ids import new_id
from store.models import PromptSet
from store.repositories.pagination import newest_first


def create(
    session: Session,
    *,
    workspace_id: str | None,
    name: str,
    sha256: str,
    count: int,
    tags: Mapping[str, Any],
    content: str,
    id: str | None = None,
) -> PromptSet:
    """A prompt set; built-in ones have no workspace and a fixed ``id``."""
    prompt_set = PromptSet(
        id=id or new_id("pset"),
        workspace_id=workspace_id,
        name=name,
        sha256=sha256,
        count=count,
        tags=dict(tags),
        content=content,
    )
    session.add(prompt_set)
    session.flush()
    return prompt_set


def get(session: Session, prompt_set_id: str, workspace_id: str | None = None) -> PromptSet:
    """The prompt set, if it is built in or of the workspace. Its ``content`` loads when first read.

    Raises:
        NotFound: there is none for the caller.
    """
    found = session.get(PromptSet, prompt_set_id)
    if found is None or (workspace_id is not None and found.workspace_id not in (None, workspace_id)):
        raise NotFound("prompt set", prompt_set_id)
    return found


def page(
    session: Session, workspace_id: str, *, limit: int = 20, cursor: str | None = None
) -> tuple[Sequence[PromptSet], str | None]:
    """Prompt sets of a workspace and the built-in ones, newest first. Raises InvalidCursor."""
    query = select(PromptSet).where(
        or_(PromptSet.workspace_id == workspace_id, PromptSet.workspace_id.is_(None))
    )
    return newest_first(session, query, PromptSet, limit=limit, cursor=cursor)
