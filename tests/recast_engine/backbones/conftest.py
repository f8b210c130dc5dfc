"""Tiny random pipelines of FLUX.1 and Qwen-Image, with the published schedulers, saved in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _clip_tokenizer() -> CLIPTokenizer:
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1, "<|unused|>": 2}
    for character in LETTERS:
        vocabulary[character] = len(vocabulary)
        vocabulary[f"{character}</w>"] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12)


def _flux() -> FluxPipeline:
    clip = _clip_tokenizer()
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *((c, -2.0) for c in LETTERS)]
    t5 = T5TokenizerFast(vocab=pieces, extra_ids=0)
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=20,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        ),
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=64,
            scaling_factor=1.3,
            shift_factor=0.2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        ),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip),
                hidden_size=20,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=clip.model_max_length,
                bos_token_id=clip.bos_token_id,
                eos_token_id=clip.eos_token_id,
                pad_token_id=clip.pad_token_id,
            )
        ),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=len(t5), d_model=24, d_kv=8, d_ff=48, num_layers=2, num_heads=2)
        ),
        tokenizer_2=t5,
    )


def _qwen_image() -> QwenImagePipeline:
    special = {name: index for index, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = special | {character: index + len(special) for index, character in enumerate(alphabet)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=list(special)[1:])
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3], "rope_type": "default"},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
    )
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[-0.7, 0.1, 0.4, 1.5],
            latents_std=[2.8, 1.4, 2.3, 0.9],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random FLUX.1 pipeline: 2 + 2 layers, 8 pixels to a latent, with guidance embedding."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("tiny") / "flux"
    _flux().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen-Image pipeline: 2 layers, 8 pixels to a latent."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("tiny") / "qwen"
    _qwen_image().save_pretrained(folder)
    return folder
