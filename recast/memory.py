"""Peak memory of this process and everything below it, sampled from ``/proc``."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
PERIOD_SECONDS = 0.5


class PeakMemory:
    """A context manager that watches in the background.

    Attributes:
        peak_bytes: largest sum seen so far, shared pages counted once (PSS); None where the system has no
            ``/proc`` to read it from.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while PROC.is_dir():
            total = sum(resident_bytes(pid) for pid in descendants(os.getpid()))
            self.peak_bytes = max(total, self.peak_bytes or 0)
            if self._done.wait(PERIOD_SECONDS):
                return


def descendants(root: int) -> list[int]:
    """``root`` and every process below it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, ()))
    return found


def resident_bytes(pid: int) -> int:
    """Proportional set size of a process, 0 once it is gone."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:  # it ended, or belongs to someone else
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text()
    except OSError:  # it ended while we looked
        return None
    return int(stat.rpartition(")")[2].split()[1])
