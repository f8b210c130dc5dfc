"""Quality of the image alone: a linear head on CLIP's image embedding, as LAION's aesthetic predictor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from recast_engine import miniature
from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.clip import OPENAI_CLIP_L, ClipEmbedder
from recast_engine.rewards.settings import weights_folder

HEAD = "head.safetensors"


class Aesthetic:
    """weight . e + bias over the unit image embedding e: about 0 (poor) to 10 (excellent)."""

    id = "aesthetic"

    def __init__(self, embedder: ClipEmbedder, weight: Tensor, bias: Tensor):
        """``weight`` (1, D) and ``bias`` (1,) of the head."""
        self._embedder = embedder
        self._weight = weight.double().reshape(-1)
        self._bias = bias.double().reshape(())

    @classmethod
    def load(cls, embedder: ClipEmbedder, folder: Path) -> Aesthetic:
        """Read the head in ``folder``. Raises WeightsUnavailable when it is not there."""
        path = folder / HEAD
        if not path.is_file():
            raise WeightsUnavailable(f"{HEAD} of the aesthetic reward is missing")
        head = load_file(path)
        return cls(embedder, head["weight"], head["bias"])

    @torch.no_grad()
    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,) of ``images`` (N, H, W, 3); the prompts play no part."""
        scores: NDArray[np.float64] = (
            self._embedder.images(images).double() @ self._weight + self._bias
        ).numpy()
        return scores


def load(world: RewardWorld, device: str) -> Aesthetic:
    """OpenAI's CLIP ViT-L/14 with the converted head. Raises WeightsUnavailable."""
    embedder = ClipEmbedder.load_for("aesthetic", world, device, OPENAI_CLIP_L)
    public = world == "public"
    return Aesthetic.load(
        embedder, weights_folder("aesthetic") if public else miniature.reward_weights("aesthetic")
    )
