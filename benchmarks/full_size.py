"""SD3.5-Medium's architecture with random weights, or the miniature: the engine against the reference.

    python benchmarks/full_size.py [--device cuda] [--size medium|tiny|miniature] [--images 16] [--repeats 3]

Both draw, decode and train on the same images: the same encodings of prompts (random ones where there are no
text encoders), seeds, noise and (image, step) pairs. The engine runs as in a training: bfloat16 weights,
float32 adapters, ``sample``, ``decode`` and ``update_policy``. The *reference pattern* is written out below:
float32 weights under bfloat16 autocast, and for every batch three separate forward passes (old policy,
reference, policy) with adapters that are not merged, as in github.com/NVlabs/DiffusionNFT. On the miniature
it also encodes the prompts of every batch anew, once an image. On the CPU both compute in float32.

Prints one JSON object: images per second, seconds per optimiser step, peak memory and where a training's time
goes, of each, their ratios, and how far the two adapters are apart after plain gradient steps. Batches are
halved, and said to be, until both patterns fit the device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from recast_engine import miniature
from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.load import load_backbone
from recast_engine.backbones.sampling import sample
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import LoRAConfig, OptimizerConfig
from recast_engine.observer import NullObserver
from recast_engine.prompts import parse_prompts
from recast_engine.rewards.base import Scores
from recast_engine.training.adapters import OLD, POLICY, AdapterSet
from recast_engine.training.advantages import optimality
from recast_engine.training.loss import nft_loss
from recast_engine.training.rollouts import Rollouts
from recast_engine.training.update import TimedAdvantages, draw_pairs, update_policy

GROUP = 8
"""Images of a prompt."""

_KINDS = {
    "matrix products": re.compile(r"addmm|::mm|bmm|gemm|cutlass|nvjet|convolution"),
    "attention": re.compile(r"attention|flash|fmha"),
    "optimizer": re.compile(r"^Optimizer|_foreach|_fused"),
}
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Size:
    """An architecture: its transformer's and autoencoder's configs, text tokens, pixels a side."""

    transformer: dict[str, Any]
    autoencoder: dict[str, Any]
    tokens: int
    resolution: int


_AUTOENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}

SIZES: dict[str, Size | None] = {
    "miniature": None,  # real weights and text encoders
    "medium": Size(  # the published config of SD3.5-Medium; 77 tokens of CLIP and 256 of T5
        transformer={
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
        autoencoder={**_AUTOENCODER, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
        tokens=333,
        resolution=512,
    ),
    "tiny": Size(
        transformer={
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        autoencoder={
            **_AUTOENCODER,
            "block_out_channels": (8, 8, 8, 8),
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        tokens=12,
        resolution=64,
    ),
}


def build(size: Size | None, device: torch.device, dtype: torch.dtype) -> SD3Backbone:
    """The architecture with the same random weights every time, whatever ``dtype``; None: the miniature."""
    if size is None:
        backbone = load_backbone("miniature", device=device, dtype=dtype)
        assert isinstance(backbone, SD3Backbone)
        return backbone
    torch.manual_seed(0)
    with device:
        pipeline = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(**size.transformer).to(dtype),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=AutoencoderKL(**size.autoencoder).to(dtype),
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            text_encoder_3=None,
            tokenizer_3=None,
        )
    return SD3Backbone(pipeline, id="random", resolution=size.resolution, device=device)


def random_conditioning(size: Size, prompts: int, device: torch.device, dtype: torch.dtype) -> Conditioning:
    """What text encoders would give, at random."""
    generator = torch.Generator().manual_seed(1)
    width, pooled = size.transformer["joint_attention_dim"], size.transformer["pooled_projection_dim"]
    embeds = torch.randn(prompts, size.tokens, width, generator=generator)
    return Conditioning(
        embeds.to(device, dtype), torch.randn(prompts, pooled, generator=generator).to(device, dtype)
    )


@dataclass(frozen=True)
class EncodedAnew:
    """In place of a Conditioning: nothing is kept, every selection encodes its prompts, once a row."""

    backbone: SD3Backbone
    prompts: list[str]

    def __len__(self) -> int:
        return len(self.prompts)

    @torch.no_grad()
    def select(self, index: Any) -> Conditioning:
        pipeline = self.backbone.pipeline
        embeds, _, pooled, _ = pipeline.encode_prompt(
            [self.prompts[int(row)] for row in index],
            None,
            None,
            device=self.backbone.device,
            do_classifier_free_guidance=False,
            max_sequence_length=0,
        )
        return Conditioning(embeds, pooled)


@dataclass(frozen=True)
class Work:
    """What an epoch does: P groups of ``GROUP`` images, T steps each, two of them trained on."""

    images: int
    steps: int
    sampling_batch: int
    training_batch: int
    optimizer: OptimizerConfig
    scores: np.ndarray

    @classmethod
    def of(cls, images: int, steps: int, sampling_batch: int, training_batch: int) -> Work:
        """One optimiser step a half of the (image, step) pairs, accumulated over batches."""
        pairs = 2 * images
        config = OptimizerConfig(
            batch_size=training_batch,
            accumulation=max(1, pairs // 2 // training_batch),
            timesteps_per_image=2,
            gradient_clip=1e6,
        )
        scores = np.random.default_rng(2).normal(size=(1, images))
        return cls(images, steps, sampling_batch, training_batch, config, scores)

    @property
    def optimizer_steps(self) -> int:
        return -(-2 * self.images // (self.training_batch * self.optimizer.accumulation))


Update = Callable[
    [SD3Backbone, AdapterSet, torch.optim.Optimizer, Rollouts, TimedAdvantages, Tensor, Work], Any
]


def engine_update(
    backbone: SD3Backbone,
    adapters: AdapterSet,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: TimedAdvantages,
    sigmas: Tensor,
    work: Work,
) -> None:
    """The engine's own epoch of gradient steps."""
    generator = torch.Generator().manual_seed(3)
    update_policy(
        backbone,
        adapters,
        optimizer,
        rollouts,
        advantages,
        sigmas,
        work.optimizer,
        step=0,
        generator=generator,
        observer=NullObserver(),
    )


def reference_update(
    backbone: SD3Backbone,
    adapters: AdapterSet,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: TimedAdvantages,
    sigmas: Tensor,
    work: Work,
) -> None:
    """Three forward passes a batch, one after the other, in the order that the reference makes them."""
    config, generator = work.optimizer, torch.Generator().manual_seed(3)
    used = advantages.usable.nonzero()[:, 0]
    pairs = draw_pairs(used, len(sigmas) - 1, config.timesteps_per_image, generator)
    for chunk in torch.split(pairs, config.batch_size * config.accumulation):
        optimizer.zero_grad(set_to_none=True)
        for images, steps in (batch.unbind(1) for batch in torch.split(chunk, config.batch_size)):
            clean = rollouts.latents[images.to(backbone.device)]
            noise = torch.randn(clean.shape, generator=generator).to(clean)
            sigma = sigmas[steps].to(clean)
            noisy = (1 - sigma.view(-1, 1, 1, 1)) * clean + sigma.view(-1, 1, 1, 1) * noise
            conditioning = rollouts.conditioning.select(rollouts.groups[images])
            with torch.no_grad(), adapters.using(OLD):
                old = backbone.velocity(noisy, sigma, conditioning).float()
            with torch.no_grad(), adapters.using(None):
                reference = backbone.velocity(noisy, sigma, conditioning).float()
            with adapters.using(POLICY):
                policy = backbone.velocity(noisy, sigma, conditioning).float()
                loss = nft_loss(
                    clean,
                    noisy,
                    sigma,
                    policy,
                    old,
                    optimality(advantages.at(images, steps), config.advantage_clip).to(clean),
                    beta=config.beta,
                    advantage_clip=config.advantage_clip,
                    reference_velocity=reference,
                    kl_weight=config.kl_weight,
                ).total
                (len(images) / len(chunk) * loss).backward()
        torch.nn.utils.clip_grad_norm_(adapters.parameters(POLICY), config.gradient_clip)
        optimizer.step()


class Pattern:
    """One way of computing an epoch: how weights are kept, under what context, with which update."""

    def __init__(self, size: Size | None, device: torch.device, work: Work, *, reference: bool) -> None:
        self.work, self.device = work, device
        low = torch.bfloat16 if device.type == "cuda" else torch.float32
        dtype = torch.float32 if reference else low
        self.update: Update = reference_update if reference else engine_update
        self.autocast = reference and device.type == "cuda"
        self.backbone = build(size, device, dtype)
        self.adapters = AdapterSet(self.backbone, LoRAConfig(), seed=4)
        with torch.no_grad():  # as after some training: the three passes differ
            generator = torch.Generator().manual_seed(5)
            for name, scale in ((OLD, 0.01), (POLICY, 0.02)):
                for key, value in self.adapters.state(name).items():
                    if "lora_B" in key:
                        value.copy_(scale * torch.randn(value.shape, generator=generator))
        self.conditioning: Any
        if size is None:
            lines = miniature.prompt_file("train").read_text(encoding="utf-8")
            prompts = [prompt.prompt for prompt in parse_prompts(lines)[: work.images // GROUP]]
            encode = EncodedAnew if reference else SD3Backbone.encode_prompts
            self.conditioning = encode(self.backbone, prompts)
        else:
            self.conditioning = random_conditioning(size, work.images // GROUP, device, dtype)
        self.groups = torch.arange(work.images) // GROUP
        self.sigmas = self.backbone.sigmas(work.steps)

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def draw(self) -> Tensor:
        """(N, C, h, w) latents by the old policy, decoded too."""
        with self.context(), self.adapters.using(OLD):
            latents = sample(
                self.backbone,
                self.conditioning.select(self.groups),
                range(self.work.images),
                steps=self.work.steps,
                batch_size=self.work.sampling_batch,
            )
            self.backbone.decode(latents)
        return latents.float()

    def train(self, latents: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """One epoch of updates on given latents."""
        scores = Scores(
            ("random",), self.work.scores, np.ones_like(self.work.scores, dtype=bool), np.zeros(1)
        )
        rollouts = Rollouts(latents, self.groups, self.conditioning, scores, None, np.zeros(0), 0.0, 0.0)
        weights = np.ones((1, self.work.steps))
        advantages = TimedAdvantages.of(rollouts, weights, self.work.optimizer)
        with self.context():
            self.update(self.backbone, self.adapters, optimizer, rollouts, advantages, self.sigmas, self.work)

    def gradient_step(self, latents: Tensor) -> Tensor:
        """Changes of the policy by an epoch of plain gradient descent, as one vector; undone afterwards."""
        parameters = self.adapters.parameters(POLICY)
        before = [parameter.detach().clone() for parameter in parameters]
        self.train(latents, torch.optim.SGD(parameters, lr=1e-3))
        changes = [(p.detach() - b).flatten() for p, b in zip(parameters, before, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        return torch.cat(changes).double().cpu()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5", encoding="ascii")  # proc(5): forgets the peak


def _peak_gib(device: torch.device) -> float | None:
    """Since ``_reset_peak``: of the device, or of this process (Linux; elsewhere None)."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    if not _CLEAR.exists():
        return None
    status = _CLEAR.with_name("status").read_text(encoding="ascii")
    return round(int(status.partition("VmHWM:")[2].split()[0]) / 2**20, 2)


def _timed(device: torch.device, action: Callable[[], Any]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def shares_of_time(device: torch.device, action: Callable[[], Any]) -> dict[str, float]:
    """Where the time of ``action`` goes: the share of each kind of operation, by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        action()
    seconds = dict.fromkeys([*_KINDS, "other"], 0.0)
    for operation in profiler.key_averages():
        kind = next((kind for kind, names in _KINDS.items() if names.search(operation.key)), "other")
        on_device = operation.self_device_time_total if device.type == "cuda" else 0.0
        seconds[kind] += on_device or operation.self_cpu_time_total * (device.type == "cpu")
    return {kind: round(value / sum(seconds.values()), 3) for kind, value in seconds.items()}


def measure_pattern(pattern: Pattern, latents: Tensor, repeats: int) -> dict[str, Any]:
    """Medians after one round of warming up, and the largest memory from weights to optimiser states."""
    work, device = pattern.work, pattern.device
    optimizer = torch.optim.AdamW(pattern.adapters.parameters(POLICY), lr=1e-6)
    peaks: dict[str, float | None] = {"sampling": None, "training": None}
    seconds: dict[str, list[float]] = {"sampling": [], "training": []}
    actions = {"sampling": pattern.draw, "training": lambda: pattern.train(latents, optimizer)}
    for name, action in actions.items():
        _reset_peak(device)
        action()
        seconds[name] = [_timed(device, action) for _ in range(repeats)]
        peaks[name] = _peak_gib(device)
    sampling, training = (statistics.median(seconds[name]) for name in ("sampling", "training"))
    return {
        "images_per_second": work.images / (sampling + training),
        "sampled_images_per_second": work.images / sampling,
        "seconds_per_optimizer_step": training / work.optimizer_steps,
        "trained_pairs_per_second": 2 * work.images / training,
        "peak_gib": peaks,
        "shares_of_training_time": shares_of_time(device, actions["training"]),
    }


def measure(size: Size | None, device: torch.device, work: Work, repeats: int) -> dict[str, Any]:
    """Both patterns, one after the other on an otherwise empty device, and their ratios."""
    results: dict[str, Any] = {}
    changes: dict[str, Tensor] = {}
    latents: Tensor | None = None
    for name in ("engine", "reference"):
        pattern = Pattern(size, device, work, reference=name == "reference")
        drawn = pattern.draw()
        latents = drawn if latents is None else latents  # both train on the same images
        changes[name] = pattern.gradient_step(latents)
        results[name] = measure_pattern(pattern, latents, repeats)
        resolution = pattern.backbone.resolution
        del pattern
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    ours, theirs = changes["engine"], changes["reference"]
    assert bool(torch.isfinite(ours).all()), "a gradient is not finite"
    assert float(ours.norm()) > 0, "the adapter did not learn"
    engine, reference = results["engine"], results["reference"]
    rates = ("images_per_second", "sampled_images_per_second", "trained_pairs_per_second")
    return {
        **results,
        "speed_ratio": {rate: engine[rate] / reference[rate] for rate in rates},
        "gradient_difference": float((ours - theirs).norm() / theirs.norm()),
        "images": work.images,
        "steps": work.steps,
        "sampling_batch": work.sampling_batch,
        "training_batch": work.training_batch,
        "resolution": resolution,
    }


def measure_what_fits(
    size: Size | None, device: torch.device, *, images: int, steps: int, training_batch: int, repeats: int
) -> dict[str, Any]:
    """``measure``, with batches halved until both patterns fit the device."""
    sampling_batch, halved = images, 0
    while True:
        work = Work.of(images, steps, sampling_batch, training_batch)
        try:
            return {**measure(size, device, work, repeats), "batches_halved": halved}
        except torch.OutOfMemoryError:
            if training_batch == 1:
                raise
        gc.collect()
        torch.cuda.empty_cache()
        sampling_batch, training_batch, halved = max(1, sampling_batch // 2), training_batch // 2, halved + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--training-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.images % GROUP:
        parser.error(f"--images must be a multiple of {GROUP}")
    report = measure_what_fits(
        SIZES[arguments.size],
        device,
        images=arguments.images,
        steps=arguments.steps,
        training_batch=arguments.training_batch,
        repeats=arguments.repeats,
    )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
