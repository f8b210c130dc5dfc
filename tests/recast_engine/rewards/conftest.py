"""A tiny CLIP of the same classes as the full-size scorers use, with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

CONTEXT = 12
SIZE = 32


def _tokenizer() -> CLIPTokenizer:
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "<|unused|>": 2}
    for character in "abcdefghijklmnopqrstuvwxyz":
        vocabulary[character] = len(vocabulary)
        vocabulary[f"{character}</w>"] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CONTEXT)


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    shared = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = shared | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    vision = shared | {"image_size": SIZE, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, logit_scale_init_value=1.5)
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    ).save_pretrained(folder)
    head = {"weight": torch.linspace(-1, 1, 16)[None], "bias": torch.tensor([5.0])}
    save_file(head, folder / "head.safetensors")
    return folder
