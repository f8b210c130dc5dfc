"""The migrated schema is the models' schema, on both databases, however often and by however many applied."""

from __future__ import annotations

import subprocess
import sys

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import CheckConstraint, Connection, UniqueConstraint, inspect, text

import migrations
from store.database import make_engine, session_factory
from store.models import Base, PromptSet
from store.repositories import workspaces

Named = CheckConstraint | UniqueConstraint


def _named(connection: Connection) -> dict[str, set[str | None]]:
    """Names of the CHECK and UNIQUE constraints of every table."""
    inspector = inspect(connection)
    return {
        table: {row["name"] for row in inspector.get_check_constraints(table)}
        | {row["name"] for row in inspector.get_unique_constraints(table)}
        for table in Base.metadata.tables
    }


def test_upgrade_creates_exactly_the_models(database: str) -> None:
    migrations.upgrade(database)
    engine = make_engine(database)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        expected = {
            name: {
                str(c.name) for c in table.constraints if isinstance(c, CheckConstraint | UniqueConstraint)
            }
            for name, table in Base.metadata.tables.items()
        }
        assert _named(connection) == expected
    engine.dispose()


def test_upgrading_twice_changes_nothing(database: str) -> None:
    migrations.upgrade(database)
    engine = make_engine(database)
    with session_factory(engine).begin() as session:
        workspace_id = workspaces.create(session, "kept").id
    migrations.upgrade(database)
    with session_factory(engine)() as session:
        assert workspaces.get(session, workspace_id).name == "kept"
        assert session.scalars(text("SELECT version_num FROM alembic_version")).all() == ["0001"]
    engine.dispose()


def test_processes_may_upgrade_at_once(database: str) -> None:
    command = [sys.executable, "-c", f"import migrations; migrations.upgrade({database!r})"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outcomes = [(process.communicate()[1], process.returncode) for process in processes]
    assert [code for _, code in outcomes] == [0, 0, 0], outcomes
    engine = make_engine(database)
    with engine.connect() as connection:
        assert inspect(connection).has_table(PromptSet.__tablename__)
    engine.dispose()
