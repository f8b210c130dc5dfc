"""How an attempt ended, before it is written to the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; ``data`` is the result or the error.

    An ``interrupted`` attempt could not reach the database: its job is queued again, if that can be written
    by then. Of a ``lost`` one nothing is written: the job may be another worker's.
    """

    kind: Literal["result", "error", "stopped", "died", "interrupted", "lost"]
    data: Mapping[str, Any] = field(default_factory=dict)
