"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

torch.set_num_threads(1)

LONGEST_FIRST = ("e2e", "workers")  # files of minutes, which no process should begin last


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONGEST_FIRST)


def _tokenizer() -> CLIPTokenizer:
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "<|unused|>": 2}
    for character in "abcdefghijklmnopqrstuvwxyz":
        vocabulary[character] = len(vocabulary)
        vocabulary[f"{character}</w>"] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12)


def _text_encoder(tokenizer: CLIPTokenizer, width: int, pooled: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=pooled,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Stable-Diffusion-3 pipeline: 2 layers, 16 x 16 pixels, no third encoder."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    pipeline = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=40,
            caption_projection_dim=32,
            pooled_projection_dim=24,
            pos_embed_max_size=2,
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            latent_channels=4,
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=16,
            scaling_factor=1.5,
            shift_factor=0.1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        ),
        text_encoder=_text_encoder(tokenizer, 24, 16),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(tokenizer, 16, 8),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    folder = tmp_path_factory.mktemp("tiny") / "pipeline"
    pipeline.save_pretrained(folder)
    return folder
