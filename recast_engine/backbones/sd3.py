"""Stable Diffusion 3: any pipeline that diffusers' ``StableDiffusion3Pipeline`` loads, T5 or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from huggingface_hub import hf_hub_download
from torch import Tensor

from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.pipeline import Encoded, PipelineBackbone

T5_TOKENS = 256
"""Tokens of the third encoder, padding included: the pipeline's own default."""


class SD3Backbone(PipelineBackbone):
    """Stable Diffusion 3.

    A plain pipeline call with ``guidance_scale=1`` (and ``max_sequence_length=0`` where there is no T5, so
    that no padding tokens are appended) draws the same images as ``sampling.sample`` with the Euler solver.
    """

    family = "sd3"
    pipeline_class = StableDiffusion3Pipeline
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")

    @classmethod
    def _absent_parts(cls, source: str, revision: str | None) -> dict[str, Any]:
        index = Path(source) / "model_index.json"
        if not Path(source).is_dir():
            index = Path(hf_hub_download(source, index.name, revision=revision, local_files_only=True))
        if '"T5EncoderModel"' in index.read_text(encoding="utf-8"):
            return {}
        return {"text_encoder_3": None, "tokenizer_3": None}

    def _latent_shape(self, resolution: int | None) -> tuple[int, ...]:
        config = self.pipeline.transformer.config
        side = self._latent_side(resolution, config.patch_size)
        return (config.in_channels, side, side)

    def _encode(self, prompt: str) -> Encoded:
        tokens = 0 if self.pipeline.text_encoder_3 is None else T5_TOKENS
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            [prompt],
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=tokens,
        )
        return embeds[0], pooled[0]

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        """(steps + 1,) float64, descending, last 0: of the pipeline's scheduler, or another ``shift``."""
        overrides = {} if shift is None else {"shift": shift}
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config, **overrides)
        scheduler.set_timesteps(steps)
        levels: Tensor = scheduler.sigmas.double()
        levels[0] = 1.0  # pure noise; for small shifts the scheduler's float32 puts it above
        return levels

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v(x_sigma, sigma | prompt): latents (N, C, h, w), sigma (N,) in [0, 1] -> (N, C, h, w)."""
        self.evaluations += len(latents)
        timestep = sigma.to(self.device, torch.float32) * self.pipeline.scheduler.config.num_train_timesteps
        output: Tensor = self.transformer(
            hidden_states=latents.to(self.device, self.dtype),
            timestep=timestep,
            encoder_hidden_states=conditioning.embeds,
            pooled_projections=conditioning.pooled,
            return_dict=False,
        )[0]
        return output
