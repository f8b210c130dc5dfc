"""How well an image compresses: a reward whose right answer everyone can see, to find faults in a set-up."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.prompts import Prompt

QUALITY = 95


class JpegSize:
    """Minus the size in kilobytes (1000 bytes) of the image as JPEG at quality 95 (DDPO, arXiv 2305.13301).

    Smaller files are better, so training makes images smooth. It needs no weights and no prompt.
    """

    id = "jpeg_size"
    lane = "cpu"

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,), negative, of ``images`` (N, H, W, 3); the prompts play no part."""
        sizes = []
        for image in images:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
            sizes.append(-buffer.tell() / 1000)
        return np.array(sizes)


def load(world: RewardWorld, device: str) -> JpegSize:
    """Nothing to load."""
    return JpegSize()
