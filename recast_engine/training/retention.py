"""Which checkpoints stay, and whether there is room for the next one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recast_engine.config import RetentionConfig
from recast_engine.errors import DiskFull

COPIES = 2
"""A checkpoint is written into the work folder and then stored, in the embedded service on the same disk."""

SPARE_BYTES = 64 * 2**20


def checkpoint_name(epoch: int) -> str:
    """``epoch-000010``."""
    return f"epoch-{epoch:06d}"


@dataclass(frozen=True)
class Kept:
    """A checkpoint that is kept.

    Attributes:
        objective: of its epoch; None: not to be counted among the best (the guard doubted it, or it stands
            before the stage's first epoch).
    """

    epoch: int
    stage: int
    objective: float | None

    @property
    def name(self) -> str:
        """``epoch-000010``."""
        return checkpoint_name(self.epoch)


def retain(found: Sequence[Kept], config: RetentionConfig) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
    """Those that stay and those that go, both by rising epoch.

    Objectives are standardised anew in every stage, so only those of the newest checkpoint's stage compare.
    """
    ordered = sorted(found, key=lambda one: one.epoch)
    stage = ordered[-1].stage
    rated = [one for one in ordered if one.stage == stage and one.objective is not None]
    best = sorted(rated, key=lambda one: (-(one.objective or 0.0), one.epoch))[: config.best]
    periodic = [one for one in ordered if config.every and one.epoch % config.every == 0]
    stay = {one.epoch for one in (*ordered[-config.last :], *best, *periodic)}
    kept = tuple(one for one in ordered if one.epoch in stay)
    return kept, tuple(one for one in ordered if one.epoch not in stay)


def best(kept: Sequence[Kept]) -> Kept | None:
    """The kept checkpoint of the highest objective in the newest one's stage."""
    rated = [one for one in kept if one.objective is not None and one.stage == kept[-1].stage]
    return max(rated, key=lambda one: (one.objective or 0.0, -one.epoch), default=None)


def require_room(folder: Path, checkpoint_bytes: int, *, checkpoints: int = 1) -> None:
    """Raises DiskFull unless ``folder``'s disk has room for so many checkpoints, stored copies included."""
    needed = COPIES * checkpoints * checkpoint_bytes + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"{checkpoints} checkpoint(s) need {needed / 2**30:.2f} GiB of disk and {free / 2**30:.2f} GiB "
            "are free: free some, keep fewer (retention), or train a smaller adapter (lora.rank)"
        )
