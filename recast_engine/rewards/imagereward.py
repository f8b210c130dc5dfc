"""Human preference by BLIP: ImageReward (Xu et al., arXiv 2304.05977).

BLIP's text encoder reads the prompt while attending to the image; what it makes of the first token goes
through a head of linear layers without anything between them, which is one linear map, and is standardised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.settings import weights_folder

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the raw score, published with the checkpoint."""
TOKENS = 35
"""Prompt length in tokens; longer prompts are cut there, as published."""
BATCH = 32
HEAD_WIDTH = 64  # of every attention head, in both towers

_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "norm.": "post_layernorm.",
}
_VISION_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_BLIP_VISION, _BLIP_TEXT = "blip.visual_encoder.", "blip.text_encoder."


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published weights as ``vision.*`` of BlipVisionModel and ``text.*`` of BlipTextModel.

    The text encoder's names are the same in both; what the reward does not use (BLIP's two projections, and
    buffers of positions) is dropped.

    Raises:
        ConfigError: a weight of the vision encoder that this does not know.
    """
    renamed: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        if key.startswith(_BLIP_VISION):
            renamed[f"vision.{_vision_name(key.removeprefix(_BLIP_VISION))}"] = tensor.contiguous()
        elif key.startswith(_BLIP_TEXT) and not key.endswith("position_ids"):
            renamed[f"text.{key.removeprefix(_BLIP_TEXT)}"] = tensor.contiguous()
    return renamed


def _vision_name(key: str) -> str:
    if key.startswith("blocks."):
        _, layer, rest = key.split(".", 2)
        part, _, kind = rest.rpartition(".")
        if part in _VISION_BLOCK:
            return f"encoder.layers.{layer}.{_VISION_BLOCK[part]}.{kind}"
    for old, new in _VISION.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return new + key.removeprefix(old)
    raise ConfigError(f"{key!r} is no weight of BLIP's vision encoder")


def configs_of(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """``vision`` and ``text``: keyword arguments of BlipVisionConfig and BlipTextConfig, from the shapes.

    Raises:
        ConfigError: the checkpoint is not ImageReward's.
    """
    try:
        width, _, patch, _ = weights[f"{_BLIP_VISION}patch_embed.proj.weight"].shape
        places = weights[f"{_BLIP_VISION}pos_embed"].shape[1] - 1
        words, text_width = weights[f"{_BLIP_TEXT}embeddings.word_embeddings.weight"].shape
        vision = {
            "hidden_size": width,
            "intermediate_size": weights[f"{_BLIP_VISION}blocks.0.mlp.fc1.weight"].shape[0],
            "num_hidden_layers": _layers(weights, _BLIP_VISION, ".norm1.weight"),
            "num_attention_heads": width // HEAD_WIDTH,
            "image_size": math.isqrt(places) * patch,
            "patch_size": patch,
            "layer_norm_eps": 1e-6,
        }
        text = {
            "hidden_size": text_width,
            "encoder_hidden_size": width,
            "intermediate_size": weights[f"{_BLIP_TEXT}encoder.layer.0.intermediate.dense.weight"].shape[0],
            "num_hidden_layers": _layers(weights, _BLIP_TEXT, ".intermediate.dense.weight"),
            "num_attention_heads": text_width // HEAD_WIDTH,
            "max_position_embeddings": weights[f"{_BLIP_TEXT}embeddings.position_embeddings.weight"].shape[0],
            "vocab_size": words,
            "is_decoder": True,  # gives the layers their cross-attention; they still read both ways
        }
    except KeyError as error:
        raise ConfigError(f"the checkpoint is not ImageReward's: it has no {error}") from None
    return {"vision": vision, "text": text}


def _layers(weights: Mapping[str, Tensor], prefix: str, end: str) -> int:
    return sum(key.startswith(prefix) and key.endswith(end) for key in weights)


class ImageReward:
    """About -2 (poor) to 2 (excellent), mean 0 and deviation 1 over the published training data."""

    id = "imagereward"

    def __init__(self, vision: Any, text: Any, head: tuple[Tensor, Tensor], tokenizer: Any, device: str):
        """``head``: weight (1, D) and bias (1,). The models are moved to ``device`` and frozen."""
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self._vision = vision.eval().requires_grad_(False).to(device)
        self._text = text.eval().requires_grad_(False).to(device)
        self._weight, self._bias = head[0].double().reshape(-1), head[1].double().reshape(())
        self._tokenizer, self._device = tokenizer, device
        side = vision.config.image_size  # resized and normalised as CLIP does
        self._processor = CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )

    @classmethod
    def load(cls, folder: Path, device: str) -> ImageReward:
        """Read what ``recast rewards convert imagereward`` wrote. Raises WeightsUnavailable."""
        from transformers import BertTokenizer, BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        try:
            config = json.loads((folder / "config.json").read_text("utf-8"))
            weights = load_file(folder / "model.safetensors")
            tokenizer = BertTokenizer.from_pretrained(folder, local_files_only=True)
            vision = BlipVisionModel(BlipVisionConfig(**config["vision"]))
            text = BlipTextModel(BlipTextConfig(**config["text"]), add_pooling_layer=False)
            for name, model in (("vision.", vision), ("text.", text)):
                own = {k.removeprefix(name): v for k, v in weights.items() if k.startswith(name)}
                model.load_state_dict(own)
            if len(tokenizer) < config["text"]["vocab_size"] - 2:  # BLIP has two words more than BERT
                raise OSError("the tokenizer is missing")
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise WeightsUnavailable(
                f"weights of imagereward are incomplete ({type(error).__name__}): "
                "run recast rewards convert imagereward FILE again"
            ) from error
        return cls(vision, text, (weights["head.weight"], weights["head.bias"]), tokenizer, device)

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,) of ``images`` (N, H, W, 3) for ``prompts`` (N)."""
        parts = [
            self._batch(images[start : start + BATCH], prompts[start : start + BATCH])
            for start in range(0, len(images), BATCH)
        ]
        return np.concatenate(parts)

    @torch.no_grad()
    def _batch(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        pixels = self._processor(images=list(images), return_tensors="pt", input_data_format="channels_last")[
            "pixel_values"
        ]
        tokens = self._tokenizer(
            [prompt.prompt for prompt in prompts],
            padding="max_length",
            max_length=TOKENS,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        seen = self._vision(pixel_values=pixels.to(self._device)).last_hidden_state
        read = self._text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
        ).last_hidden_state[:, 0]
        raw = read.double().cpu() @ self._weight + self._bias
        scores: NDArray[np.float64] = ((raw - MEAN) / STD).numpy()
        return scores


def load(world: RewardWorld, device: str) -> ImageReward:
    """With the converted weights. Raises WeightsUnavailable."""
    return ImageReward.load(weights_folder("imagereward"), device)
