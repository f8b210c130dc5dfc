"""CLIP embeddings of images and prompts, shared by every scorer built on ``transformers.CLIPModel``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recast_engine import miniature, progress_bars
from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import WeightsUnavailable

OPENAI_CLIP_L = "openai/clip-vit-large-patch14"
"""The CLIP of CLIPScore, of the aesthetic head and of GenEval's colours."""
BATCH = 64
"""Images embedded at once."""
CACHED_TEXTS = 50_000
"""Text embeddings kept; the cache starts again beyond that."""


class ClipEmbedder:
    """L2-normalised CLIP embeddings, without gradients, in float32 whatever the weights' precision.

    Prompts longer than the text encoder's context (77 tokens in CLIP) are truncated there.
    """

    def __init__(self, model: Any, image_processor: Any, tokenizer: Any, *, device: str = "cpu"):
        self.model = model.eval().requires_grad_(False).to(device)
        self._image_processor = image_processor
        self._tokenizer = tokenizer
        self._device = torch.device(device)
        self._context = int(model.config.text_config.max_position_embeddings)
        self._texts: dict[str, Tensor] = {}

    @classmethod
    def load(
        cls, source: str | Path, *, revision: str | None = None, device: str = "cpu", remedy: str = ""
    ) -> ClipEmbedder:
        """Load a folder or a hub repository that is in the local cache; safetensors only, no download.

        Raises:
            WeightsUnavailable: the folder or the cached snapshot is missing or incomplete; the text ends
                with ``remedy``.
        """
        from transformers import CLIPModel, CLIPTokenizer
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        where: dict[str, Any] = {"revision": revision, "local_files_only": True}
        try:
            with progress_bars.hidden():
                model = CLIPModel.from_pretrained(
                    source, **where, dtype=_precision(device), use_safetensors=True, trust_remote_code=False
                )
            image_processor = CLIPImageProcessorPil.from_pretrained(source, **where)
            tokenizer = CLIPTokenizer.from_pretrained(source, **where)
            if len(tokenizer) < model.config.text_config.vocab_size:  # made empty where its files are missing
                raise OSError("the tokenizer is missing or another model's")
        except (OSError, ValueError) as error:
            raise WeightsUnavailable(
                f"weights of {Path(source).name} are incomplete ({type(error).__name__}): "
                f"{remedy or f'run hf download {source}'}"
            ) from error
        return cls(model, image_processor, tokenizer, device=device)

    @classmethod
    def load_for(cls, reward: str, world: RewardWorld, device: str, repository: str) -> ClipEmbedder:
        """The packaged judge ``reward`` of the miniature's world, or the public checkpoint ``repository``."""
        if world == "miniature":
            folder = miniature.reward_weights(reward)
            return cls.load(folder, device=device, remedy="run python -m recast_engine.miniature.build")
        return cls.load(repository, revision="main", device=device)

    @property
    def logit_scale(self) -> float:
        """The factor that CLIP learned for its cosines (exp of the stored parameter)."""
        return float(self.model.logit_scale.float().exp())

    @torch.no_grad()
    def images(self, images: NDArray[np.uint8]) -> Tensor:
        """Unit embeddings (N, D) float32 on the CPU of RGB images (N, H, W, 3)."""
        rows = []
        for start in range(0, len(images), BATCH):
            chunk = list(images[start : start + BATCH])
            pixels = self._image_processor(
                images=chunk, return_tensors="pt", input_data_format="channels_last"
            )
            pixel_values = pixels["pixel_values"].to(self._device, self.model.dtype)
            rows.append(_unit(self.model.get_image_features(pixel_values=pixel_values)))
        return torch.cat(rows)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Unit embeddings (N, D) float32 on the CPU of ``texts``; each text is encoded once and kept.

        Each is encoded alone, so that its embedding depends, to the last bit, on nothing asked before.
        """
        if len(self._texts) > CACHED_TEXTS:
            self._texts.clear()
        for text in dict.fromkeys(texts):
            if text not in self._texts:
                self._texts[text] = self._embed(text)
        return torch.stack([self._texts[text] for text in texts])

    def _embed(self, text: str) -> Tensor:
        tokens = self._tokenizer(
            [text], padding="max_length", max_length=self._context, truncation=True, return_tensors="pt"
        )
        features = self.model.get_text_features(
            input_ids=tokens["input_ids"].to(self._device),
            attention_mask=tokens["attention_mask"].to(self._device),
        )
        return _unit(features)[0]

    def cosines(self, images: NDArray[np.uint8], texts: Sequence[str]) -> NDArray[np.float64]:
        """Cosine (N,) of each image with its text."""
        similarity: NDArray[np.float64] = (
            (self.images(images).double() * self.texts(texts).double()).sum(dim=-1).numpy()
        )
        return similarity


def _precision(device: str) -> torch.dtype:
    return torch.float16 if torch.device(device).type == "cuda" else torch.float32


def _unit(features: Any) -> Tensor:
    """Normalised projected features; transformers 5 wraps them in an output object."""
    projected = features if isinstance(features, Tensor) else features.pooler_output
    return functional.normalize(projected.float(), dim=-1).cpu()
