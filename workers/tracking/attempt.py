"""The trackers of one attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from workers.tracking.base import Run, Tracker
from workers.tracking.mirror import Mirror

GRACE_SECONDS = 5.0
"""How long a worker that is about to leave waits for its trackers, all together."""


class Tracking:
    """Tells every tracker of a worker what one training reports; without trackers it does nothing.

    Nothing is opened before the first metrics, so jobs without any make no run.
    """

    def __init__(self, connections: Mapping[str, Callable[[], Tracker]], run: Callable[[], Run]) -> None:
        self._connections, self._run = connections, run
        self._mirrors: list[Mirror] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of an epoch, which are stored already."""
        if self._connections and not self._mirrors:
            run = self._run()
            self._mirrors = [Mirror(name, connect(), run) for name, connect in self._connections.items()]
        for mirror in self._mirrors:
            mirror.metrics(step, values)

    def close(self, status: str, *, leaving: bool) -> None:
        """The attempt is over.

        Args:
            status: the job's.
            leaving: whether the worker's process is about to end, and with it the threads that send.
        """
        for mirror in self._mirrors:
            mirror.close(status)
        deadline = time.monotonic() + GRACE_SECONDS
        for mirror in self._mirrors if leaving else []:
            mirror.join(max(0.0, deadline - time.monotonic()))
        self._mirrors = []
