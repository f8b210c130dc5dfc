"""API keys: found by the hash of their secret; the secret itself is never stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.errors import NotFound
from store.ids import new_id
from store.models import ApiKey
from store.repositories.pagination import newest_first
from store.types import utcnow

USE_RESOLUTION = timedelta(minutes=1)


def hash_secret(secret: str) -> str:
    """SHA-256 (hex) of a key's secret, which is long and random: no salt or stretching is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create(session: Session, *, workspace_id: str, name: str, role: str, secret: str) -> ApiKey:
    """Store a key under the hash of ``secret``; its first characters are kept to recognise it by."""
    key = ApiKey(
        id=new_id("key"),
        workspace_id=workspace_id,
        name=name,
        role=role,
        key_hash=hash_secret(secret),
        prefix=secret[:8],
    )
    session.add(key)
    session.flush()
    return key


def by_secret(session: Session, secret: str) -> ApiKey | None:
    """The key with this secret, unless it is revoked."""
    query = select(ApiKey).where(ApiKey.key_hash == hash_secret(secret), ApiKey.revoked_at.is_(None))
    return session.scalar(query)


def needs_touch(key: ApiKey) -> bool:
    """Whether the recorded last use is older than its resolution of a minute."""
    return key.last_used_at is None or utcnow() - key.last_used_at > USE_RESOLUTION


def touch(session: Session, key_id: str) -> None:
    """Record that the key was used now."""
    key = session.get(ApiKey, key_id)
    if key is not None:
        key.last_used_at = utcnow()
        session.flush()


def get(session: Session, key_id: str, workspace_id: str) -> ApiKey:
    """The key of a workspace. Raises NotFound."""
    key = session.get(ApiKey, key_id)
    if key is None or key.workspace_id != workspace_id:
        raise NotFound("key", key_id)
    return key


def page(
    session: Session, workspace_id: str, *, limit: int = 20, cursor: str | None = None
) -> tuple[Sequence[ApiKey], str | None]:
    """Keys of a workspace, revoked ones too, newest first. Raises InvalidCursor."""
    query = select(ApiKey).where(ApiKey.workspace_id == workspace_id)
    return newest_first(session, query, ApiKey, limit=limit, cursor=cursor)


def revoke(session: Session, key_id: str, workspace_id: str) -> ApiKey:
    """End a key's use, for good. Raises NotFound."""
    key = get(session, key_id, workspace_id)
    key.revoked_at = key.revoked_at or utcnow()
    session.flush()
    return key
