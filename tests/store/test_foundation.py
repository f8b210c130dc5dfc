"""Ids, settings, sessions and the publish side of the queue."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from store import queue
from store.database import database_url, is_full, make_engine, session_factory, transact
from store.ids import new_id
from store.models import Base
from store.repositories import workspaces
from store.settings import Settings


def test_ids_sort_by_time_and_never_repeat() -> None:
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda _: [new_id("job") for _ in range(2000)], range(4)))
    assert all(batch == sorted(batch) for batch in batches)
    assert len({id for batch in batches for id in batch}) == 8000
    before = new_id("job")
    time.sleep(0.002)
    assert before < new_id("job")
    assert re.fullmatch(r"train_[0-9a-hjkmnp-tv-z]{26}", new_id("train"))


def test_settings_come_from_the_environment_and_go_back(tmp_path: Path) -> None:
    settings = Settings.from_env(
        {"RECAST_HOME": str(tmp_path), "RECAST_LEASE_SECONDS": "7.5", "RECAST_ENGINE_THREADS": "3"}
    )
    assert settings.database_url == f"sqlite:///{tmp_path}/recast.db"
    assert settings.artifacts_url == f"{tmp_path}/artifacts"
    assert (settings.lease_seconds, settings.engine_threads) == (7.5, 3)
    assert Settings.from_env(settings.to_env()) == settings
    assert Settings.from_env({}).home == Path.home() / ".recast"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RECAST_LEASE_SECONDS": "soon"}, "RECAST_LEASE_SECONDS: 'soon' is not a float"),
        ({"RECAST_ENGINE_THREADS": "1.5"}, "RECAST_ENGINE_THREADS: '1.5' is not a int"),
        ({"RECAST_LEASE_SECONDS": "1"}, "less than RECAST_LEASE_SECONDS"),
    ],
)
def test_settings_that_cannot_work_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings.from_env(environment)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_any_spelling_of_postgresql_gets_the_shipped_driver(scheme: str) -> None:
    assert database_url(f"{scheme}://u:p@h/d").drivername == "postgresql+psycopg"


def test_sqlite_is_set_up_for_many_processes(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path}/new/folder/x.db")
    with engine.connect() as connection:
        values = {
            name: connection.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "foreign_keys")
        }
    assert values == {"journal_mode": "wal", "foreign_keys": 1}


def test_readers_and_writers_do_not_block_each_other(engine: Engine, sessions: sessionmaker[Session]) -> None:
    reading = session_factory(engine, read_only=True)
    with sessions() as writer:
        workspaces.create(writer, "uncommitted")
        with reading() as reader:
            assert workspaces.by_name(reader, "uncommitted") is None
        writer.commit()
    with reading() as reader:
        assert workspaces.by_name(reader, "uncommitted") is not None


def test_writers_that_read_first_wait_for_each_other(sessions: sessionmaker[Session], workspace: str) -> None:
    """Read-modify-write in many threads: with deferred SQLite transactions most of these would fail."""
    with sessions.begin() as session:
        session.execute(text("CREATE TABLE counter (n INTEGER)"))
        session.execute(text("INSERT INTO counter VALUES (0)"))

    def add() -> None:
        for _ in range(20):
            with sessions.begin() as session:
                session.execute(text("SELECT count(*) FROM workspaces"))
                session.execute(text("UPDATE counter SET n = n + 1"))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sessions() as session:
        assert session.scalar(text("SELECT n FROM counter")) == 80


def test_transact_waits_for_a_lock_and_gives_up_in_time(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    holder, engine = make_engine(url), make_engine(url, busy_seconds=0.05)
    Base.metadata.create_all(holder)
    sessions = session_factory(engine)
    tries = []

    def work(session: Session) -> str:
        tries.append(1)
        return workspaces.create(session, "late").name

    with holder.connect() as connection:
        connection.execute(text("SELECT 1"))  # begins IMMEDIATE: the write lock is taken
        with pytest.raises(OperationalError, match="locked"):
            transact(sessions, work, patience=0.5)
        threading.Timer(0.5, connection.rollback).start()
        assert transact(sessions, work, patience=10.0) == "late"
    with sessions() as session:
        assert workspaces.by_name(session, "late") is not None


def test_a_lost_broker_is_not_the_requests_problem(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{free.getsockname()[1]}/0"
    began = time.monotonic()
    assert queue.publish(url, "profile", "prof_1") is False
    assert queue.reachable(url) is False
    assert time.monotonic() - began < 5
    assert "prof_1 was not published" in caplog.text


def test_a_full_disk_is_told_from_a_busy_database(engine: Engine) -> None:
    """SQLite at its page limit fails as on a full disk; PostgreSQL is made to raise the code of one."""
    if engine.dialect.name == "sqlite":
        statements = ["PRAGMA max_page_count = 1", "CREATE TABLE large AS SELECT hex(zeroblob(9000000))"]
    else:
        statements = ["DO $$ BEGIN RAISE EXCEPTION 'full' USING ERRCODE = 'disk_full'; END $$"]
    *first, last = map(text, statements)
    with engine.connect() as connection:
        for statement in first:
            connection.execute(statement)
        with pytest.raises(OperationalError) as caught:
            connection.execute(last)
    assert is_full(caught.value)
    with engine.connect() as connection, pytest.raises(DBAPIError) as caught_other:
        connection.execute(text("SELECT * FROM nowhere"))
    assert not is_full(caught_other.value)
