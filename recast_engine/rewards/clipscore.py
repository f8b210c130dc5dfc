"""How well an image fits its prompt: CLIPScore (Hessel et al., arXiv 2104.08718)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.prompts import Prompt
from recast_engine.rewards.clip import OPENAI_CLIP_L, ClipEmbedder


class ClipScore:
    """Cosine of image and prompt embedding, in [-1, 1]; without the paper's factor 2.5 and its floor at 0."""

    id = "clipscore"

    def __init__(self, embedder: ClipEmbedder):
        self._embedder = embedder

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Cosines (N,) of ``images`` (N, H, W, 3) with ``prompts`` (N)."""
        return self._embedder.cosines(images, [prompt.prompt for prompt in prompts])


def load(world: RewardWorld, device: str) -> ClipScore:
    """With OpenAI's CLIP ViT-L/14. Raises WeightsUnavailable."""
    return ClipScore(ClipEmbedder.load_for("clipscore", world, device, OPENAI_CLIP_L))
