"""FLUX.1: any pipeline that diffusers' ``FluxPipeline`` loads."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor

from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.pipeline import Encoded, PipelineBackbone, dynamic_sigmas, pack, unpack

T5_TOKENS = 512
"""Tokens of the T5 encoder, padding included: the pipeline's own default."""

GUIDANCE = 3.5
"""FLUX.1-dev was distilled to take a guidance strength as an input; this is the pipeline's own default. It is
one more constant of the model: there is no second, unconditional forward pass."""


class FluxBackbone(PipelineBackbone):
    """FLUX.1.

    A plain pipeline call with the same ``guidance_scale`` draws the same images as ``sampling.sample`` with
    the Euler solver. Latents are handed around as images (N, C, h, w) and packed into tokens only for the
    transformer.
    """

    family = "flux"
    pipeline_class = FluxPipeline
    text_encoders = ("text_encoder", "text_encoder_2")

    def __init__(self, pipeline: Any, *, guidance: float = GUIDANCE, **options: Any) -> None:
        """``guidance``: value of the guidance embedding; no effect on models without one (FLUX.1-schnell)."""
        super().__init__(pipeline, **options)
        self.guidance = guidance

    def _latent_shape(self, resolution: int | None) -> tuple[int, ...]:
        side = self._latent_side(resolution, 2)
        return (self.pipeline.transformer.config.in_channels // 4, side, side)

    def _encode(self, prompt: str) -> Encoded:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            [prompt], device=self.device, max_sequence_length=T5_TOKENS
        )
        return embeds[0], pooled[0]

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        """(steps + 1,) float64, descending, last 0; the model's own shift grows with the resolution."""
        tokens = (self.latent_shape[1] // 2) * (self.latent_shape[2] // 2)
        return dynamic_sigmas(self.pipeline.scheduler, steps, shift, tokens)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v(x_sigma, sigma | prompt): latents (N, C, h, w), sigma (N,) in [0, 1] -> (N, C, h, w)."""
        self.evaluations += len(latents)
        height, width = latents.shape[-2:]
        guidance = None
        if self.pipeline.transformer.config.guidance_embeds:
            guidance = torch.full([len(latents)], self.guidance, device=self.device)
        # rounded as the pipeline rounds it, so that low precision sees the same noise level
        timestep = (sigma.to(self.device, torch.float32) * 1000).to(self.dtype) / 1000
        tokens: Tensor = self.transformer(
            hidden_states=pack(latents.to(self.device, self.dtype)),
            timestep=timestep,
            guidance=guidance,
            pooled_projections=conditioning.pooled,
            encoder_hidden_states=conditioning.embeds,
            txt_ids=torch.zeros(conditioning.embeds.shape[1], 3, device=self.device, dtype=self.dtype),
            img_ids=self._positions(height // 2, width // 2),
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def _positions(self, height: int, width: int) -> Tensor:
        """(height * width, 3): every image token's row and column in columns 1 and 2."""
        rows, columns = torch.arange(height), torch.arange(width)
        places = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), rows, columns)
        return places.to(self.device, self.dtype)
