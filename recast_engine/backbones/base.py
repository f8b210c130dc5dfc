"""The Protocol that every model family implements, and the prompt encodings it hands around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row each; what a family has no use for is None.

    Attributes:
        embeds: (N, L, D) token embeddings.
        pooled: (N, P) pooled embeddings.
        mask: (N, L) bool, true for tokens and false for the padding behind them; None where every row is L
            tokens long.
    """

    embeds: Tensor
    pooled: Tensor | None = None
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.embeds)

    def select(self, index: Tensor | Sequence[int]) -> Conditioning:
        """Rows ``index`` (repeats allowed), without padding that none of them needs."""
        index = torch.as_tensor(index, device=self.embeds.device)
        pooled = None if self.pooled is None else self.pooled[index]
        if self.mask is None:
            return Conditioning(self.embeds[index], pooled)
        mask = self.mask[index]
        mask = mask[:, : int(mask.sum(1).max())]
        embeds = self.embeds[index, : mask.shape[1]]
        return Conditioning(embeds, pooled, None if bool(mask.all()) else mask)


class Backbone(Protocol):
    """A flow-matching text-to-image model: x_sigma = (1 - sigma) x0 + sigma eps, v = eps - x0.

    No family uses classifier-free guidance: training and evaluation are of the model as it stands.
    """

    id: str
    transformer: nn.Module
    device: torch.device
    dtype: torch.dtype
    latent_shape: tuple[int, ...]  # (C, h, w) of one image
    resolution: int  # pixels a side of its images
    lora_targets: tuple[str, ...]  # module-name suffixes that LoRA attaches to
    evaluations: int  # velocities computed so far, counted per image

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encodings of ``prompts``, in order; no gradients.

        A prompt's encoding does not depend on the prompts beside it. Encodings are kept, and the text
        encoders are on the device only while prompts are encoded that are not among those.
        """

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        """(steps + 1,) float64, descending from the noisiest level to 0: the sampler's noise levels.

        ``shift`` s takes an evenly spaced level u to s u / (1 + (s - 1) u); None: the model's own.
        """

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v(x_sigma, sigma | prompt): latents (N, C, h, w), sigma (N,) in [0, 1] -> (N, C, h, w)."""

    def decode(self, latents: Tensor) -> np.ndarray:
        """Clean latents (N, C, h, w) -> uint8 images (N, H, W, 3), a few at a time."""

    def encode_images(self, images: np.ndarray) -> Tensor:
        """uint8 images (N, H, W, 3) of the model's resolution -> clean latents (N, C, h, w).

        The autoencoder's mean, scaled as the model expects it: ``decode`` inverts it up to the autoencoder's
        own loss. No gradients. Raises InvalidArgument for images of another shape or type.
        """
