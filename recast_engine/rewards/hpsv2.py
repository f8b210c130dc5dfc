"""Human preference, version 2: HPSv2 (Wu et al., arXiv 2306.09341)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine import miniature
from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.prompts import Prompt
from recast_engine.rewards.clip import ClipEmbedder
from recast_engine.rewards.settings import weights_folder

PUBLISHED = "HPS_v2.1_compressed.pt of xswu/HPSv2"


class HPSv2:
    """Cosine in [-1, 1] under a CLIP model fine-tuned on human preferences between images of one prompt.

    The published scorer fits the *longer* side to the model's 224 px and fills the rest with black; CLIP
    crops. An image that is not square is therefore filled up to a square first.
    """

    id = "hpsv2"

    def __init__(self, embedder: ClipEmbedder):
        self._embedder = embedder

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Cosines (N,) of ``images`` (N, H, W, 3) with ``prompts`` (N)."""
        return self._embedder.cosines(squared(images), [prompt.prompt for prompt in prompts])


def squared(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images (N, H, W, 3) centred on a black square of side max(H, W)."""
    height, width = images.shape[1:3]
    if height == width:
        return images
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    rows, columns = (top, side - height - top), (left, side - width - left)
    return np.pad(images, ((0, 0), rows, columns, (0, 0)))


def load(world: RewardWorld, device: str) -> HPSv2:
    """With the converted HPSv2.1 weights. Raises WeightsUnavailable."""
    if world == "miniature":
        folder, remedy = miniature.reward_weights("hpsv2"), "run python -m recast_engine.miniature.build"
    else:
        folder, remedy = weights_folder("hpsv2"), "run recast rewards convert hpsv2 FILE again"
    return HPSv2(ClipEmbedder.load(folder, device=device, remedy=remedy))
