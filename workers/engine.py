"""The engine process: runs one job and speaks JSON lines with the worker that launched it.

    python -m workers.engine WORKDIR [--runner module:function]

Events go out on what was standard output (which is then pointed at the log, so that a library's print cannot
break the protocol). Commands come in on standard input: ``stop`` asks to checkpoint and leave, ``taken N``
confirms file N. When standard input ends, the worker is gone and the process exits at once: whatever it would
still report belongs to nobody.

Of several processes on as many devices (RANK, WORLD_SIZE: torchrun), the first speaks with the worker. The
others report nothing but an error, and share its standard input only to notice its end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from recast_engine.errors import DeviceLost, EngineError
from recast_engine.observer import FileKind, FindingKind, NullObserver, Observer, Stopped

log = logging.getLogger(__name__)

PARENT_GONE = 70
PEER_GONE = 71

_OS_ERROR = re.compile(r"os error (\d+)")
"""How a library in Rust says it in the text of its own error: ``No space left on device (os error 28)``."""

Runner = Callable[[Path, Observer], Mapping[str, Any]]


class Commands:
    """What the worker asked for, kept up to date by a thread that reads standard input."""

    def __init__(self, source: IO[bytes]):
        """``source`` is unbuffered: a buffer's lock, held by a waiting thread, breaks the process's exit."""
        self._source = source
        self._changed = threading.Condition()
        self._taken = 0
        self._stop = False

    def listen(self) -> None:
        """Start reading; the process exits when the source ends."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        for line in self._source:
            words = line.decode().split()
            if words == ["stop"]:
                self.stop()
            elif len(words) == 2 and words[0] == "taken":
                with self._changed:
                    self._taken = int(words[1])
                    self._changed.notify_all()
        os._exit(PARENT_GONE)

    def stop(self, *_: object) -> None:
        """Ask the engine to stop; also a signal handler."""
        self._stop = True

    @property
    def stop_requested(self) -> bool:
        """Whether the engine should stop."""
        return self._stop

    def wait_taken(self, number: int) -> None:
        """Wait until the worker has taken file ``number``."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken >= number)


def watch_end(source: int) -> None:
    """Exit the process when ``source`` ends, without reading from it; what is sent is for the first rank."""

    def wait() -> None:
        hangup = select.poll()
        hangup.register(source, 0)  # nothing but the end, which is always reported
        hangup.poll()
        os._exit(PARENT_GONE)

    threading.Thread(target=wait, name="worker-watch", daemon=True).start()


class PipeObserver:
    """Tells the worker everything, one JSON object per line."""

    def __init__(self, events: IO[bytes], commands: Commands):
        self._events, self._commands = events, commands
        self._lock = threading.Lock()
        self._files = 0

    def emit(self, type: str, **fields: Any) -> None:
        """Write one event."""
        line = json.dumps({"type": type, **plain(fields)}, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._events.write(line)
            self._events.flush()

    def phase(self, name: str, total: int) -> None:
        self.emit("phase", name=name, total=total)

    def advance(self, done: int) -> None:
        self.emit("advance", done=done)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self.emit("metrics", step=step, values=finite)

    def finding(self, kind: FindingKind, payload: Mapping[str, Any]) -> None:
        self.emit("finding", kind=kind, payload=payload)

    def file(self, kind: FileKind, name: str, path: Path, metadata: Mapping[str, Any]) -> None:
        with self._lock:
            self._files += 1
            number = self._files
        self.emit("file", n=number, kind=kind, name=name, path=str(Path(path).absolute()), metadata=metadata)
        self._commands.wait_taken(number)

    def discard(self, kind: FileKind, name: str) -> None:
        self.emit("discard", kind=kind, name=name)

    def cost(
        self,
        *,
        model_evaluations: int = 0,
        reward_calls: int = 0,
        proposal_images: int = 0,
        device_seconds: float = 0.0,
    ) -> None:
        self.emit(
            "cost",
            model_evaluations=model_evaluations,
            reward_calls=reward_calls,
            proposal_images=proposal_images,
            device_seconds=device_seconds,
        )

    def should_stop(self) -> bool:
        return self._commands.stop_requested


def plain(value: Any) -> Any:
    """``value`` as JSON data: numbers of numeric libraries become Python's, NaN and infinities None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def run_request(workdir: Path, observer: Observer) -> Mapping[str, Any]:
    """Run ``workdir/request.json`` with the real engine."""
    from recast_engine.run import Request, run

    return run(Request.load(workdir / "request.json"), workdir, observer)


def load_runner(name: str) -> Runner:
    """The function called ``module:function``."""
    module, _, function = name.partition(":")
    runner: Runner = getattr(importlib.import_module(module), function)
    return runner


def describe(error: Exception) -> dict[str, str]:
    """The error as its owner may see it: no traceback, no paths."""
    if isinstance(error, EngineError):
        return {"type": error.type, "detail": str(error)}
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return {"type": "out-of-memory", "detail": "memory ran out; use smaller batches or fewer images"}
    if isinstance(error, OSError):
        return storage_error(error.strerror or name)
    if name == "SafetensorError" and (code := _OS_ERROR.search(str(error))):
        return storage_error(os.strerror(int(code[1])))
    return {"type": "internal", "detail": "the engine failed unexpectedly; its log has the details"}


def storage_error(reason: str) -> dict[str, str]:
    """The error of a job whose files could not be stored or read, with what its operator can do."""
    remedy = (
        "make sure that the storage has room, can be written and can be reached, then start the job again"
    )
    return {"type": "storage-error", "detail": f"a file of the job could not be used ({reason}): {remedy}"}


def execute(runner: str, workdir: Path, observer: PipeObserver, *, leads: bool = True) -> int:
    """Run ``runner`` and report how it ended; returns the exit code.

    Args:
        leads: whether this is the rank that reports. One that does not reports its error alone; when it dies
            without, the first loses it and ends without a word, as an engine does that is killed.
    """
    try:
        result = load_runner(runner)(workdir, observer if leads else NullObserver())
        if leads:
            observer.emit("result", result=result)
    except Stopped:
        if leads:
            observer.emit("stopped")
    except DeviceLost:
        log.exception("a device is gone")
        return PEER_GONE
    except Exception as error:
        log.exception("the job failed")
        observer.emit("error", error=describe(error))
        return 1
    return 0


def main() -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="Run one job for a worker.")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--runner", default="workers.engine:run_request")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    commands = Commands(os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False))
    leads = int(os.environ.get("RANK", "0")) == 0
    if leads:
        signal.signal(signal.SIGTERM, commands.stop)
        commands.listen()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank decides for all
        watch_end(sys.stdin.fileno())
    return execute(arguments.runner, arguments.workdir, PipeObserver(events, commands), leads=leads)


if __name__ == "__main__":
    sys.exit(main())
