"""The embedded parts one by one; tests/e2e runs the whole service."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis
from sqlalchemy import select

from recast import embedded, service
from recast.errors import CannotStart, RecastError
from recast.home import Home, ServiceRecord
from recast.memory import PeakMemory, descendants, resident_bytes
from recast.supervisor import Supervisor
from recast_engine.backbones.catalogue import models
from store.database import make_engine, session_factory
from store.models import ApiKey, Workspace
from store.queue import reachable
from store.repositories import keys
from tests.recast.processes import alive, eventually


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.create()
    return made


def test_the_broker_starts_and_leaves_nothing(home: Home) -> None:
    path = embedded.broker_socket(home)
    url = embedded.broker_url(path)
    supervisor = Supervisor(home.logs, threading.Event(), print)
    child = embedded.broker(home, path)
    supervisor.start(child, lambda: reachable(url), 20)
    assert child.process is not None
    pid = child.process.pid
    with redis.Redis(unix_socket_path=str(path)) as client:
        client.set("key", "value")
        assert client.get("key") == b"value"
        assert client.config_get("port") == {"port": "0"}  # nobody reaches it over the network
    assert path.stat().st_mode & 0o077 == 0
    supervisor.stop()
    assert not alive(pid)
    assert not reachable(url)
    assert not list(home.root.glob("*.rdb"))


def test_a_deep_home_keeps_its_socket_elsewhere(tmp_path: Path) -> None:
    path = embedded.broker_socket(Home(tmp_path / ("deep" * 30)))
    assert len(str(path)) < 104
    assert path.parent.stat().st_mode & 0o077 == 0
    path.parent.rmdir()


def test_preparing_twice_makes_one_workspace_and_one_key(home: Home) -> None:
    settings = service.settings_of(home)
    service.prepare(home, settings)
    secret = home.read_key()
    assert home.key.stat().st_mode & 0o777 == 0o600
    service.prepare(home, settings)
    assert home.read_key() == secret
    engine = make_engine(settings.database_url)
    with session_factory(engine)() as session:
        [workspace] = session.scalars(select(Workspace)).all()
        [key] = session.scalars(select(ApiKey)).all()
        assert (workspace.name, key.role, key.workspace_id) == ("default", "admin", workspace.id)
        assert secret is not None
        assert keys.by_secret(session, secret) is not None
    engine.dispose()


def test_a_key_file_that_the_database_does_not_know_is_replaced(home: Home) -> None:
    home.key.write_text("rk_of_another_database\n")
    service.prepare(home, service.settings_of(home))
    assert home.read_key() != "rk_of_another_database"


def test_a_database_that_cannot_be_opened_is_one_clear_error(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.root / "recast.db").write_bytes(b"this is no database, whatever its name says" * 50)
    with pytest.raises(CannotStart, match=r"the database cannot be used .*RECAST_DATABASE_URL"):
        service.prepare(home, service.settings_of(home))
    (home.root / "recast.db").unlink()
    service.prepare(home, service.settings_of(home))
    with sqlite3.connect(home.root / "recast.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(CannotStart, match=r"newer version of ReCAST .*9999.* run that version"):
        service.prepare(home, service.settings_of(home))
    monkeypatch.setenv("RECAST_LEASE_SECONDS", "soon")
    with pytest.raises(CannotStart, match="RECAST_LEASE_SECONDS"):
        service.settings_of(home)


def test_a_wrong_file_of_models_stops_the_start(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECAST_MODELS", str(home.root / "absent.toml"))
    models.cache_clear()
    try:
        with pytest.raises(CannotStart, match=r"RECAST_MODELS: .*absent\.toml: .*No such file"):
            service.serve(home, 0, ready=print, say=print)
    finally:
        models.cache_clear()


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CannotStart, match=f"port {port} cannot be used .*--port 0"):
            service.listen(port)


def test_only_one_service_per_home(home: Home) -> None:
    assert service.owner(home) is None
    with service.exclusive(home) as is_there:
        refusal = rf"already runs on .* \(process {os.getpid()}\).*recast down"
        with pytest.raises(CannotStart, match=refusal), service.exclusive(home):
            pytest.fail("two services hold the same home")
        assert service.owner(home) == os.getpid()
        assert is_there()
        home.lock.unlink()
        assert not is_there()
        home.lock.touch()  # another service's
        assert not is_there()
    assert service.owner(home) is None
    assert not service.stop_running(home)


def test_a_record_without_its_process_is_no_running_service(home: Home) -> None:
    home.write_record(ServiceRecord("http://127.0.0.1:1", os.getpid(), "redis://x"))
    assert service.running(home) is None
    home.record.write_text("{")
    with pytest.raises(RecastError, match=r"service\.json is damaged"):
        service.running(home)


def test_a_home_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecastError, match="choose another with --home"):
        Home(tmp_path / "file" / "home").create()


@pytest.mark.parametrize("name", ["what?", "number#1", "100%20", "two\nlines"])
def test_a_home_whose_path_no_address_can_carry_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecastError, match=r"must not contain.*choose another with --home"):
        Home(tmp_path / name).create()
    assert not (tmp_path / name).exists()


def test_a_home_may_have_spaces_and_any_script(tmp_path: Path) -> None:
    home = Home(tmp_path / "mein Ordner ü 日本")
    home.create()
    service.prepare(home, service.settings_of(home))
    assert (home.root / "recast.db").is_file()


def test_starting_in_the_background_reports_why_it_failed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(CannotStart, match=r"^port .* cannot be used"):
            service.start_in_background(home, other.getsockname()[1], bound=True)
    assert service.owner(home) is None


def test_peak_memory_sees_children() -> None:
    block = 80 * 2**20
    code = f"import sys; block = bytearray({block}); print('ready', flush=True); sys.stdin.read()"
    with PeakMemory() as memory:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants(os.getpid())
        alone = resident_bytes(child.pid)
        assert block < alone < 2 * block
        assert eventually(lambda: (memory.peak_bytes or 0) > alone, 5)
        child.communicate()
    assert resident_bytes(child.pid) == 0
