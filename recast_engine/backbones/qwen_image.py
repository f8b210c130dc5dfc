"""Qwen-Image: any pipeline that diffusers' ``QwenImagePipeline`` loads."""

from __future__ import annotations

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.pipeline import Encoded, PipelineBackbone, dynamic_sigmas, pack, unpack

PROMPT_TOKENS = 512
"""Tokens of a prompt at most: the pipeline's own default."""


class QwenImageBackbone(PipelineBackbone):
    """Qwen-Image.

    A plain pipeline call with ``true_cfg_scale=1`` draws the same images as ``sampling.sample`` with the
    Euler solver. The pipeline puts a prompt into its chat template and drops the template's tokens from the
    encoding; prompts differ in length, so a batch of them carries a mask. The autoencoder is a video one: an
    image is its first frame.
    """

    family = "qwen_image"
    pipeline_class = QwenImagePipeline
    text_encoders = ("text_encoder",)

    def _latent_shape(self, resolution: int | None) -> tuple[int, ...]:
        side = self._latent_side(resolution, 2)
        return (self.pipeline.transformer.config.in_channels // 4, side, side)

    def _encode(self, prompt: str) -> Encoded:
        embeds, _ = self.pipeline.encode_prompt(
            [prompt], device=self.device, max_sequence_length=PROMPT_TOKENS
        )
        return embeds[0], None

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        """(steps + 1,) float64, descending, last 0; the model's own shift grows with the resolution."""
        tokens = (self.latent_shape[1] // 2) * (self.latent_shape[2] // 2)
        return dynamic_sigmas(self.pipeline.scheduler, steps, shift, tokens)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v(x_sigma, sigma | prompt): latents (N, C, h, w), sigma (N,) in [0, 1] -> (N, C, h, w)."""
        self.evaluations += len(latents)
        height, width = latents.shape[-2:]
        # rounded as the pipeline rounds it, so that low precision sees the same noise level
        timestep = (sigma.to(self.device, torch.float32) * 1000).to(self.dtype) / 1000
        tokens: Tensor = self.transformer(
            hidden_states=pack(latents.to(self.device, self.dtype)),
            timestep=timestep,
            encoder_hidden_states=conditioning.embeds,
            encoder_hidden_states_mask=conditioning.mask,
            img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def _decode(self, latents: Tensor) -> Tensor:
        mean, std = self._latent_statistics(latents)
        pixels: Tensor = self.vae.decode((latents * std + mean)[:, :, None]).sample
        return pixels[:, :, 0]

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        latents: Tensor = self.vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
        mean, std = self._latent_statistics(latents)
        return (latents - mean) / std

    def _latent_statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the autoencoder's channels, (C, 1, 1) each."""
        config = self.vae.config
        mean, std = (torch.tensor(values).to(latents) for values in (config.latents_mean, config.latents_std))
        return mean[:, None, None], std[:, None, None]
