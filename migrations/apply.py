"""Bring a database to the newest revision, from code: no ini file, safe for several processes at once."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from store.database import database_url, make_engine
from store.errors import DatabaseTooNew

ADVISORY_LOCK = 7_215_310_843  # any number, the same for all versions of this project


def alembic_config() -> Config:
    """Alembic's configuration, with the scripts found beside this file."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Apply the revisions up to ``revision`` that the database at ``url`` lacks; else leave it alone.

    Only one process upgrades a database at a time; the others wait and then find nothing to do.

    Raises:
        DatabaseTooNew: it has a revision that is not among ours.
    """
    engine = make_engine(url)
    config = alembic_config()
    try:
        with _sqlite_lock(url), engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": ADVISORY_LOCK})
                _run(config, connection, revision)
            else:
                _run_on_sqlite(config, connection, revision)
            connection.commit()
    finally:
        engine.dispose()


def _run(config: Config, connection: Connection, revision: str) -> None:
    config.attributes["connection"] = connection
    _check_known(config, connection)
    command.upgrade(config, revision)


def _check_known(config: Config, connection: Connection) -> None:
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    for revision in MigrationContext.configure(connection).get_current_heads():
        if revision not in known:
            raise DatabaseTooNew(revision, scripts.get_current_head() or "none")


def _run_on_sqlite(config: Config, connection: Connection, revision: str) -> None:
    """SQLite changes a table by making it anew: foreign keys are off meanwhile, and checked at the end.

    The switch has no effect inside a transaction, so it is thrown before SQLAlchemy begins one; it ends with
    the connection. Raises IntegrityError, and nothing is changed, when a reference would dangle.
    """
    driver = connection.connection.dbapi_connection
    assert driver is not None
    driver.cursor().execute("PRAGMA foreign_keys = OFF")
    _run(config, connection, revision)
    if dangling := connection.exec_driver_sql("PRAGMA foreign_key_check").all():
        tables = sorted({row[0] for row in dangling})
        raise IntegrityError("PRAGMA foreign_key_check", None, ValueError(f"in {', '.join(tables)}"))


@contextmanager
def _sqlite_lock(url: str) -> Iterator[None]:
    """Hold a lock file beside a SQLite database: switching on its WAL mode cannot wait for a writer."""
    parsed = database_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        yield
        return
    database = Path(parsed.database)
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(database.name + ".upgrade-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
