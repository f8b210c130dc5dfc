"""What the families share: a diffusers pipeline, its prompt cache, its image autoencoder.

A family's file says how its pipeline encodes prompts, spaces noise levels, calls its transformer and scales
its latents; everything else is here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from recast_engine import progress_bars
from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.catalogue import FAMILIES, Family
from recast_engine.errors import ConfigError, InvalidArgument

CACHE_BYTES = 4 * 2**30
"""Encoded prompts kept at most, in the host's memory; the least recently used go first."""

DECODE_PIXELS = 2**21
"""Pixels decoded or encoded at once: 8 images of 512 x 512."""

Encoded = tuple[Tensor, Tensor | None]
"""One prompt: (L, D) token embeddings, and a (P,) pooled embedding where the family has one."""


class PipelineBackbone:
    """A :class:`~recast_engine.backbones.base.Backbone` over a diffusers pipeline, without guidance."""

    family: ClassVar[Family]
    pipeline_class: ClassVar[Any]
    text_encoders: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        pipeline: Any,
        *,
        id: str,
        resolution: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Wrap a pipeline.

        Args:
            resolution: pixels a side; None for the pipeline's own.
            device: of the transformer and the autoencoder; None for where the pipeline is.

        Raises:
            ConfigError: the resolution does not divide into the model's patches.
        """
        self.id = id
        self.pipeline: Any = pipeline
        self.device = torch.device(device or pipeline.device)
        self.transformer: nn.Module = pipeline.transformer.to(self.device)
        self.vae: Any = pipeline.vae.to(self.device)
        self.vae.disable_tiling()  # its seams would be scored, and trained on
        self.dtype: torch.dtype = pipeline.transformer.dtype
        self.evaluations = 0
        self.latent_shape: tuple[int, ...] = self._latent_shape(resolution)
        self.resolution = int(self.latent_shape[-1] * pipeline.vae_scale_factor)
        self.lora_targets = FAMILIES[self.family].lora_targets
        encoders = [getattr(pipeline, name) for name in self.text_encoders]
        self._encoders: list[nn.Module] = [encoder for encoder in encoders if encoder is not None]
        self._prompts = PromptCache()
        for part in (self.transformer, self.vae, *self._encoders):
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
        **options: Any,
    ) -> Any:
        """Load from a local folder, or from the local hub cache (nothing is downloaded).

        ``options`` go to the family's ``__init__``. Raises OSError when files are missing.
        """
        load: Any = cls.pipeline_class.from_pretrained
        absent = cls._absent_parts(str(source), revision)
        with progress_bars.hidden():
            pipeline = load(str(source), revision=revision, dtype=dtype, local_files_only=True, **absent)
        pipeline.set_progress_bar_config(disable=True)
        return cls(pipeline, id=id, resolution=resolution, device=device, **options)

    @classmethod
    def _absent_parts(cls, source: str, revision: str | None) -> dict[str, Any]:
        """Parts that this copy of the model was saved without, as arguments of ``from_pretrained``."""
        return {}

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encodings of ``prompts``, in order, each prompt encoded once, on its own, and kept."""
        wanted = dict.fromkeys(prompts)
        known = {prompt: row for prompt in wanted if (row := self._prompts.get(prompt)) is not None}
        missing = [prompt for prompt in wanted if prompt not in known]
        if missing:
            with torch.no_grad(), resident(self._encoders, self.device):
                # one at a time: beside others, padding and batched kernels would change the last bits
                known.update({prompt: self._encode(prompt) for prompt in missing})
        for prompt in missing:
            self._prompts.add(prompt, known[prompt])
        return self._conditioning([known[prompt] for prompt in prompts])

    def _conditioning(self, rows: Sequence[Encoded]) -> Conditioning:
        embeds = [row[0].to(self.device) for row in rows]
        pooled = [row[1].to(self.device) for row in rows if row[1] is not None]
        lengths = torch.tensor([len(row) for row in embeds], device=self.device)
        longest = int(lengths.max())
        mask = None
        if int(lengths.min()) < longest:
            mask = torch.arange(longest, device=self.device) < lengths[:, None]
        return Conditioning(
            pad_sequence(embeds, batch_first=True), torch.stack(pooled) if pooled else None, mask
        )

    @torch.no_grad()
    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Clean latents (N, C, h, w) -> uint8 images (N, H, W, 3), as the pipeline gives them."""
        images: list[NDArray[np.uint8]] = []
        for part in torch.split(latents.to(self.device, self.dtype), self._images_at_once()):
            unit = self.pipeline.image_processor.postprocess(self._decode(part), output_type="np")
            images.append((unit * 255).round().astype(np.uint8))
        return np.concatenate(images)

    @torch.no_grad()
    def encode_images(self, images: NDArray[np.uint8]) -> Tensor:
        """uint8 images (N, H, W, 3) of the model's resolution -> clean latents (N, C, h, w).

        The mean of the autoencoder's posterior, scaled as the model expects it; pixels 0..255 become -1..1.
        Raises InvalidArgument for images of another shape or type.
        """
        if images.dtype != np.uint8 or images.shape[1:] != (self.resolution, self.resolution, 3):
            raise InvalidArgument(
                f"images: expected uint8 (N, {self.resolution}, {self.resolution}, 3), "
                f"not {images.dtype} {images.shape}"
            )
        latents: list[Tensor] = []
        for part in torch.split(torch.from_numpy(images), self._images_at_once()):
            pixels = part.to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1.0
            latents.append(self._encode_pixels(pixels.to(self.dtype)))
        return torch.cat(latents)

    def _images_at_once(self) -> int:
        return max(1, DECODE_PIXELS // self.resolution**2)

    def _latent_side(self, resolution: int | None, patch: int) -> int:
        scale = int(self.pipeline.vae_scale_factor)
        if resolution is None:
            return int(self.pipeline.default_sample_size)
        if resolution % (scale * patch):
            raise ConfigError(f"resolution: {resolution} is no multiple of {scale * patch}")
        return resolution // scale

    # -- what a family says ------------------------------------------------------------------

    def _latent_shape(self, resolution: int | None) -> tuple[int, ...]:
        raise NotImplementedError

    def _encode(self, prompt: str) -> Encoded:
        raise NotImplementedError

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        """(steps + 1,) float64, descending, last 0: of the pipeline's scheduler, or another ``shift``."""
        raise NotImplementedError

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v(x_sigma, sigma | prompt): latents (N, C, h, w), sigma (N,) in [0, 1] -> (N, C, h, w)."""
        raise NotImplementedError

    def _decode(self, latents: Tensor) -> Tensor:
        """Latents (N, C, h, w) -> pixels (N, 3, H, W), about -1 to 1."""
        config = self.vae.config
        pixels: Tensor = self.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
        return pixels

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        """The inverse of ``_decode``, up to the autoencoder's own loss."""
        config = self.vae.config
        mean = self.vae.encode(pixels).latent_dist.mode()
        latents: Tensor = (mean - config.shift_factor) * config.scaling_factor
        return latents


class PromptCache:
    """Encoded prompts in the host's memory, bounded by ``CACHE_BYTES``."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, Encoded] = OrderedDict()
        self._bytes = 0

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._rows

    def get(self, prompt: str) -> Encoded | None:
        """The prompt's encoding, now the most recently used one; None if it is not kept."""
        if prompt not in self._rows:
            return None
        self._rows.move_to_end(prompt)
        return self._rows[prompt]

    def add(self, prompt: str, row: Encoded) -> None:
        """Keep the encoding of a prompt that is not kept yet."""
        embeds, pooled = row
        self._rows[prompt] = (embeds.cpu().clone(), None if pooled is None else pooled.cpu().clone())
        self._bytes += _size(row)
        while self._bytes > CACHE_BYTES and len(self._rows) > 1:
            self._bytes -= _size(self._rows.popitem(last=False)[1])


def _size(row: Encoded) -> int:
    return row[0].nbytes + (0 if row[1] is None else row[1].nbytes)


@contextmanager
def resident(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Frozen ``modules`` on ``device`` inside the block, back where they were after it.

    The weights where they came from stay there meanwhile, so that going back copies nothing.
    """
    tensors = [tensor for module in modules for tensor in chain(module.parameters(), module.buffers())]
    home = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, data in zip(tensors, home, strict=True):
            tensor.data = data


def pack(latents: Tensor) -> Tensor:
    """(N, C, h, w) -> (N, h/2 w/2, 4 C): each 2 x 2 patch a token, as FLUX and Qwen-Image take them."""
    count, channels, height, width = latents.shape
    patches = latents.reshape(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(count, (height // 2) * (width // 2), 4 * channels)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of ``pack`` for latents of ``height`` x ``width``."""
    patches = tokens.reshape(len(tokens), height // 2, width // 2, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(len(tokens), -1, height, width)


def dynamic_sigmas(scheduler: Any, steps: int, shift: float | None, tokens: int) -> Tensor:
    """Noise levels as the FLUX and Qwen-Image pipelines ask their scheduler for them: (steps + 1,) float64.

    The levels 1, 1 - 1/steps, ... 1/steps are shifted by an amount that grows with the number of image
    ``tokens``, unless ``shift`` is given.
    """
    config = scheduler.config
    if steps == 1:  # stretching to a terminal level would divide by the zero distance between first and last
        return torch.tensor([1.0, 0.0], dtype=torch.float64)
    exponential = config.time_shift_type == "exponential"
    if shift is None:
        fewest, most = config.base_image_seq_len, config.max_image_seq_len
        slope = (config.max_shift - config.base_shift) / (most - fewest)
        mu = config.base_shift + slope * (tokens - fewest)
    else:
        mu = np.log(shift) if exponential else shift
    static = {} if shift is None or config.use_dynamic_shifting else {"shift": shift}
    fresh = type(scheduler).from_config(config, **static)
    fresh.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    levels: Tensor = fresh.sigmas
    return levels.double()
