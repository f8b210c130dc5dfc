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
    """Encoded prompts, one row each.

    Attributes:
        embeds: (N, L, D) token embeddings.
        pooled: (N, P) pooled embeddings.
    """

    embeds: Tensor
    pooled: Tensor

    def __len__(self) -> int:
        return len(self.embeds)

    def select(self, index: Tensor | Sequence[int]) -> Conditioning:
        """Rows ``index`` (repeats allowed)."""
        index = torch.as_tensor(index, device=self.embeds.device)
        return Conditioning(self.embeds[index], self.pooled[index])


class Backbone(Protocol):
    """A flow-matching text-to-image model: x_sigma = (1 - sigma) x0 + sigma eps, v = eps - x0."""

    id: str
    transformer: nn.Module
    device: torch.device
    dtype: torch.dtype
    latent_shape: tuple[int, ...]  # (C, h, w) of one image
    resolution: int  # pixels a side of its images
    lora_targets: tuple[str, ...]  # module-name suffixes that LoRA attaches to
    evaluations: int  # velocities computed so far, counted per image

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encodings of ``prompts``, in order; no gradients."""

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        """(steps + 1,) float64, descending from the noisiest level to 0: the sampler's noise levels."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v(x_sigma, sigma | prompt): latents (N, C, h, w), sigma (N,) in [0, 1] -> (N, C, h, w)."""

    def decode(self, latents: Tensor) -> np.ndarray:
        """Clean latents (N, C, h, w) -> uint8 images (N, H, W, 3)."""

    def encode_images(self, images: np.ndarray) -> Tensor:
        """uint8 images (N, H, W, 3) of the model's resolution -> clean latents (N, C, h, w).

        The autoencoder's mean, scaled as the model expects it: ``decode`` inverts it up to the autoencoder's
        own loss. No gradients. Raises InvalidArgument for images of another shape or type.
        """
