"""The engine's only upward call: what it reports while it works, and the question whether to stop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

FileKind = Literal["checkpoint", "samples", "adapter", "report", "log", "scores", "proposal"]
FindingKind = Literal["profile", "allocation", "evaluation", "warning", "stage"]


class Observer(Protocol):
    """What a caller of the engine may listen to. Implementations must be cheap and must not raise."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins that will advance to ``total`` (for example ``"training"``, 20 epochs)."""

    def advance(self, done: int) -> None:
        """``done`` of the current phase's total are finished; never goes down within a phase."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one training epoch; only finite values."""

    def finding(self, kind: FindingKind, payload: Mapping[str, Any]) -> None:
        """A result worth a row of its own; ``payload`` is plain JSON data."""

    def file(self, kind: FileKind, name: str, path: Path, metadata: Mapping[str, Any]) -> None:
        """A finished file. The caller must have taken it when this returns; the engine may then delete it."""

    def discard(self, kind: FileKind, name: str) -> None:
        """A file reported earlier, in this run or one it goes on from, is not needed any more."""

    def cost(
        self,
        *,
        model_evaluations: int = 0,
        reward_calls: int = 0,
        proposal_images: int = 0,
        device_seconds: float = 0.0,
    ) -> None:
        """Adds to the job's cost."""

    def should_stop(self) -> bool:
        """True when the engine should checkpoint and leave (it then raises :class:`Stopped`)."""


class Stopped(Exception):
    """The observer asked to stop, and the engine left in good order."""


class NullObserver:
    """Hears nothing and never stops: the default in a notebook or a test."""

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, done: int) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def finding(self, kind: FindingKind, payload: Mapping[str, Any]) -> None: ...

    def file(self, kind: FileKind, name: str, path: Path, metadata: Mapping[str, Any]) -> None: ...

    def discard(self, kind: FileKind, name: str) -> None: ...

    def cost(
        self,
        *,
        model_evaluations: int = 0,
        reward_calls: int = 0,
        proposal_images: int = 0,
        device_seconds: float = 0.0,
    ) -> None: ...

    def should_stop(self) -> bool:
        return False
