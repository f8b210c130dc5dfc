"""JSON whose objects name every key once: of two values for one budget, neither is surely meant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


class RepeatedKey(ValueError):
    """An object has a key more than once."""

    def __init__(self, key: str):
        self.key = key
        super().__init__(key)

    def __str__(self) -> str:
        return f"the key {self.key[:80]!r} is given twice in one object"


def loads(text: str | bytes) -> Any:
    """``json.loads``, but strict about keys. Raises RepeatedKey, and what ``json.loads`` raises."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKey(key)
        found[key] = value
    return found
