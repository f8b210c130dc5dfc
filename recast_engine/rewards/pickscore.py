"""Human preference from Pick-a-Pic: PickScore (Kirstain et al., arXiv 2305.01569)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError
from recast_engine.prompts import Prompt
from recast_engine.rewards.clip import ClipEmbedder


class PickScore:
    """The preference model's logit: its learned scale (at most 100) times the cosine.

    ``divisor`` brings the published checkpoint's logits near 1 (26 in Flow-GRPO); a constant factor
    changes no advantage, so the default leaves the logit as it is. The operator's file sets it:
    ``[options.pickscore]`` ``divisor = 26``.
    """

    id = "pickscore"

    def __init__(self, embedder: ClipEmbedder, *, divisor: float = 1.0):
        self._embedder = embedder
        self._factor = embedder.logit_scale / divisor

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Logits (N,) of ``images`` (N, H, W, 3) with ``prompts`` (N)."""
        return self._factor * self._embedder.cosines(images, [prompt.prompt for prompt in prompts])


def load(world: RewardWorld, device: str, *, divisor: float = 1.0) -> PickScore:
    """With the published weights. Raises WeightsUnavailable, ConfigError for a bad divisor."""
    if not 0 < divisor < math.inf:
        raise ConfigError(f"options.pickscore.divisor must be positive, got {divisor}")
    embedder = ClipEmbedder.load_for("pickscore", world, device, "yuvalkirstain/PickScore_v1")
    return PickScore(embedder, divisor=divisor)
