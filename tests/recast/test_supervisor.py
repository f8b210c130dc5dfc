from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recast import supervisor as supervisor_module
from recast.child import watch
from recast.errors import CannotStart
from recast.supervisor import Child, Interrupted, Supervisor
from tests.recast.processes import alive, eventually

SLEEP = "import time; time.sleep(600)"
FORKS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""
DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
SUPERVISES = """
import pathlib, sys, threading
from recast.supervisor import Child, Supervisor
supervisor = Supervisor(pathlib.Path(sys.argv[1]), threading.Event(), print)
child = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
supervisor.start(child, lambda: True, 5)
print(child.process.pid, flush=True)
supervisor.run()
"""
ACCEPTS = """
import socket, sys
connection, _ = socket.socket(fileno=int(sys.argv[1])).accept()
connection.sendall(b"here")
"""
GRANDPARENT = """
import os, subprocess, sys, time
watcher, command, note = sys.argv[1:]
subprocess.Popen([sys.executable, "-c", watcher, str(os.getpid()), command, note])
time.sleep(600)
"""
WATCHER = """
import sys
from recast.child import watch
parent, command, note = sys.argv[1:]
watch(int(parent), [sys.executable, "-c", command, note])
"""
NOTES_PID = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def stopped() -> threading.Event:
    return threading.Event()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, stopped: threading.Event, said: list[str]) -> Supervisor:
    return Supervisor(tmp_path, stopped, said.append)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_stop_ends_children_and_what_they_started(supervisor: Supervisor, tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    child = Child("worker", python(FORKS, str(note)))
    supervisor.start(child, lambda: note.exists() and note.read_text() != "", 20)
    assert child.process is not None
    pids = [child.process.pid, int(note.read_text())]
    assert all(alive(pid) for pid in pids)
    supervisor.stop()
    assert eventually(lambda: not any(alive(pid) for pid in pids), 5)


def test_a_child_that_ignores_sigterm_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    child = Child("stubborn", python(DEAF, str(tmp_path / "up")), stop_seconds=0.3)
    supervisor.start(child, (tmp_path / "up").exists, 20)
    process = child.process
    assert process is not None
    supervisor.stop()
    assert process.returncode == -signal.SIGKILL


def test_a_child_that_cannot_start_is_reported_with_its_last_words(supervisor: Supervisor) -> None:
    child = Child("api", python("raise SystemExit('port 1 is taken')"))
    with pytest.raises(
        CannotStart, match=r"api ended with status 1: port 1 is taken \(whole log: .*api.log\)"
    ):
        supervisor.start(child, lambda: False, 20)


def test_a_child_that_never_gets_ready_is_given_up(supervisor: Supervisor) -> None:
    with pytest.raises(CannotStart, match="api was not ready after 0 s"):
        supervisor.start(Child("api", python(SLEEP)), lambda: False, 0.2)
    supervisor.stop()


def test_stopping_interrupts_the_start(supervisor: Supervisor, stopped: threading.Event) -> None:
    stopped.set()
    with pytest.raises(Interrupted):
        supervisor.start(Child("api", python(SLEEP)), lambda: False, 60)
    supervisor.stop()


def test_a_crashed_child_is_started_again_with_growing_delays(
    supervisor: Supervisor, stopped: threading.Event, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY", 0.01)
    child = Child("worker", python("raise SystemExit(3)"), delay=0.01)
    supervisor.children.append(child)
    supervisor._launch(child)
    threading.Timer(3.0, stopped.set).start()
    supervisor.run(poll_seconds=0.02)
    assert child.restarts >= 2
    assert "worker ended with status 3; starting it again in 0.01 s" in said[0]
    assert "again in 0.02 s" in said[1]
    supervisor.stop()


def test_a_child_that_starts_again_finds_the_socket_it_inherits(
    supervisor: Supervisor, stopped: threading.Event, said: list[str]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    child = Child("api", python(ACCEPTS, str(listener.fileno())), inherits=(listener,), delay=0.01)
    del listener
    supervisor.start(child, lambda: True, 5)
    watch = threading.Thread(target=lambda: answers.extend(ask(address) for _ in range(3)))
    answers: list[bytes] = []
    watch.start()
    threading.Timer(20.0, stopped.set).start()
    supervisor.run(watch.is_alive, poll_seconds=0.02)
    assert answers == [b"here"] * 3, said
    supervisor.stop()


def ask(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, 15) as connection:
        return connection.recv(10)


def test_a_child_that_cannot_be_launched_again_is_tried_again(
    supervisor: Supervisor, stopped: threading.Event, said: list[str]
) -> None:
    child = Child("worker", python("raise SystemExit(3)"), delay=0.01)
    supervisor.children.append(child)
    supervisor._launch(child)
    assert child.process is not None
    child.process.wait()
    supervisor.log(child).unlink()
    supervisor.log(child).mkdir()  # no log can be opened
    threading.Timer(1.0, supervisor.log(child).rmdir).start()
    threading.Timer(4.0, stopped.set).start()
    supervisor.run(poll_seconds=0.02)
    assert "worker cannot be started (Is a directory); starting it again in 0.02 s" in said[1]
    assert "worker ended with status 3" in said[-1]
    supervisor.stop()


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(python(SUPERVISES, str(tmp_path)), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    assert eventually(lambda: not alive(pid), 5)


def test_watching_without_the_kernels_help_ends_the_command_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent = subprocess.Popen(python(GRANDPARENT, WATCHER, NOTES_PID, str(note)))
    assert eventually(lambda: note.exists() and note.read_text() != "")
    pid = int(note.read_text())
    parent.kill()
    parent.wait()
    assert eventually(lambda: not alive(pid), 5)


def test_watching_passes_the_exit_status_on() -> None:
    assert watch(os.getppid(), python("raise SystemExit(7)")) == 7
