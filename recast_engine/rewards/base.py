"""The Protocol of a reward and the result of scoring a batch with several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from recast_engine.prompts import Prompt


class Reward(Protocol):
    """Scores (image, prompt) pairs; higher is better."""

    id: str

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores of ``images`` (N, H, W, 3) against ``prompts`` (N): (N,) float64, NaN where scoring failed.

        Only called with prompts that carry the metadata the reward needs.
        """


@dataclass(frozen=True)
class Scores:
    """Scores of R rewards on N images.

    Attributes:
        rewards: the R reward ids, in row order.
        values: (R, N) float64; NaN where the reward does not apply or failed.
        applicable: (R, N) bool; False where the prompt lacks the metadata that the reward needs.
        seconds: (R,) wall seconds per reward.
    """

    rewards: tuple[str, ...]
    values: NDArray[np.float64]
    applicable: NDArray[np.bool_]
    seconds: NDArray[np.float64]

    @property
    def failed(self) -> NDArray[np.bool_]:
        """(R, N) True where a reward applied but gave no finite score."""
        return self.applicable & ~np.isfinite(self.values)
