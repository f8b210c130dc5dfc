"""The migrated schema is the models' schema, on both databases, however often and by however many applied."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError

import migrations
from migrations.apply import alembic_config
from store.database import make_engine, session_factory
from store.errors import DatabaseTooNew
from store.models import Base, PromptSet
from store.repositories import workspaces

Named = CheckConstraint | UniqueConstraint
EARLIER = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][1:]


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
        head = ScriptDirectory.from_config(alembic_config()).get_current_head()
        assert session.scalars(text("SELECT version_num FROM alembic_version")).all() == [head]
    engine.dispose()


def test_a_database_of_a_newer_version_is_refused_and_left_alone(database: str) -> None:
    migrations.upgrade(database)
    engine = make_engine(database)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseTooNew, match=r"newer version of ReCAST .*revision 9999"):
        migrations.upgrade(database)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    engine.dispose()


FIRST_ROWS = (
    "INSERT INTO workspaces VALUES ('ws_1', 'kept', '2026-01-01')",
    "INSERT INTO jobs (id, workspace_id, kind, status, phase, done, total, phase_offset, phase_start,"
    " attempt, crashes, stop_requested, request, config, cost, warnings, created_at, parent_id) VALUES"
    " ('train_1', 'ws_1', 'training', 'queued', 'queued', 0, 0, 0, 0, 0, 0, false, '{\"a\": 1}', '{}', '{}',"
    " '[]', '2026-01-01', NULL),"
    " ('prof_1', 'ws_1', 'profile', 'succeeded', 'finished', 1, 1, 0, 0, 1, 0, false, '{}', '{}', '{}',"
    " '[]', '2026-01-01', 'train_1')",
    "INSERT INTO job_events (job_id, type, data, created_at) VALUES ('prof_1', 'status', '{}', '2026-01-01')",
)
JOB = "UPDATE jobs SET kind = 'profile_shard', parent_id = 'prof_1' WHERE id = 'train_1'"


def test_jobs_of_the_first_revision_are_kept_with_all_that_refers_to_them(database: str) -> None:
    migrations.upgrade(database, "0001")
    engine = make_engine(database)
    with engine.begin() as connection:
        for statement in FIRST_ROWS:
            connection.execute(text(statement))
    with pytest.raises(IntegrityError, match="ck_jobs_kind"), engine.begin() as connection:
        connection.execute(text(JOB))
    migrations.upgrade(database)
    with engine.begin() as connection:
        connection.execute(text(JOB))
        rows = connection.execute(text("SELECT id, kind, fingerprint FROM jobs ORDER BY id")).all()
        assert rows == [("prof_1", "profile", None), ("train_1", "profile_shard", None)]
        assert connection.scalar(text("SELECT count(*) FROM job_events WHERE job_id = 'prof_1'")) == 1
    for statement in (
        "UPDATE jobs SET kind = 'nothing' WHERE id = 'prof_1'",
        "UPDATE jobs SET parent_id = 'prof_2' WHERE id = 'train_1'",
        "UPDATE job_events SET job_id = 'prof_2'",
    ):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(text(statement))
    engine.dispose()


CHECKED = {"role": "admin", "status": "queued", "type": "status"}


def _value(column: Column[Any]) -> Any:
    """One that the column takes; of all text columns the same, so that references hold."""
    if isinstance(column.type, JSON):
        return {"name": ["äöü", 0.1, None]}
    if isinstance(column.type, DateTime):
        return datetime(2026, 1, 1, 12, 30, tzinfo=UTC)
    if isinstance(column.type, Text):
        return (
            "profile"
            if column.table.name == "jobs" and column.name == "kind"
            else CHECKED.get(column.name, "one")
        )
    return False if isinstance(column.type, Boolean) else 1


def _rows(connection: Connection, tables: Sequence[Table]) -> dict[str, list[dict[str, Any]]]:
    return {
        table.name: [dict(row) for row in connection.execute(select(table)).mappings()] for table in tables
    }


@pytest.mark.parametrize("revision", EARLIER)
def test_a_row_of_every_table_comes_through_every_upgrade(database: str, revision: str) -> None:
    migrations.upgrade(database, revision)
    engine = make_engine(database)
    metadata = MetaData()
    metadata.reflect(engine)
    tables = [table for table in metadata.sorted_tables if table.name != "alembic_version"]
    with engine.begin() as connection:
        for table in tables:
            connection.execute(table.insert().values({c.name: _value(c) for c in table.columns}))
        before = _rows(connection, tables)
    assert all(len(rows) == 1 for rows in before.values())
    migrations.upgrade(database)
    with session_factory(engine)() as session:
        assert _rows(session.connection(), tables) == before
        for mapper in Base.registry.mappers:
            read = session.scalars(select(mapper.class_)).all()
            assert len(read) == (mapper.local_table.name in before), mapper
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
