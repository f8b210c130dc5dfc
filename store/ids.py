"""Prefixed ids that sort by the time they were made."""

from __future__ import annotations

import secrets
import threading
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, as in ULID
_lock = threading.Lock()
_last = 0

JOB_PREFIXES = {"profile": "prof", "training": "train", "evaluation": "eval", "profile_shard": "shard"}


def new_id(prefix: str) -> str:
    """``prefix_`` and 26 characters: 48 bits of milliseconds, then 80 random bits.

    Ids of one process strictly increase, also within a millisecond.
    """
    global _last
    with _lock:
        value = max((time.time_ns() // 1_000_000) << 80 | secrets.randbits(80), _last + 1)
        _last = value
    digits = [_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{prefix}_{''.join(digits)}"
