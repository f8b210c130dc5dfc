"""Engines and sessions, set up alike for SQLite and PostgreSQL."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

log = logging.getLogger(__name__)

BUSY_SECONDS = 30.0
_DISK_FULL = "53100"  # PostgreSQL's error code

T = TypeVar("T")


def database_url(url: str) -> URL:
    """``url`` with the driver this project ships: psycopg for any spelling of PostgreSQL."""
    parsed = make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    return parsed


def make_engine(url: str, *, busy_seconds: float = BUSY_SECONDS) -> Engine:
    """An engine for ``url``; the folder of a SQLite file is created.

    SQLite runs in WAL mode with foreign keys on. Its transactions begin IMMEDIATE, so that a transaction that
    reads before it writes cannot fail half way because another writer was faster; read-only sessions of
    :func:`session_factory` begin deferred and block nobody.
    """
    parsed = database_url(url)
    serializer = partial(json.dumps, allow_nan=False)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(parsed, json_serializer=serializer, pool_pre_ping=True)
    if parsed.database and parsed.database != ":memory:":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, json_serializer=serializer, connect_args={"timeout": busy_seconds})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself
    for pragma in ("journal_mode = WAL", "foreign_keys = ON", "synchronous = NORMAL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    mode = "DEFERRED" if connection.get_execution_options().get("recast_read_only") else "IMMEDIATE"
    connection.exec_driver_sql(f"BEGIN {mode}")


def session_factory(engine: Engine, *, read_only: bool = False) -> sessionmaker[Session]:
    """A factory of sessions whose objects stay usable after commit.

    ``read_only`` sessions take no write lock on SQLite; use them for everything that only reads.
    """
    bind = engine.execution_options(recast_read_only=True) if read_only else engine
    return sessionmaker(bind, expire_on_commit=False)


def is_full(error: DBAPIError) -> bool:
    """Whether the database could not write for want of room on its disk."""
    cause = error.orig
    if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return True
    return getattr(cause, "sqlstate", None) == _DISK_FULL


def transact(
    sessions: sessionmaker[Session], work: Callable[[Session], T], *, patience: float = BUSY_SECONDS
) -> T:
    """Run ``work`` in one transaction, again while the database is locked, restarting or unreachable.

    ``work`` must be safe to repeat: a failed try was rolled back whole.

    Raises:
        OperationalError: still failing after ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    pause = 0.05
    while True:
        try:
            with sessions.begin() as session:
                return work(session)
        except OperationalError as error:
            if time.monotonic() + pause > deadline:
                raise
            log.warning("database not available, trying again: %s", error.orig)
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
