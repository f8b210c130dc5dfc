"""The miniature's networks: the architecture of Stable Diffusion 3, in a few million parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from recast_engine.miniature import tokenizer as tokens

LATENT_CHANNELS = 4
LATENT_SIZE = 12
WIDTH, HEADS, LAYERS, PATCH = 192, 6, 4, 2
TEXT_WIDTHS = (128, 32)
POOLED_WIDTHS = (96, 32)
SHIFT = 1.0


@dataclass(frozen=True)
class Flow:
    """What flow matching trains jointly: two text encoders and the transformer, with the tokenizer."""

    tokenizer: CLIPTokenizer
    text_encoder: CLIPTextModelWithProjection
    text_encoder_2: CLIPTextModelWithProjection
    transformer: SD3Transformer2DModel

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {
            "text_encoder": self.text_encoder,
            "text_encoder_2": self.text_encoder_2,
            "transformer": self.transformer,
        }


def _text_encoder(
    tokenizer: CLIPTokenizer, width: int, pooled: int, layers: int, heads: int
) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        projection_dim=pooled,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_act="gelu",
    )
    return CLIPTextModelWithProjection(config)


def create_flow(seed: int) -> Flow:
    """Untrained networks. The joint dimension is the sum of both text widths, so nothing is padded."""
    torch.manual_seed(seed)
    tokenizer = tokens.create()
    transformer = SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=sum(TEXT_WIDTHS),
        caption_projection_dim=WIDTH,
        pooled_projection_dim=sum(POOLED_WIDTHS),
        pos_embed_max_size=LATENT_SIZE // PATCH,
        qk_norm="rms_norm",
    )
    return Flow(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(tokenizer, TEXT_WIDTHS[0], POOLED_WIDTHS[0], layers=3, heads=4),
        text_encoder_2=_text_encoder(tokenizer, TEXT_WIDTHS[1], POOLED_WIDTHS[1], layers=2, heads=2),
        transformer=transformer,
    )


def tokenize(tokenizer: CLIPTokenizer, captions: Sequence[str]) -> torch.Tensor:
    """Token ids int64 [N, 14], padded as `StableDiffusion3Pipeline` pads them."""
    batch = tokenizer(
        list(captions),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    )
    ids: torch.Tensor = batch.input_ids
    return ids


def encode(flow: Flow, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt embeddings [N, 14, 160] and pooled embeddings [N, 128] of token ids [N, 14].

    Equal to `StableDiffusion3Pipeline.encode_prompt(..., max_sequence_length=0)` without a third
    encoder: the last hidden states but one, and the projected end-token states, side by side.
    """
    first = flow.text_encoder(ids, output_hidden_states=True)
    second = flow.text_encoder_2(ids, output_hidden_states=True)
    sequence = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
    return sequence, torch.cat([first.text_embeds, second.text_embeds], dim=-1)


def velocity(
    flow: Flow, x: torch.Tensor, sigma: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """v [N, 4, 12, 12] = eps - x0 predicted at latents x [N, 4, 12, 12], noise levels sigma [N]."""
    sequence, pooled = text
    predicted: torch.Tensor = flow.transformer(
        hidden_states=x,
        encoder_hidden_states=sequence,
        pooled_projections=pooled,
        timestep=sigma * 1000,
        return_dict=False,
    )[0]
    return predicted


def sigmas(steps: int, shift: float = SHIFT) -> torch.Tensor:
    """Noise levels [steps + 1] from 1 to 0, as diffusers' scheduler and pipeline set them.

    The scheduler spaces sigma evenly between its extremes and then shifts:
    s' = shift * s / (1 + (shift - 1) * s).
    """
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)
    scheduler.set_timesteps(steps)
    levels: torch.Tensor = scheduler.sigmas
    return levels


@torch.inference_mode()
def sample(
    flow: Flow, captions: Sequence[str], draw: torch.Generator, steps: int = 10, shift: float = SHIFT
) -> torch.Tensor:
    """Euler ODE samples [N, 4, 12, 12] without guidance, from noise drawn with `draw`."""
    text = encode(flow, tokenize(flow.tokenizer, captions))
    x = torch.randn(len(captions), LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE, generator=draw)
    levels = sigmas(steps, shift)
    for high, low in pairwise(levels):
        x = x + (low - high) * velocity(flow, x, high.expand(len(x)), text)
    return x


def pipeline(flow: Flow, vae: AutoencoderKL, shift: float = SHIFT) -> StableDiffusion3Pipeline:
    """The networks as a diffusers pipeline without a third text encoder."""
    return StableDiffusion3Pipeline(
        transformer=flow.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift),
        vae=vae,
        text_encoder=flow.text_encoder,
        tokenizer=flow.tokenizer,
        text_encoder_2=flow.text_encoder_2,
        tokenizer_2=flow.tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def load_pipeline(folder: Path) -> StableDiffusion3Pipeline:
    """A saved pipeline in float32. diffusers wants the absent third encoder named explicitly."""
    load: Any = StableDiffusion3Pipeline.from_pretrained
    pipeline: StableDiffusion3Pipeline = load(
        folder, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    return pipeline
