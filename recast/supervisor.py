"""Keeps a handful of child processes running until told to stop, and then leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recast.errors import CannotStart

KILL_SECONDS = 5.0
STEADY_SECONDS = 30.0
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
LOG_TAIL_BYTES = 2000


@dataclass
class Child:
    """One supervised process.

    Attributes:
        name: names its log file.
        command: what to run.
        environment: variables on top of this process's own.
        inherits: sockets it inherits by their descriptors, held open here for when it starts again.
        stop_seconds: how long it may take to end after SIGTERM.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    inherits: tuple[socket.socket, ...] = ()
    stop_seconds: float = 10.0
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    delay: float = FIRST_DELAY
    restart_at: float | None = None
    restarts: int = 0


class Interrupted(Exception):
    """The supervisor was told to stop while it was still starting children."""


class Supervisor:
    """Starts children in order, restarts those that end on their own, stops them in reverse order.

    Children die with this process, by whatever cause it dies (:mod:`recast.child`). All methods are for the
    thread that made the object: the kernel ties that promise to the thread which starts a child.
    """

    def __init__(self, logs: Path, stopped: threading.Event, say: Callable[[str], None]) -> None:
        self.logs = logs
        self.stopped = stopped
        self.say = say
        self.children: list[Child] = []

    def log(self, child: Child) -> Path:
        """Where the child's output goes."""
        return self.logs / f"{child.name}.log"

    def start(self, child: Child, ready: Callable[[], bool], timeout: float) -> None:
        """Start ``child`` and wait until ``ready`` says so.

        Raises:
            CannotStart: it ended or was not ready in time; the text ends with what it last logged.
            Interrupted: ``stopped`` was set meanwhile.
        """
        self.children.append(child)
        self._launch(child)
        deadline = time.monotonic() + timeout
        while not ready():
            assert child.process is not None
            if child.process.poll() is not None:
                raise CannotStart(self._obituary(child, f"ended with status {child.process.returncode}"))
            if time.monotonic() > deadline:
                raise CannotStart(self._obituary(child, f"was not ready after {timeout:.0f} s"))
            if self.stopped.wait(0.1):
                raise Interrupted

    def run(self, goes_on: Callable[[], bool] = lambda: True, poll_seconds: float = 0.5) -> None:
        """Watch over the children until ``stopped`` is set, or ``goes_on`` says no."""
        while not self.stopped.wait(poll_seconds) and goes_on():
            for child in self.children:
                self._tend(child)

    def stop(self) -> None:
        """End all children, the last started first: SIGTERM, and SIGKILL for what stays."""
        for child in reversed(self.children):
            if child.process is not None:
                end_group(child.process, child.stop_seconds)
                child.process = None

    def _launch(self, child: Child) -> None:
        self.logs.mkdir(exist_ok=True)
        with self.log(child).open("ab") as log:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "recast.child", str(os.getpid()), *child.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child.environment},
                pass_fds=[shared.fileno() for shared in child.inherits],
                start_new_session=True,
            )
        child.started, child.restart_at = time.monotonic(), None

    def _tend(self, child: Child) -> None:
        now = time.monotonic()
        if child.restart_at is not None:
            if now >= child.restart_at:
                child.restarts += 1
                try:
                    self._launch(child)
                except OSError as error:  # no memory for a process, no room for a log: that may pass
                    self._restart_later(child, f"cannot be started ({error.strerror})")
            return
        if child.process is None or child.process.poll() is None:
            return
        signal_group(child.process, signal.SIGKILL)  # what the dead process may have left behind
        if now - child.started > STEADY_SECONDS:
            child.delay = FIRST_DELAY
        self._restart_later(child, f"ended with status {child.process.returncode}")

    def _restart_later(self, child: Child, why: str) -> None:
        self.say(f"{child.name} {why}; starting it again in {child.delay:g} s (log: {self.log(child)})")
        child.restart_at = time.monotonic() + child.delay
        child.delay = min(child.delay * 2, LONGEST_DELAY)

    def _obituary(self, child: Child, what: str) -> str:
        with self.log(child).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        return f"{child.name} {what}{last} (whole log: {self.log(child)})"


def end_group(process: subprocess.Popen[bytes], patience: float) -> None:
    """End a session leader and all of its group: SIGTERM to the leader, SIGKILL to what stays."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    signal_group(process, signal.SIGKILL)
    process.wait(KILL_SECONDS)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the process group that ``process`` leads, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
