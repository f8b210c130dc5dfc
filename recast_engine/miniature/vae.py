"""The autoencoder of the miniature world: 48 x 48 px RGB <-> 4 x 12 x 12 latents."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray

from recast_engine.miniature import world
from recast_engine.miniature.checkpoint import Trainee, generator, warm_then_decay

SEED = 11
PEAK_RATE = 2e-3
KL_WEIGHT = 2e-4
FULL_SIZE_SHARE = 0.25  # of the steps, at the end; before that 32 px crops, which are twice as fast


def create() -> AutoencoderKL:
    """An untrained f4 autoencoder of about 0.4 M parameters, without attention (fp16-safe)."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 48),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=world.RESOLUTION,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def to_pixels(images: NDArray[np.uint8]) -> torch.Tensor:
    """uint8 [N, H, W, 3] -> float32 [N, 3, H, W] in [-1, 1], channels last."""
    x = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return x.contiguous(memory_format=torch.channels_last)


def to_images(pixels: torch.Tensor) -> NDArray[np.uint8]:
    """float [N, 3, H, W] in [-1, 1] -> uint8 [N, H, W, 3]."""
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return levels.permute(0, 2, 3, 1).contiguous().numpy()


def _loss(model: AutoencoderKL, x: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, float]:
    """L1 + 2 L2 + beta KL per latent value; also the PSNR in dB (peak to peak 2)."""
    posterior = model.encode(x).latent_dist
    y = model.decode(posterior.sample(generator=draw)).sample
    squared = (y - x).square().mean()
    kl = posterior.kl().mean() / posterior.mean[0].numel()
    psnr = 10 * float(torch.log10(4 / squared.detach()))
    return (y - x).abs().mean() + 2 * squared + KL_WEIGHT * kl, psnr


def _batch(images: NDArray[np.uint8], step: int, total: int, draw: torch.Generator) -> torch.Tensor:
    """16 random 32 px crops, or 10 whole images for the last quarter; half of all flipped."""
    whole = step >= (1 - FULL_SIZE_SHARE) * total
    chosen = torch.randint(len(images), (10 if whole else 16,), generator=draw).numpy()
    x = to_pixels(images[chosen])
    if not whole:
        top, left = (4 * torch.randint(5, (2,), generator=draw)).tolist()
        x = x[:, :, top : top + 32, left : left + 32]
    return x.flip(3) if float(torch.rand((), generator=draw)) < 0.5 else x


def train(folder: Path, total: int, images: int = 16_000, save_every: int = 500) -> AutoencoderKL:
    """Train for `total` steps, continuing from `folder`; sets scaling and shift in the config."""
    torch.manual_seed(SEED)
    model = create().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    trainee = Trainee({"vae": model}, optimizer, decay=0.99)
    trainee.restore(folder)
    rng = random.Random(SEED)
    pictures = world.render_many([world.sample_scene(rng) for _ in range(images)], rng)
    while trainee.step < total:
        draw = generator(SEED, trainee.step)
        loss, psnr = _loss(model, _batch(pictures, trainee.step, total, draw), draw)
        trainee.apply(loss, warm_then_decay(trainee.step, total, PEAK_RATE, 100, 0.3))
        if trainee.step % 200 == 0:
            print(f"vae {trainee.step}/{total} loss {loss.item():.4f} psnr {psnr:.2f} dB", flush=True)
        if trainee.step % save_every == 0 or trainee.step == total:
            trainee.save(folder)
    model.load_state_dict(trainee.averaged("vae"))
    latents = _encode_raw(model.eval(), pictures[:1024])
    scale, shift = 1 / latents.std().item(), latents.mean().item()
    model.register_to_config(scaling_factor=scale, shift_factor=shift)
    return model


@torch.inference_mode()
def _encode_raw(model: AutoencoderKL, images: NDArray[np.uint8]) -> torch.Tensor:
    parts = [
        model.encode(to_pixels(images[i : i + 64])).latent_dist.mode() for i in range(0, len(images), 64)
    ]
    return torch.cat(parts).contiguous()


def encode(model: AutoencoderKL, images: NDArray[np.uint8]) -> torch.Tensor:
    """Normalised latents [N, 4, 12, 12] of uint8 images [N, 48, 48, 3]; (z - shift) * scale."""
    scale, shift = float(model.config.scaling_factor), float(model.config.shift_factor)
    return (_encode_raw(model, images) - shift) * scale


@torch.inference_mode()
def decode(model: AutoencoderKL, latents: torch.Tensor) -> NDArray[np.uint8]:
    """Images uint8 [N, 48, 48, 3] of normalised latents [N, 4, 12, 12]."""
    z = latents / model.config.scaling_factor + model.config.shift_factor
    parts = [
        to_images(model.decode(part.contiguous(memory_format=torch.channels_last)).sample)
        for part in z.split(64)
    ]
    return np.concatenate(parts)


def psnr(model: AutoencoderKL, seed: int = 999, images: int = 256) -> float:
    """Reconstruction PSNR in dB over fresh renders (mean squared error over all pixels)."""
    rng = random.Random(seed)
    truth = world.render_many([world.sample_scene(rng) for _ in range(images)], rng)
    error = decode(model, encode(model, truth)).astype(np.float64) - truth
    return float(10 * np.log10(255**2 / np.mean(error**2)))
