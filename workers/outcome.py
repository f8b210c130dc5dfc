"""How an attempt ended, before it is written to the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; ``data`` is the result or the error."""

    kind: Literal["result", "error", "stopped", "died", "lost"]
    data: Mapping[str, Any] = field(default_factory=dict)
