"""Metrics on their way to a tracker: in a thread of their own, so that no tracker holds up a training."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping

from workers.tracking.base import Run, Tracker

log = logging.getLogger(__name__)

MAX_PENDING = 10_000
"""Epochs that wait for a tracker; beyond that the oldest are given up."""

_CREDENTIALS = re.compile(r"//[^/@\s]+@")
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


class Mirror:
    """Sends one attempt's metrics to one tracker.

    What cannot be sent waits and is tried again with the next epoch and at the end. The first failure is
    logged, those after it are not, until the tracker answers again.
    """

    def __init__(self, name: str, tracker: Tracker, run: Run) -> None:
        self._name, self._tracker, self._run = name, tracker, run
        self._pending: dict[int, Mapping[str, float]] = {}
        self._status: str | None = None
        self._changed, self._news = threading.Condition(), False
        self._open, self._failing = False, False
        self._thread = threading.Thread(target=self._work, name=f"{name}-{run.id}", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of an epoch, soon."""
        with self._changed:
            self._pending[step] = dict(values)
            if len(self._pending) > MAX_PENDING:
                del self._pending[next(iter(self._pending))]
            self._tell()

    def close(self, status: str) -> None:
        """The attempt is over: send what waits, once more, and let go. Returns at once."""
        with self._changed:
            self._status = status
            self._tell()

    def join(self, seconds: float) -> bool:
        """Wait until all is sent after ``close``; whether it was, or was given up, in that time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()

    def _work(self) -> None:
        status = None
        while status is None:
            with self._changed:
                self._changed.wait_for(lambda: self._news)
                self._news, status = False, self._status
            self._try(status)

    def _try(self, status: str | None) -> None:
        try:
            self._send()
            if status is not None:
                self._tracker.close(status)
        except Exception as error:  # noqa: BLE001 - a tracker's library may raise anything, and must not matter
            if not self._failing:
                told = f"{type(error).__name__}: {_without_secrets(str(error))}"
                log.warning("%s: %s failed, the training goes on: %s", self._run.id, self._name, told)
            self._failing = True
            return
        if self._failing:
            log.info("%s: %s answers again", self._run.id, self._name)
        self._failing = False

    def _send(self) -> None:
        if not self._open:
            self._tracker.open(self._run)
            self._open = True
        with self._changed:
            waiting = list(self._pending.items())
        for step, values in waiting:
            self._tracker.log(step, values)
            with self._changed:
                if self._pending.get(step) is values:
                    del self._pending[step]


def _without_secrets(text: str) -> str:
    """The first line of an error's text without what is secret in it."""
    line = _CREDENTIALS.sub("//", text.strip().split("\n", 1)[0])[:300]
    for secret in filter(None, map(os.environ.get, _SECRETS)):
        line = line.replace(secret, "***")
    return line
