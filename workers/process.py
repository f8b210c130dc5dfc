"""The engine process as its worker sees it: launched in a group of its own, heard, told, and ended."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

MAX_WAITING_EVENTS = 1000  # then the pipe fills up and the engine waits for the database
EXIT_SECONDS = 10.0

Event = dict[str, Any]


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that hold an engine to its share of the cores; waiting threads sleep instead of spinning."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RECAST_ENGINE_THREADS")
    return {**dict.fromkeys(names, str(threads)), "OMP_WAIT_POLICY": "passive"}


def launch_command(workdir: Path, runner: str, devices: int) -> list[str]:
    """The command of the engine, by torchrun for several devices: a process each, all ended with one."""
    engine = ["-m", "workers.engine", str(workdir), "--runner", runner]
    if devices == 1:
        return [sys.executable, *engine]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(devices), "--max-restarts", "0"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    logs = ["--log-dir", str(workdir / "torchrun")]  # else a temporary folder stays for each launch
    return [sys.executable, *launcher, *meeting, *logs, *engine]


class EngineProcess:
    """A context around one engine; leaving it kills whatever is left of it.

    The processes of several devices are each in a group of their own (torchrun's doing): they end when their
    standard input does.
    """

    def __init__(self, workdir: Path, runner: str, threads: int, devices: int = 1):
        self._workdir, self._runner = workdir, runner
        self._threads, self._devices = max(1, threads // devices), devices
        self._events: queue.Queue[Event] = queue.Queue(MAX_WAITING_EVENTS)
        self._closed = threading.Event()

    @property
    def log_path(self) -> Path:
        """What the engine printed and logged."""
        return self._workdir / "engine.log"

    def __enter__(self) -> EngineProcess:
        with self.log_path.open("wb") as output:
            self._process = subprocess.Popen(
                launch_command(self._workdir, self._runner, self._devices),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **thread_environment(self._threads)},
                start_new_session=True,
            )
        self._pump = threading.Thread(target=self._read, name=f"engine-{self._process.pid}", daemon=True)
        self._pump.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self.signal(signal.SIGKILL)
        self._process.wait()
        _close(self._process.stdin)
        while self._pump.is_alive():  # it may wait for room in the queue
            self._discard()
            self._pump.join(0.05)
        _close(self._process.stdout)

    @property
    def pid(self) -> int:
        """Process id, also the id of its group."""
        return self._process.pid

    def next_event(self, timeout: float) -> Event | None:
        """The next event, None when there is none for ``timeout`` seconds."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def ended(self) -> bool:
        """Whether the process is gone and every event it wrote was taken."""
        if self._process.poll() is None:
            return False
        self._pump.join(EXIT_SECONDS if self._events.empty() else 0)
        return self._events.empty()

    def exit_code(self, timeout: float = EXIT_SECONDS) -> int | None:
        """The exit code (negative: the signal), None when the process is still there after ``timeout``."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def tell(self, command: str) -> None:
        """Send a command; a process that is gone does not hear it, which its end will show anyway."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            log.info("engine process %d is gone and did not hear %r", self.pid, command)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            log.debug("engine process group %d is gone", self.pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._closed.is_set():
                return
            try:
                self._events.put(json.loads(line))
            except ValueError:
                log.warning("engine process %d wrote a line that is no event: %r", self.pid, line[:200])

    def _discard(self) -> None:
        while self.next_event(0.001) is not None:
            pass


def _close(stream: Any) -> None:
    try:
        if stream is not None:
            stream.close()
    except BrokenPipeError:  # an unsent command to a process that is gone
        log.debug("the engine's pipe was already closed")
