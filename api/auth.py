"""Bearer keys and roles. A key is found by the hash of its secret; the secret is never stored or logged."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import OperationalError

from api.context import Caller, Context, Services
from api.refusals import Forbidden, Unauthenticated
from store.models import ROLES
from store.repositories import keys

LOG = logging.getLogger(__name__)
MAX_SECRET = 200

bearer = HTTPBearer(auto_error=False, description="An API key of a workspace.")


def authenticate(
    context: Services, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Caller:
    """Whose key came with the request. Raises Unauthenticated."""
    if credentials is None or not credentials.credentials:
        raise Unauthenticated("send an API key as `Authorization: Bearer <key>`")
    secret = credentials.credentials
    if len(secret) > MAX_SECRET or not secret.isascii():
        raise Unauthenticated("the API key is not valid")
    with context.read() as session:
        key = keys.by_secret(session, secret)
    # The lookup by hash decides; comparing again in constant time keeps that true whatever the index does.
    if key is None or not hmac.compare_digest(key.key_hash, keys.hash_secret(secret)):
        raise Unauthenticated("the API key is not valid")
    if keys.needs_touch(key):
        _touch(context, key.id)
    return Caller(key.workspace_id, key.id, key.role)


def _touch(context: Context, key_id: str) -> None:
    """Record the key's use; a busy database must not fail the request for that."""
    try:
        with context.write.begin() as session:
            keys.touch(session, key_id)
    except OperationalError as error:
        LOG.warning("use of key %s was not recorded: %s", key_id, error.orig)


def _needs(role: str) -> Callable[[Caller], Caller]:
    def check(caller: Annotated[Caller, Depends(authenticate)]) -> Caller:
        if ROLES.index(caller.role) < ROLES.index(role):
            raise Forbidden(f"this needs the role {role!r}; the key has {caller.role!r}")
        return caller

    return check


Viewer = Annotated[Caller, Depends(_needs("viewer"))]
Editor = Annotated[Caller, Depends(_needs("editor"))]
Admin = Annotated[Caller, Depends(_needs("admin"))]
