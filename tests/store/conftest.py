"""Every test of the store runs on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from store.database import make_engine, session_factory
from store.models import Base
from store.repositories import workspaces
from tests.store.databases import drop_database, fresh_database


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    url = fresh_database(request.param, tmp_path)
    yield url
    drop_database(url)


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    """An engine on a database with all tables."""
    engine = make_engine(database)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    """A factory of sessions."""
    return session_factory(engine)


@pytest.fixture
def session(sessions: sessionmaker[Session]) -> Iterator[Session]:
    """One session, rolled back at the end."""
    with sessions() as session:
        yield session


@pytest.fixture
def workspace(sessions: sessionmaker[Session]) -> str:
    """The id of a committed workspace."""
    with sessions.begin() as session:
        return workspaces.create(session, "default").id
