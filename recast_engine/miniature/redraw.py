"""Images as the base model would have drawn them: what real judges were trained to tell apart.

HPSv2 and PickScore learnt from people comparing generated images. Here a clean render is noised part
of the way and denoised by the base model: the further, the more of the model's own faults it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray

from recast_engine.miniature import architecture, vae
from recast_engine.miniature.architecture import Flow

_BATCH = 128


@dataclass(frozen=True)
class Redrawer:
    """The base model as a way to spoil images."""

    flow: Flow
    autoencoder: AutoencoderKL

    @torch.inference_mode()
    def __call__(
        self,
        images: NDArray[np.uint8],
        captions: Sequence[str],
        sigma: NDArray[np.float32],
        steps: int,
        draw: torch.Generator,
    ) -> NDArray[np.uint8]:
        """Images [N, 48, 48, 3] noised to sigma [N] in [0, 1] and denoised in `steps` Euler steps."""
        parts = []
        for start in range(0, len(images), _BATCH):
            chosen = slice(start, start + _BATCH)
            x0 = vae.encode(self.autoencoder, images[chosen])
            level = torch.from_numpy(sigma[chosen])
            text = architecture.encode(
                self.flow, architecture.tokenize(self.flow.tokenizer, captions[chosen])
            )
            spread = level[:, None, None, None]
            x = (1 - spread) * x0 + spread * torch.randn(x0.shape, generator=draw)
            for step in range(steps):
                v = architecture.velocity(self.flow, x, level * (1 - step / steps), text)
                x = x - spread / steps * v
            parts.append(vae.decode(self.autoencoder, x))
        return np.concatenate(parts)
