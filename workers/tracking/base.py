"""What a tracker is told, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Run:
    """A training as trackers show it; all its attempts are one run.

    Attributes:
        id: of the job; the run's name.
        tags: workspace, model and prompt set.
        config: the job's, as JSON data.
    """

    id: str
    tags: Mapping[str, str]
    config: Mapping[str, Any]

    def parameters(self) -> dict[str, str | int | float | bool]:
        """The config with one name per value: ``optimizer.learning_rate``, ``stages.0.epochs``."""
        return _flattened(self.config)


class Tracker(Protocol):
    """A connection to one tracker for one attempt of one run; any method may raise what its library does."""

    def open(self, run: Run) -> None:
        """Begin the run, or continue it where an earlier attempt began it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of an epoch; a resumed attempt may repeat epochs."""

    def close(self, status: str) -> None:
        """The attempt is over; ``status`` is the job's: one that is queued or running will be continued."""


def _flattened(value: Any, name: str = "") -> dict[str, str | int | float | bool]:
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        return {name: "" if value is None else value}
    prefix = f"{name}." if name else ""
    return {key: leaf for part, item in parts for key, leaf in _flattened(item, f"{prefix}{part}").items()}
