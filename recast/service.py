"""The embedded service: broker, API and worker of one home folder, started, watched and stopped together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import httpx
from sqlalchemy.exc import SQLAlchemyError

import migrations
from api.keys.service import new_secret
from recast import embedded
from recast.errors import CannotStart, HomeLost
from recast.home import Home, ServiceRecord, write_private
from recast.supervisor import Child, Interrupted, Supervisor
from recast_engine.backbones.catalogue import models
from recast_engine.errors import ConfigError
from store.database import make_engine, session_factory
from store.errors import DatabaseTooNew
from store.queue import reachable
from store.repositories import keys, workspaces
from store.settings import Settings
from workers.tracking.catalogue import TrackerUnavailable, wanted

HOST = "127.0.0.1"
DEFAULT_PORT = 8321
START_SECONDS = 60.0
WORKER_STOP_SECONDS = 30.0
STOP_SECONDS = 60.0
WORKSPACE = "default"


def serve(
    home: Home, port: int, *, ready: Callable[[ServiceRecord], None], say: Callable[[str], None]
) -> None:
    """Run the service of ``home`` until SIGTERM, SIGINT or SIGHUP; nothing of it is left when this returns.

    Args:
        port: TCP port of the API on the loopback interface; 0: any free one.
        ready: called once everything runs.
        say: told, line by line, what goes wrong and is mended.

    Raises:
        CannotStart: with the reason and the remedy.
        HomeLost: the home was moved or deleted meanwhile, and whatever would be stored with it.
    """
    home.create()
    stop = threading.Event()
    with exclusive(home) as is_there, _signals(stop):
        supervisor = Supervisor(home.logs, stop, say)
        try:
            record = _start(home, port, supervisor)
            home.write_record(record)
            ready(record)
            supervisor.run(is_there)
        except Interrupted:
            return
        finally:
            try:
                home.record.unlink(missing_ok=True)
            finally:
                supervisor.stop()
        if not stop.is_set():
            raise HomeLost(
                f"{home.root} was moved or deleted while its service ran, so the service has ended: put it "
                "back, if it still exists, and run `recast up` again"
            )


def _start(home: Home, port: int, supervisor: Supervisor) -> ServiceRecord:
    settings = settings_of(home)
    try:
        models()
        wanted(settings)
    except (ConfigError, TrackerUnavailable) as error:
        raise CannotStart(str(error)) from None
    listener = listen(port)
    if not os.environ.get("RECAST_BROKER_URL"):
        path = embedded.broker_socket(home)
        settings = replace(settings, broker_url=embedded.broker_url(path))
        supervisor.start(embedded.broker(home, path), lambda: reachable(settings.broker_url), START_SECONDS)
    prepare(home, settings)
    url = f"http://{HOST}:{listener.getsockname()[1]}"
    environment = settings.to_env()
    api = Child(
        "api", [sys.executable, "-m", "recast.api_process", str(listener.fileno())], environment,
        inherits=(listener,),
    )  # fmt: skip
    worker = Child(
        "worker", [sys.executable, "-m", "workers.main"], environment, stop_seconds=WORKER_STOP_SECONDS
    )  # a running training first writes its checkpoint
    supervisor.start(api, lambda: answers(url, "/healthz"), START_SECONDS)
    supervisor.start(worker, lambda: answers(url, "/readyz"), START_SECONDS)
    return ServiceRecord(url=url, pid=os.getpid(), broker_url=settings.broker_url)


def settings_of(home: Home) -> Settings:
    """The settings of a service in ``home``. Raises CannotStart naming a variable that cannot be read."""
    try:
        return Settings.from_env({**os.environ, "RECAST_HOME": str(home.root)})
    except ValueError as error:
        raise CannotStart(str(error)) from None


def prepare(home: Home, settings: Settings) -> None:
    """Bring the database up to date and make sure of the workspace and the local admin key.

    Raises:
        CannotStart: the database cannot be used.
    """
    try:
        migrations.upgrade(settings.database_url)
        engine = make_engine(settings.database_url)
        with session_factory(engine)() as session, session.begin():
            workspace = workspaces.by_name(session, WORKSPACE) or workspaces.create(session, WORKSPACE)
            known = home.read_key()
            if known is None or keys.by_secret(session, known) is None:
                secret = new_secret()
                keys.create(
                    session, workspace_id=workspace.id, name="local admin", role="admin", secret=secret
                )
                write_private(home.key, secret + "\n")
        engine.dispose()
    except DatabaseTooNew as error:
        raise CannotStart(str(error)) from None
    except SQLAlchemyError as error:
        reason = str(error).splitlines()[0]
        raise CannotStart(f"the database cannot be used ({reason}); see RECAST_DATABASE_URL") from None


def listen(port: int) -> socket.socket:
    """A listening loopback socket. Raises CannotStart when the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise CannotStart(
            f"port {port} cannot be used ({error.strerror}): give another --port, or --port 0 for a free one"
        ) from None
    listener.listen(128)
    return listener


@contextmanager
def exclusive(home: Home) -> Iterator[Callable[[], bool]]:
    """Hold the home's lock; the kernel lets go of it however this process ends.

    Yields what tells whether the lock is still the home's, which was neither moved nor deleted.

    Raises:
        CannotStart: another service holds it.
    """
    with home.lock.open("a+", encoding="utf-8") as lock:
        if not _lock(lock):
            lock.seek(0)
            raise CannotStart(
                f"a service already runs on {home.root} (process {lock.read().strip()}): "
                "use it, stop it with `recast down`, or give another --home"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield partial(_is_at, lock, home.lock)


def _lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the open ``file`` is still the one at ``path``; so it is while that cannot be looked at."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)


def owner(home: Home) -> int | None:
    """Process id of the service that runs on ``home``, or None."""
    if not home.lock.is_file():
        return None
    with home.lock.open("r", encoding="utf-8") as lock:
        return None if _lock(lock) else int(lock.read().strip() or 0) or None


def running(home: Home) -> ServiceRecord | None:
    """The service that runs on ``home`` and is ready, or None."""
    record = home.read_record()
    return record if record is not None and owner(home) == record.pid else None


def answers(url: str, path: str) -> bool:
    """Whether the API says that all is well."""
    try:
        return httpx.get(url + path, timeout=5.0, trust_env=False).is_success
    except httpx.TransportError:
        return False


def start_in_background(home: Home, port: int, *, bound: bool) -> ServiceRecord:
    """Start the service as a process of its own and wait until it is ready.

    Args:
        bound: it ends when this process ends.

    Raises:
        CannotStart: what it said before it ended.
    """
    home.create()
    command = [sys.executable, "-m", "recast", "up", "--home", str(home.root), "--port", str(port)]
    if bound:
        command = [sys.executable, "-m", "recast.child", str(os.getpid()), *command]
    log_path = home.logs / "service.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + 4 * START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (record := running(home)) is not None:
            return record
        time.sleep(0.1)
    process.terminate()
    said = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise CannotStart(said[-1].removeprefix("Error: ") if said else "the service did not start")


def stop_running(home: Home) -> bool:
    """Stop the service of ``home`` and wait until it is gone; False when none ran.

    Raises:
        CannotStart: it did not end in time.
    """
    pid = owner(home)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while owner(home) == pid:
        if time.monotonic() > deadline:
            raise CannotStart(f"process {pid} did not end within {STOP_SECONDS:.0f} s (logs: {home.logs})")
        time.sleep(0.1)
    return True


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Turn the signals that mean "end" into ``stop``."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
