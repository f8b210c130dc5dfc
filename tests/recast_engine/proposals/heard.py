"""An observer that keeps what it hears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Heard:
    """An observer that remembers; ``stop_after`` files it asks to stop."""

    phases: list[tuple[str, int]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    bought: int = 0
    evaluations: int = 0
    stop_after: int | None = None

    def phase(self, name: str, total: int) -> None:
        self.phases.append((name, total))

    def advance(self, done: int) -> None:
        self.done.append(done)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise AssertionError("proposals have no metrics")

    def finding(self, kind: str, payload: Mapping[str, Any]) -> None:
        assert kind == "warning"
        self.warnings.append(payload["text"])

    def file(self, kind: str, name: str, path: Path, metadata: Mapping[str, Any]) -> None:
        assert kind == "proposal"
        assert name not in self.files
        self.files[name] = path.read_bytes()
        self.metadata[name] = metadata

    def cost(
        self,
        *,
        model_evaluations: int = 0,
        reward_calls: int = 0,
        proposal_images: int = 0,
        device_seconds: float = 0.0,
    ) -> None:
        self.bought += proposal_images
        self.evaluations += model_evaluations

    def should_stop(self) -> bool:
        return self.stop_after is not None and len(self.files) >= self.stop_after
