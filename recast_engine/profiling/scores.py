"""What a measurement leaves behind: scores of clean images and of their rollouts. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from recast_engine.errors import InvalidArgument

Array = NDArray[np.float64]

COSTS = ("model_evaluations", "reward_calls", "proposal_images", "device_seconds")


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """Raw scores of R rewards on P prompts of K images at L noise levels; NaN: not measured, or no score.

    Tables of the same plan add up to one: every cell is measured by at most one of them.

    Attributes:
        clean: (R, P, K) of the model's own clean images.
        rollouts: (R, L - 1, P, K, M) of rollouts from every level above 0, the last from pure noise.
        proposals: (R, P, K) of an external proposal's images, which the rollouts then start from; all NaN
            for the self-tilted estimator.
        failed: (R,) scores that were due and did not come.
        rounds: rounds of the plan that it holds.
        cost: as ``Profile.cost``.
    """

    clean: Array
    rollouts: Array
    proposals: Array
    failed: NDArray[np.int64]
    rounds: int = 0
    cost: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0.0))

    @classmethod
    def empty(
        cls, rewards: int, levels: int, prompts: int, images: int, rollouts: int, *, rounds: int = 0
    ) -> ScoreTable:
        """A table in which nothing is measured; ``levels`` counts both ends."""
        shape = (rewards, prompts, images)
        return cls(
            np.full(shape, np.nan),
            np.full((rewards, levels - 1, prompts, images, rollouts), np.nan),
            np.full(shape, np.nan),
            np.zeros(rewards, dtype=np.int64),
            rounds,
        )

    @property
    def images(self) -> int:
        """K: columns, measured or not."""
        return int(self.clean.shape[2])

    @staticmethod
    def merge(tables: Sequence[ScoreTable]) -> ScoreTable:
        """All cells of ``tables``, whatever their order; a table of fewer images or rollouts is padded.

        Raises:
            InvalidArgument: no table, tables of different plans, or a cell measured twice.
        """
        if not tables:
            raise InvalidArgument("tables: there must be at least one")
        return ScoreTable(
            _united([table.clean for table in tables], 1),
            _united([table.rollouts for table in tables], 2),
            _united([table.proposals for table in tables], 1),
            np.sum([table.failed for table in tables], axis=0, dtype=np.int64),
            max(table.rounds for table in tables),
            {name: math.fsum(table.cost[name] for table in tables) for name in COSTS},
        )

    def save(self, path: Path) -> None:
        """Write as safetensors."""
        arrays = {
            "clean": self.clean,
            "rollouts": self.rollouts,
            "proposals": self.proposals,
            "failed": self.failed,
        }
        facts = {"rounds": json.dumps(self.rounds), "cost": json.dumps(dict(self.cost))}
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, facts)

    @classmethod
    def load(cls, path: Path) -> ScoreTable:
        """Read what ``save`` wrote, bit for bit. Raises InvalidArgument when it is something else."""
        try:
            with safe_open(path, framework="numpy") as file:
                facts = file.metadata() or {}
                return cls(
                    clean=file.get_tensor("clean"),
                    rollouts=file.get_tensor("rollouts"),
                    proposals=file.get_tensor("proposals"),
                    failed=file.get_tensor("failed"),
                    rounds=json.loads(facts["rounds"]),
                    cost=json.loads(facts["cost"]),
                )
        except (SafetensorError, KeyError) as error:
            raise InvalidArgument(f"{path.name} is not a table of scores: {error}") from None


def _united(arrays: Sequence[Array], growing: int) -> Array:
    """One array of all measured cells; the last ``growing`` axes may differ in length."""
    if len({array.shape[:-growing] for array in arrays}) != 1:
        raise InvalidArgument("tables: they belong to different plans")
    whole = np.full(np.max([array.shape for array in arrays], axis=0), np.nan)
    for array in arrays:
        part = whole[tuple(slice(length) for length in array.shape)]
        measured = ~np.isnan(array)
        if np.any(measured & ~np.isnan(part)):
            raise InvalidArgument("tables: a cell was measured twice")
        part[measured] = array[measured]
    return whole
