"""The Protocol of a reward and the result of scoring a batch with several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from recast_engine.errors import RewardFailure
from recast_engine.prompts import Prompt

RELATIVE_NOISE = 1e-6
"""Scores are computed in float32 (7 digits): differences below this share of their magnitude are rounding,
not preference."""


def spread(scores: NDArray[np.float64]) -> float:
    """Population standard deviation of the finite ones of ``scores`` (any shape); 0 for none.

    0 too for one that is no more than rounding, as that of a constant such as 0.1 is.
    """
    finite = scores[np.isfinite(scores)]
    if not finite.size:
        return 0.0
    deviation = float(finite.std())
    return deviation if deviation > RELATIVE_NOISE * float(np.abs(finite).max()) else 0.0


class PartialFailure(RewardFailure):
    """Some images of a batch could not be scored: ``values`` (N,) has NaN for them, the text says why."""

    def __init__(self, values: NDArray[np.float64], reason: str):
        super().__init__(reason)
        self.values = values

    def __reduce__(self) -> tuple[type[PartialFailure], tuple[NDArray[np.float64], str]]:
        return type(self), (self.values, str(self))


class Reward(Protocol):
    """Scores (image, prompt) pairs; higher is better."""

    id: str

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores of ``images`` (N, H, W, 3) against ``prompts`` (N): (N,) float64, NaN where scoring failed.

        Only called with prompts that carry the metadata the reward needs, and never twice at the same time.
        May have an attribute ``lane``: "device" (the default; takes turns on the device), "cpu", or "remote"
        (waits for another machine). Rewards of different lanes work side by side.
        """


@dataclass(frozen=True)
class Scores:
    """Scores of R rewards on N images.

    Attributes:
        rewards: the R reward ids, in row order.
        values: (R, N) float64; NaN where the reward does not apply or failed.
        applicable: (R, N) bool; False where the prompt lacks the metadata that the reward needs.
        seconds: (R,) wall seconds per reward.
        errors: R texts: why scores of a reward failed, "" where none did; empty where nobody kept them.
    """

    rewards: tuple[str, ...]
    values: NDArray[np.float64]
    applicable: NDArray[np.bool_]
    seconds: NDArray[np.float64]
    errors: tuple[str, ...] = ()

    @property
    def failed(self) -> NDArray[np.bool_]:
        """(R, N) True where a reward applied but gave no finite score."""
        return self.applicable & ~np.isfinite(self.values)
