"""API keys of a workspace: made, listed, revoked."""

from __future__ import annotations

import secrets
from typing import cast

from sqlalchemy.orm import Session

from api.context import Caller, Context
from api.idempotency import Answer, Create, once
from api.keys.schemas import KeyPage, KeyRequest, KeyView, NewKey, Role
from store.models import ApiKey
from store.repositories import keys


def new_secret() -> str:
    """A key's secret: 256 random bits behind a prefix that secret scanners can look for."""
    return f"rk_{secrets.token_urlsafe(32)}"


def create(context: Context, caller: Caller, key: str | None, request: KeyRequest, status: int) -> Answer:
    """Make a key in the caller's workspace. Raises Conflict.

    The secret is not stored, so a repeated answer cannot show it again: it has null there.
    """

    def prepare() -> Create:
        secret = new_secret()

        def store(session: Session) -> NewKey:
            row = keys.create(
                session,
                workspace_id=caller.workspace_id,
                name=request.name,
                role=request.role,
                secret=secret,
            )
            return NewKey(**view(row).model_dump(), key=secret)

        return store

    return once(
        context,
        caller,
        key,
        ("key", request.model_dump()),
        status,
        prepare,
        remember=lambda body: {**body, "key": None},
    )


def page(context: Context, caller: Caller, *, limit: int, cursor: str | None) -> KeyPage:
    """Keys of the workspace, revoked ones too, newest first. Raises InvalidCursor."""
    with context.read() as session:
        rows, following = keys.page(session, caller.workspace_id, limit=limit, cursor=cursor)
        return KeyPage(data=[view(row) for row in rows], next_cursor=following)


def revoke(context: Context, caller: Caller, key_id: str) -> KeyView:
    """End a key's use, for good. Raises NotFound."""
    with context.write.begin() as session:
        return view(keys.revoke(session, key_id, caller.workspace_id))


def view(row: ApiKey) -> KeyView:
    """The key as administrators see it."""
    return KeyView(
        id=row.id,
        name=row.name,
        role=cast(Role, row.role),
        prefix=row.prefix,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
