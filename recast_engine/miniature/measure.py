"""Measures the shipped weights: quality, speed and size, as stored in `weights/card.json`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from numpy.typing import NDArray

from recast_engine.miniature import (
    PIPELINE,
    REWARDS,
    WEIGHTS,
    architecture,
    evaluate,
    reward_weights,
    vae,
    world,
)
from recast_engine.miniature import rewards as judges
from recast_engine.miniature.architecture import Flow
from recast_engine.miniature.detector import MiniatureDetector

SAMPLING_STEPS = 10


def flow_of(pipeline: StableDiffusion3Pipeline) -> Flow:
    """The networks of a loaded pipeline."""
    return Flow(pipeline.tokenizer, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer)


def _seconds(work: Callable[[], object]) -> float:
    """Wall time of a second call; the first warms up."""
    work()
    start = time.perf_counter()
    work()
    return round(time.perf_counter() - start, 3)


def _quality(
    pipeline: StableDiffusion3Pipeline, per_kind: int
) -> tuple[dict[str, Any], list[world.Scene], Any]:
    """Scores at 10 steps without guidance, and the scenes and images they come from."""
    scenes = evaluate.balanced_scenes(per_kind, seed=2024)
    captions = [scene.caption for scene in scenes]
    draw = torch.Generator().manual_seed(7)
    images = vae.decode(pipeline.vae, architecture.sample(flow_of(pipeline), captions, draw, SAMPLING_STEPS))
    return {kind: asdict(score) for kind, score in evaluate.judge(scenes, images).items()}, scenes, images


def _timings(pipeline: StableDiffusion3Pipeline, images: int = 128) -> dict[str, float]:
    """Seconds per 128 images of every part of a reinforcement-learning epoch, with torch's threads."""
    flow = flow_of(pipeline)
    scenes = evaluate.balanced_scenes(images // len(world.KIND_WEIGHTS), seed=3)
    captions = [scene.caption for scene in scenes]
    latents = architecture.sample(flow, captions, torch.Generator().manual_seed(0))
    pictures = vae.decode(pipeline.vae, latents)
    detector = MiniatureDetector()
    clip, head = judges.load(reward_weights("clipscore"))
    return {
        "threads": torch.get_num_threads(),
        "sample_10_steps": _seconds(lambda: architecture.sample(flow, captions, torch.Generator())),
        "decode": _seconds(lambda: vae.decode(pipeline.vae, latents)),
        "detect": _seconds(lambda: [detector(picture) for picture in pictures]),
        "read_words": _seconds(lambda: evaluate.read_words(pictures)),
        "clip_score": _seconds(lambda: judges.scores(clip, head, pictures, captions)),
    }


def _agreement(scenes: list[world.Scene], own: torch.Tensor, strict: torch.Tensor) -> float:
    """How often a model image that meets all demands outscores one of its kind that does not (AUC)."""
    wins, pairs = 0.0, 0
    for kind in world.KIND_WEIGHTS:
        mine = torch.tensor([scene.kind == kind for scene in scenes])
        right, wrong = own[mine & strict], own[mine & ~strict]
        wins += float((right[:, None] > wrong[None]).sum())
        pairs += len(right) * len(wrong)
    return wins / max(pairs, 1)


def _rewards(scenes: list[world.Scene], images: NDArray[np.uint8]) -> dict[str, dict[str, float]]:
    """Every judge on fresh renders, and on the model's own images beside renders of the same scenes."""
    captions = [scene.caption for scene in scenes]
    strict = torch.tensor([score.strict == 1 for score in evaluate.score_each(scenes, images)])
    renders = world.render_many(scenes, random.Random(99))
    figures = {}
    for name in REWARDS:
        model, head = judges.load(reward_weights(name))
        own = judges.scores(model, head, images, captions)
        clean = judges.scores(model, head, renders, captions)
        figures[name] = judges.validate(name, model, head) | {
            "pair_accuracy_model_sample": float((clean > own).float().mean()),
            "agreement_with_strict": _agreement(scenes, own, strict),
            "mean_render": float(clean.mean()),
            "mean_model_sample": float(own.mean()),
            "deviation_model_sample": float(own.std()),
        }
    return figures


def measure(per_kind: int = 128) -> dict[str, Any]:
    """All figures of the weights in the package."""
    pipeline = architecture.load_pipeline(PIPELINE)
    quality, scenes, images = _quality(pipeline, per_kind)
    sizes = [path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()]
    return {
        "autoencoder_psnr_db": round(vae.psnr(pipeline.vae), 2),
        "parameters": {
            name: sum(p.numel() for p in module.parameters())
            for name, module in (flow_of(pipeline).modules | {"vae": pipeline.vae}).items()
        },
        "samples_at_10_steps_without_guidance": quality,
        "rewards": _rewards(scenes, images),
        "seconds_per_128_images": _timings(pipeline),
        "megabytes": round(sum(sizes) / 1e6, 2),
    }
