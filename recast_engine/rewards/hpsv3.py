"""Human preference by a vision-language model: HPSv3 (Ma et al., arXiv 2508.03789) on Qwen2-VL-7B.

The model reads image, instruction and prompt; the hidden state at a token ``<|Reward|>`` goes through a small
head that gives mean and logarithm of deviation of the preference. The mean is the score. The head's two
ReLU layers and the positions (counted one by one, image tokens included) are the published model's.

The instruction it was trained with belongs to the checkpoint, not to this project: the conversion takes it as
a text file with ``{text_prompt}`` and ``<|Reward|>`` in it and keeps it beside the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from recast_engine import progress_bars
from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.settings import weights_folder

REWARD_TOKEN = "<|Reward|>"
PLACE = "{text_prompt}"
BATCH = 8
PIXELS = 256 * 28 * 28
"""Every image is resized to about this many pixels, as published."""
HEAD_LAYERS = ("0", "3", "5")  # of the published Sequential: linear layers with ReLU (and dropout) between

_CONTROL = re.compile(r"<\|[^|<>]*\|>")  # a prompt must not bring tokens of its own
_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|>{image}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen2-VL's chat format."""


def to_transformers(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The published weights as ``Qwen2VLModel``'s, and the head's; the language head is not needed.

    Raises:
        ConfigError: the checkpoint has no reward head.
    """
    model: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        if key.startswith("rm_head."):
            head[key.removeprefix("rm_head.")] = tensor.float().contiguous()
        elif key.startswith(("visual.", "model.visual.")):
            model[key.removeprefix("model.")] = tensor
        elif key.startswith("model."):
            model[f"language_model.{key.removeprefix('model.').removeprefix('language_model.')}"] = tensor
    if sorted(head) != sorted(f"{layer}.{kind}" for layer in HEAD_LAYERS for kind in ("weight", "bias")):
        raise ConfigError("the checkpoint is not HPSv3's: its reward head is missing or another")
    return model, head


def check_instruction(text: str) -> str:
    """Raises ConfigError for an instruction without the prompt's place or the one reward token."""
    if PLACE not in text or text.count(REWARD_TOKEN) != 1:
        raise ConfigError(f"instruction: it must hold {PLACE} and one {REWARD_TOKEN}")
    return text


class HPSv3:
    """The mean preference: about 0 (poor) to 12 or more (excellent)."""

    id = "hpsv3"

    def __init__(
        self,
        model: Any,
        head: Mapping[str, Tensor],
        tokenizer: Any,
        instruction: str,
        *,
        device: str = "cpu",
        pixels: int = PIXELS,
    ):
        """``model`` is a Qwen2VLModel; ``head`` its layers by the names in the checkpoint."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._model = model.eval().requires_grad_(False).to(device)
        self._head = [
            (head[f"{layer}.weight"].float().to(device), head[f"{layer}.bias"].float().to(device))
            for layer in HEAD_LAYERS
        ]
        self._tokenizer, self._device = tokenizer, device
        self._instruction = check_instruction(instruction)
        self._processor = Qwen2VLImageProcessorPil(size={"shortest_edge": pixels, "longest_edge": pixels})
        self._reward_token = tokenizer.convert_tokens_to_ids(REWARD_TOKEN)

    @classmethod
    def load(cls, folder: Path, device: str) -> HPSv3:
        """Read what ``recast rewards convert hpsv3`` wrote. Raises WeightsUnavailable."""
        from transformers import Qwen2Tokenizer, Qwen2VLModel

        precision = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        try:
            with progress_bars.hidden():
                model = Qwen2VLModel.from_pretrained(
                    folder, local_files_only=True, use_safetensors=True, dtype=precision
                )
            tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
            if REWARD_TOKEN not in tokenizer.get_vocab():
                raise OSError("the tokenizer is missing")
            instruction = (folder / "instruction.txt").read_text("utf-8")
            head = load_file(folder / "head.safetensors")
        except (OSError, ValueError) as error:
            raise WeightsUnavailable(
                f"weights of hpsv3 are incomplete ({type(error).__name__}): "
                "run recast rewards convert hpsv3 FILE --instruction FILE again"
            ) from error
        return cls(model, head, tokenizer, instruction, device=device)

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,) of ``images`` (N, H, W, 3) for ``prompts`` (N)."""
        parts = [
            self._batch(images[start : start + BATCH], prompts[start : start + BATCH])
            for start in range(0, len(images), BATCH)
        ]
        return np.concatenate(parts)

    @torch.no_grad()
    def _batch(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        pixels = self._processor(images=list(images), return_tensors="pt", input_data_format="channels_last")
        grid = pixels["image_grid_thw"]
        merged = self._model.visual.spatial_merge_size**2
        texts = [
            self._text(prompt.prompt, int(size) // merged)
            for prompt, size in zip(prompts, grid.prod(-1), strict=True)
        ]
        tokens = self._tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(
            self._device
        )
        ids = tokens["input_ids"]
        embeds = self._model.get_input_embeddings()(ids)
        seen = self._model.get_image_features(
            pixels["pixel_values"].to(self._device), grid.to(self._device)
        ).pooler_output
        mask = (ids == self._model.config.image_token_id)[..., None]
        embeds = embeds.masked_scatter(mask, torch.cat(list(seen)).to(embeds))
        hidden = self._model.language_model(
            inputs_embeds=embeds, attention_mask=tokens["attention_mask"], use_cache=False
        ).last_hidden_state
        values = self._apply_head(hidden[ids == self._reward_token].float())
        scores: NDArray[np.float64] = values[:, 0].double().cpu().numpy()
        return scores

    def _text(self, prompt: str, image_tokens: int) -> str:
        question = self._instruction.replace(PLACE, _CONTROL.sub("", prompt))
        return _CHAT.format(image="<|image_pad|>" * image_tokens, text="{text}").replace("{text}", question)

    def _apply_head(self, hidden: Tensor) -> Tensor:
        for place, (weight, bias) in enumerate(self._head):
            hidden = functional.linear(hidden.relu() if place else hidden, weight, bias)
        return hidden


def load(world: RewardWorld, device: str) -> HPSv3:
    """With the converted weights. Raises WeightsUnavailable."""
    return HPSv3.load(weights_folder("hpsv3"), device)
