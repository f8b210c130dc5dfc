"""What every request handler works with: settings, sessions, artifact bytes, the queue, who is calling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from store.artifacts import ArtifactStore
from store.settings import Settings

Publish = Callable[[str, str], object]
"""``publish(kind, job_id)``: tell the workers that a job waits; never raises."""


@dataclass(frozen=True)
class Context:
    """The process's long-lived parts; sessions of ``read`` take no write lock."""

    settings: Settings
    engine: Engine
    read: sessionmaker[Session]
    write: sessionmaker[Session]
    artifacts: ArtifactStore
    publish: Publish


@dataclass(frozen=True)
class Caller:
    """Whose key came with the request."""

    workspace_id: str
    key_id: str
    role: str


def context_of(request: Request) -> Context:
    """The app's context."""
    context: Context = request.app.state.context
    return context


Services = Annotated[Context, Depends(context_of)]
