"""From open_clip's names of CLIP's weights to ``transformers.CLIPModel``'s.

open_clip (and OpenAI's CLIP before it) fuses queries, keys and values into one ``in_proj``, and stores the
two projections as matrices that are multiplied from the right; transformers keeps three layers, and linear
layers, which are the transpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import CLIPConfig

from recast_engine.errors import ConfigError

_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
_WITHIN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_OUTSIDE = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # spelt so in transformers
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_COMPUTED = {"attn_mask"}  # a buffer, not a weight


@dataclass(frozen=True)
class Architecture:
    """What shapes do not tell. ``activation`` is exact GELU but in OpenAI's own models ("quick_gelu")."""

    vision_head_width: int = 64
    text_head_width: int = 64
    activation: str = "gelu"


VIT_H_14 = Architecture(vision_head_width=80)
"""open_clip's ViT-H-14, which HPSv2 is: vision width 1280 in 16 heads, text width 1024 in 16."""


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` of an open_clip model under the names of ``CLIPModel``. Raises ConfigError."""
    return {
        name: value.contiguous() for key, tensor in weights.items() for name, value in _renamed(key, tensor)
    }


def _renamed(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in _OUTSIDE:
        yield _OUTSIDE[key], tensor
    elif key in _TRANSPOSED:
        yield _TRANSPOSED[key], tensor.T
    elif match := _BLOCK.fullmatch(key):
        tower = "vision_model" if match[1] else "text_model"
        layer, rest = f"{tower}.encoder.layers.{match[2]}", match[3]
        part, _, kind = rest.rpartition(".")
        if rest in ("attn.in_proj_weight", "attn.in_proj_bias"):
            for name, piece in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{layer}.self_attn.{name}_proj.{rest.rpartition('_')[2]}", piece
        elif part in _WITHIN_BLOCK:
            yield f"{layer}.{_WITHIN_BLOCK[part]}.{kind}", tensor
        else:
            raise ConfigError(f"{key!r} is no weight of an open_clip vision transformer")
    elif key not in _COMPUTED:
        raise ConfigError(f"{key!r} is no weight of an open_clip vision transformer")


def config_of(weights: Mapping[str, Tensor], architecture: Architecture) -> CLIPConfig:
    """The ``CLIPConfig`` that fits open_clip ``weights``. Raises ConfigError for what is no such model."""
    try:
        vocabulary, text_width = weights["token_embedding.weight"].shape
        vision_width, _, patch, _ = weights["visual.conv1.weight"].shape
        places = weights["visual.positional_embedding"].shape[0] - 1
        text = {
            "hidden_size": text_width,
            "intermediate_size": weights["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": _layers(weights, "transformer."),
            "num_attention_heads": text_width // architecture.text_head_width,
            "max_position_embeddings": weights["positional_embedding"].shape[0],
            "vocab_size": vocabulary,
            "hidden_act": architecture.activation,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,  # CLIP's vocabulary ends with start and end
            "pad_token_id": vocabulary - 1,
        }
        vision = {
            "hidden_size": vision_width,
            "intermediate_size": weights["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
            "num_hidden_layers": _layers(weights, "visual.transformer."),
            "num_attention_heads": vision_width // architecture.vision_head_width,
            "image_size": math.isqrt(places) * patch,
            "patch_size": patch,
            "hidden_act": architecture.activation,
        }
        projection = weights["text_projection"].shape[1]
    except KeyError as error:
        raise ConfigError(f"the checkpoint is no open_clip vision transformer: it has no {error}") from None
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection)


def _layers(weights: Mapping[str, Tensor], prefix: str) -> int:
    return sum(key.startswith(prefix) and key.endswith(".ln_1.weight") for key in weights)
