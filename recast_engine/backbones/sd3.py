"""Stable Diffusion 3: any pipeline that diffusers' ``StableDiffusion3Pipeline`` loads, T5 or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from huggingface_hub import hf_hub_download
from numpy.typing import NDArray
from torch import Tensor, nn

from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.catalogue import LORA_TARGETS
from recast_engine.errors import InvalidArgument

CACHE_BYTES = 2 * 2**30
"""Encoded prompts kept at most; the least recently used go first."""

DECODE_PIXELS = 2**21
"""Pixels decoded or encoded at once: 8 images of 512 x 512."""


def _has_third_encoder(source: str, revision: str | None) -> bool:
    folder = Path(source)
    index = folder / "model_index.json"
    if not folder.is_dir():
        index = Path(hf_hub_download(source, index.name, revision=revision, local_files_only=True))
    return '"T5EncoderModel"' in index.read_text(encoding="utf-8")


class SD3Backbone:
    """A :class:`~recast_engine.backbones.base.Backbone` over a diffusers pipeline, without guidance.

    A plain pipeline call with ``guidance_scale=1`` (and ``max_sequence_length=0`` where there is no T5, so
    that no padding tokens are appended) draws the same images as ``sampling.sample`` with the Euler solver.
    """

    lora_targets: tuple[str, ...] = LORA_TARGETS["sd3"]

    def __init__(self, pipeline: Any, *, id: str, resolution: int | None = None) -> None:
        """Wrap a StableDiffusion3Pipeline; ``resolution``: pixels a side, None for the pipeline's own."""
        self.id = id
        self.pipeline: Any = pipeline
        self.transformer: nn.Module = self.pipeline.transformer
        self.device = torch.device(self.pipeline.device)
        self.dtype: torch.dtype = self.pipeline.transformer.dtype
        self.evaluations = 0
        scale = self.pipeline.vae_scale_factor
        size = self.pipeline.default_sample_size if resolution is None else resolution // scale
        self.latent_shape: tuple[int, ...] = (self.pipeline.transformer.config.in_channels, size, size)
        self.resolution = int(size * scale)
        self.max_sequence_length = 0 if self.pipeline.text_encoder_3 is None else 256
        self._encoded: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self._encoded_bytes = 0
        for part in (self.transformer, self.pipeline.vae, *self._text_encoders()):
            part.requires_grad_(False).eval()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        id: str,
        revision: str | None = None,
        resolution: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> SD3Backbone:
        """Load from a local folder, or from the local hub cache (nothing is downloaded)."""
        third = _has_third_encoder(str(source), revision)
        absent: dict[str, Any] = {} if third else {"text_encoder_3": None, "tokenizer_3": None}
        load: Any = StableDiffusion3Pipeline.from_pretrained
        pipeline = load(str(source), revision=revision, torch_dtype=dtype, local_files_only=True, **absent)
        pipeline.set_progress_bar_config(disable=True)
        return cls(pipeline.to(device), id=id, resolution=resolution)

    def _text_encoders(self) -> list[nn.Module]:
        encoders = (self.pipeline.text_encoder, self.pipeline.text_encoder_2, self.pipeline.text_encoder_3)
        return [encoder for encoder in encoders if encoder is not None]

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encodings of ``prompts``, in order, each prompt encoded once and kept; no gradients."""
        wanted = list(dict.fromkeys(prompts))
        missing = [prompt for prompt in wanted if prompt not in self._encoded]
        rows = {prompt: self._encoded[prompt] for prompt in wanted if prompt in self._encoded}
        if missing:
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                missing,
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
            rows.update({prompt: (embeds[k], pooled[k]) for k, prompt in enumerate(missing)})
        for prompt in wanted:
            self._remember(prompt, rows[prompt])
        return Conditioning(
            torch.stack([rows[prompt][0] for prompt in prompts]),
            torch.stack([rows[prompt][1] for prompt in prompts]),
        )

    def _remember(self, prompt: str, encoded: tuple[Tensor, Tensor]) -> None:
        if prompt in self._encoded:
            self._encoded.move_to_end(prompt)
            return
        self._encoded[prompt] = (encoded[0].clone(), encoded[1].clone())
        self._encoded_bytes += encoded[0].nbytes + encoded[1].nbytes
        while self._encoded_bytes > CACHE_BYTES and len(self._encoded) > 1:
            _, (embeds, pooled) = self._encoded.popitem(last=False)
            self._encoded_bytes -= embeds.nbytes + pooled.nbytes

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        """(steps + 1,) float64, descending, last 0: of the pipeline's scheduler, or another ``shift``."""
        overrides = {} if shift is None else {"shift": shift}
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config, **overrides)
        scheduler.set_timesteps(steps)
        levels: Tensor = scheduler.sigmas
        return levels.double()

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

    @torch.no_grad()
    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Clean latents (N, C, h, w) -> uint8 images (N, H, W, 3), as the pipeline gives them."""
        config, processor = self.pipeline.vae.config, self.pipeline.image_processor
        images: list[NDArray[np.uint8]] = []
        for part in torch.split(latents.to(self.device, self.dtype), self._images_at_once()):
            pixels = self.pipeline.vae.decode(part / config.scaling_factor + config.shift_factor).sample
            unit = processor.postprocess(pixels, output_type="np")
            images.append((unit * 255).round().astype(np.uint8))
        return np.concatenate(images)

    @torch.no_grad()
    def encode_images(self, images: NDArray[np.uint8]) -> Tensor:
        """uint8 images (N, H, W, 3) of the model's resolution -> clean latents (N, C, h, w).

        The mean of the autoencoder's posterior, shifted and scaled; pixels 0..255 become -1..1. Raises
        InvalidArgument for images of another shape or type.
        """
        if images.dtype != np.uint8 or images.shape[1:] != (self.resolution, self.resolution, 3):
            raise InvalidArgument(
                f"images: expected uint8 (N, {self.resolution}, {self.resolution}, 3), "
                f"not {images.dtype} {images.shape}"
            )
        config = self.pipeline.vae.config
        latents: list[Tensor] = []
        for part in torch.split(torch.from_numpy(images), self._images_at_once()):
            pixels = part.to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1.0
            mean = self.pipeline.vae.encode(pixels.to(self.dtype)).latent_dist.mode()
            latents.append((mean - config.shift_factor) * config.scaling_factor)
        return torch.cat(latents)

    def _images_at_once(self) -> int:
        return max(1, DECODE_PIXELS // self.resolution**2)
