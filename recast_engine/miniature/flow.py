"""Flow-matching pretraining of the miniature's transformer together with its text encoders."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from recast_engine.miniature import architecture, vae, world
from recast_engine.miniature.architecture import Flow
from recast_engine.miniature.checkpoint import Trainee, generator, warm_then_decay, write_json

SEED = 23


@dataclass(frozen=True)
class FlowBudget:
    """Pretraining schedule; everything is counted in steps, so that a run can be repeated."""

    steps: int
    batch: int = 64
    images: int = 48_000
    peak_rate: float = 1e-3
    warmup: int = 200
    hold: float = 1.0
    caption_dropout: float = 0.05
    average: float = 0.999
    save_every: int = 500


def dataset(autoencoder: AutoencoderKL, images: int, cache: Path) -> tuple[torch.Tensor, list[str]]:
    """Latents [images, 4, 12, 12] and captions of fresh renders; encoded once, then read from `cache`."""
    rng = random.Random(SEED)
    scenes = [world.sample_scene(rng) for _ in range(images)]
    if cache.exists():
        return load_file(cache)["latents"], [scene.caption for scene in scenes]
    parts = [
        vae.encode(autoencoder, world.render_many(scenes[i : i + 512], rng)) for i in range(0, images, 512)
    ]
    latents = torch.cat(parts)
    cache.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latents": latents}, cache)
    return latents, [scene.caption for scene in scenes]


def loss(
    flow: Flow, x0: torch.Tensor, ids: torch.Tensor, blank: torch.Tensor, drop: float, draw: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the velocity, E |v(x_sigma, sigma, c) - (eps - x0)|^2.

    x_sigma = (1 - sigma) x0 + sigma eps, sigma logit-normal (SD3, arXiv 2403.03206, section 3.1);
    a share `drop` of captions is replaced by the empty one, ids `blank` [1, 14].
    """
    sigma = torch.sigmoid(torch.randn(len(x0), generator=draw) + 0.2)
    noise = torch.randn(x0.shape, generator=draw)
    level = sigma[:, None, None, None]
    dropped = torch.rand(len(x0), generator=draw) < drop
    text = architecture.encode(flow, torch.where(dropped[:, None], blank, ids))
    predicted = architecture.velocity(flow, (1 - level) * x0 + level * noise, sigma, text)
    return (predicted - (noise - x0)).square().mean()


def _trainee(flow: Flow, budget: FlowBudget) -> Trainee:
    parameters = [p for module in flow.modules.values() for p in module.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=budget.peak_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    return Trainee(flow.modules, optimizer, decay=budget.average)


def averaged(trainee: Trainee) -> Flow:
    """Fresh networks holding the averaged weights, for sampling and export."""
    result = architecture.create_flow(SEED)
    for name, module in result.modules.items():
        module.load_state_dict(trainee.averaged(name))
        module.eval().requires_grad_(False)
    return result


def load_averaged(folder: Path, budget: FlowBudget) -> Flow:
    """The averaged networks of the checkpoint in `folder`. Raises FileNotFoundError without one."""
    trainee = _trainee(architecture.create_flow(SEED), budget)
    if not trainee.restore(folder):
        raise FileNotFoundError(f"no flow checkpoint in {folder}")
    return averaged(trainee)


class _Log:
    """Running mean of the loss, and seconds spent over all calls; kept in `progress.json`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "progress.json"
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.loss: float | None = known.get("loss")
        self.earlier: float = known.get("seconds", 0.0)
        self.started = time.monotonic()

    def add(self, value: float) -> None:
        self.loss = value if self.loss is None else 0.99 * self.loss + 0.01 * value

    def save(self, step: int, batch: int) -> None:
        seconds = self.earlier + time.monotonic() - self.started
        figures = {"step": step, "images_seen": step * batch, "loss": self.loss, "seconds": round(seconds)}
        write_json(self.path, figures)


def train(
    autoencoder: AutoencoderKL,
    folder: Path,
    budget: FlowBudget,
    watch: Callable[[Flow, int], None] = lambda flow, step: None,
    watch_every: int = 0,
    stop_at: int | None = None,
) -> Flow:
    """Train up to `budget.steps` (or `stop_at`), continuing from `folder`; the averaged networks.

    `watch` sees the averaged networks every `watch_every` steps. A continued run may have another
    total: the learning rate depends on the step and the total alone.
    """
    flow = architecture.create_flow(SEED)
    trainee = _trainee(flow, budget)
    trainee.restore(folder)
    latents, captions = dataset(autoencoder, budget.images, folder / f"latents-{budget.images}.safetensors")
    ids = architecture.tokenize(flow.tokenizer, captions)
    blank = architecture.tokenize(flow.tokenizer, [""])
    log = _Log(folder)
    end = budget.steps if stop_at is None else min(budget.steps, stop_at)
    while trainee.step < end:
        draw = generator(SEED, trainee.step)
        chosen = torch.randint(len(latents), (budget.batch,), generator=draw)
        value = loss(flow, latents[chosen], ids[chosen], blank, budget.caption_dropout, draw)
        rate = warm_then_decay(trainee.step, budget.steps, budget.peak_rate, budget.warmup, budget.hold)
        trainee.apply(value, rate)
        log.add(value.item())
        if trainee.step % 100 == 0:
            print(f"flow {trainee.step}/{budget.steps} loss {log.loss:.4f} rate {rate:.1e}", flush=True)
        if trainee.step % budget.save_every == 0 or trainee.step == end:
            trainee.save(folder)
            log.save(trainee.step, budget.batch)
        if watch_every and trainee.step % watch_every == 0:
            watch(averaged(trainee), trainee.step)
    return averaged(trainee)
