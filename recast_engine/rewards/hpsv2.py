"""Human preference, version 2: HPSv2 (Wu et al., arXiv 2306.09341)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine.prompts import Prompt
from recast_engine.rewards.clip import ClipEmbedder


class HPSv2:
    """Cosine in [-1, 1] under a CLIP model fine-tuned on human preferences between images of one prompt."""

    id = "hpsv2"

    def __init__(self, embedder: ClipEmbedder):
        self._embedder = embedder

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Cosines (N,) of ``images`` (N, H, W, 3) with ``prompts`` (N)."""
        return self._embedder.cosines(images, [prompt.prompt for prompt in prompts])
