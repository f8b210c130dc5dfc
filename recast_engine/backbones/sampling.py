"""Drawing images from a flow-matching model: ODE solvers, and a stochastic posterior sampler.

Notation: x_sigma = (1 - sigma) x0 + sigma eps, v = eps - x0, hence x0 = x_sigma - sigma v. Every image has a
generator of its own, so each can be drawn again alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from recast_engine.backbones.base import Backbone, Conditioning
from recast_engine.observer import Observer, Stopped

Solver = Literal["euler", "ab2", "dpm2"]

_ROLLOUT_SALT = 0x9E3779B9  # the generator keeps 32 bits of a seed; this one flips about half of them
_CURVE_POINTS = 1000


def initial_noise(backbone: Backbone, seeds: Sequence[int]) -> Tensor:
    """(N, C, h, w) standard normal, each image from its own CPU generator.

    Exactly what a diffusers pipeline draws when it is given ``[torch.Generator().manual_seed(s) for s in
    seeds]``.
    """
    draws = [
        torch.randn(
            (1, *backbone.latent_shape),
            generator=torch.Generator("cpu").manual_seed(seed),
            dtype=backbone.dtype,
        )
        for seed in seeds
    ]
    return torch.cat(draws).to(backbone.device)


@torch.no_grad()
def sample(
    backbone: Backbone,
    conditioning: Conditioning,
    seeds: Sequence[int],
    *,
    steps: int,
    solver: Solver = "ab2",
    shift: float | None = None,
    batch_size: int = 64,
    observer: Observer | None = None,
) -> Tensor:
    """Clean latents (N, C, h, w): the probability-flow ODE dx/dsigma = v from noise to sigma = 0.

    Args:
        conditioning: one row per image.
        seeds: one per image.
        steps: model evaluations per image.
        solver: ``euler`` is bit for bit what diffusers' FlowMatchEulerDiscreteScheduler does; ``ab2`` is the
            two-step Adams-Bashforth solver in sigma; ``dpm2`` is DPM-Solver++(2M, midpoint; Lu et al., arXiv
            2211.01095), with which the DiffusionNFT reference collects its data. All cost the same.
        batch_size: images in one forward pass.

    Raises:
        Stopped: the observer asked to stop between batches.
    """
    sigmas = backbone.sigmas(steps, shift)
    parts: list[Tensor] = []
    for start in range(0, len(seeds), batch_size):
        if observer is not None and observer.should_stop():
            raise Stopped
        rows = range(start, min(start + batch_size, len(seeds)))
        noise = initial_noise(backbone, [seeds[row] for row in rows])
        parts.append(integrate(backbone, noise, sigmas, conditioning.select(rows), solver))
    return torch.cat(parts)


@torch.no_grad()
def integrate(
    backbone: Backbone, latents: Tensor, sigmas: Tensor, conditioning: Conditioning, solver: Solver
) -> Tensor:
    """Solve dx/dsigma = v along ``sigmas`` (T + 1,), from ``latents`` at ``sigmas[0]``.

    Every solver moves by x += d u, d the step in sigma. With v' and x0' from the step before (d'),

        euler  u = v
        ab2    u = v + d / (2 d') (v - v')
        dpm2   u = v - h / (2 h' sigma) (x0 - x0'),    h, h' the steps in lambda = log((1 - sigma) / sigma)

    The first step is Euler's. So are two more of ``dpm2``: the second, if the first began at sigma = 1 (where
    lambda and hence h' are infinite), and the last (where h is).
    """
    levels = sigmas.to(backbone.device, torch.float32)
    weights = _extrapolation(sigmas, solver)
    previous: Tensor | None = None
    for (here, there), weight in zip(itertools.pairwise(levels), weights, strict=True):
        slope = velocity = backbone.velocity(latents, here.expand(len(latents)), conditioning)
        known = latents.float() - here * velocity if solver == "dpm2" else velocity
        if previous is not None and weight != 0:
            slope = velocity + weight * (known - previous)
        latents = (latents.float() + (there - here) * slope).to(velocity.dtype)
        previous = known
    return latents


def _extrapolation(sigmas: Tensor, solver: Solver) -> list[float]:
    """What each step multiplies the last change of v (``ab2``) or of x0 (``dpm2``) with; T numbers."""
    levels = sigmas.tolist()
    weights = [0.0] * (len(levels) - 1)
    for step in range(1, len(weights)):
        before, here, there = levels[step - 1 : step + 2]
        if solver == "ab2":
            weights[step] = (there - here) / (2 * (here - before))
        elif solver == "dpm2" and there > 0 and before < 1:
            here_lambda = _half_log_snr(here)
            ratio = (_half_log_snr(there) - here_lambda) / (here_lambda - _half_log_snr(before))
            weights[step] = -ratio / (2 * here)
    return weights


def _half_log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma)."""
    return math.log1p(-sigma) - math.log(sigma)


@torch.no_grad()
def denoise_stochastic(
    backbone: Backbone,
    latents: Tensor,
    sigma: float | Sequence[float],
    conditioning: Conditioning,
    seeds: Sequence[int],
    *,
    steps: int | Sequence[int],
    prompts: Sequence[int] | None = None,
    shift: float | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """A draw of x0 from the model's posterior p(x0 | x_sigma): (N, C, h, w).

    Ancestral sampling: each step draws from the forward process' own conditional

        x_s | x_t, x0hat ~ N((1 - s) x0hat + sqrt(s^2 - c) epshat, c),
        c = s^2 (1 - ((1 - t) s / ((1 - s) t))^2),    epshat = (x_t - (1 - t) x0hat) / t,

    which keeps the marginals as ``steps`` grows (DDPM's posterior variance, in the terms of this flow).
    x0hat is the prediction x_t - t v extrapolated linearly in sigma, through the step before, to the middle
    of the step. Held at x_t - t v instead (plain DDPM), ten steps lose a fifth to two fifths of a Gaussian's
    variance; extrapolated, they are within a twentieth (tests).

    The noise levels follow the sampler's curve from ``sigma`` down to 0. The generators are salted, so
    passing the seeds that an image was drawn with does not replay the same noise.

    Rows may start at different levels: each walks down its own, those with most steps first, and where one
    has arrived the next joins, so that forward passes stay full. A row's draw does not depend on the others,
    up to the rounding of batched arithmetic.

    Args:
        latents: (N, C, h, w), each at its noise level.
        sigma: noise levels in (0, 1], one for all or one each.
        steps: model evaluations, one number for all or one each.
        prompts: row of ``conditioning`` that each image belongs to; None: one row each, in order.
        batch_size: images in one forward pass; None: all.
    """
    count = len(latents)
    sigmas = [sigma] * count if isinstance(sigma, float | int) else list(sigma)
    numbers = [steps] * count if isinstance(steps, int) else list(steps)
    rows = range(count) if prompts is None else prompts
    ladders = {
        pair: rollout_sigmas(backbone, *pair, shift) for pair in set(zip(sigmas, numbers, strict=True))
    }
    walk = _Walk(backbone, latents, [ladders[pair] for pair in zip(sigmas, numbers, strict=True)], seeds)
    waiting = sorted(range(count), key=lambda row: -numbers[row])
    under_way: list[int] = []
    while waiting or under_way:
        free = (batch_size or count) - len(under_way)
        under_way, waiting = under_way + waiting[:free], waiting[free:]
        walk.step(under_way, conditioning.select([rows[row] for row in under_way]))
        under_way = [row for row in under_way if walk.remaining(row) > 0]
    return walk.current


class _Walk:
    """Ancestral steps of N rows, each down its own ladder of noise levels."""

    def __init__(
        self, backbone: Backbone, latents: Tensor, ladders: Sequence[Sequence[float]], seeds: Sequence[int]
    ):
        self.backbone, self.ladders = backbone, ladders
        self.generators = [torch.Generator("cpu").manual_seed(seed ^ _ROLLOUT_SALT) for seed in seeds]
        self.current = latents.float().clone()
        self.predicted = torch.zeros_like(self.current)
        self.done = [0] * len(ladders)

    def remaining(self, row: int) -> int:
        return len(self.ladders[row]) - 1 - self.done[row]

    def step(self, rows: Sequence[int], conditioning: Conditioning) -> None:
        """One forward pass of ``rows``, and one step down for each."""
        index = torch.tensor(rows, device=self.current.device)
        here, there, before = self._levels(rows)
        current = self.current[index]
        velocity = self.backbone.velocity(current, here.float(), conditioning).float()
        predicted = current - self._column(here) * velocity
        reach = torch.where(before > here, (here - there) / (2 * (before - here)).clamp(min=1e-12), 0.0)
        clean = predicted + self._column(reach) * (predicted - self.predicted[index])
        noise = (current - self._column(1 - here) * clean) / self._column(here)
        variance = there**2 * (1 - ((1 - here) * there / ((1 - there) * here)) ** 2)
        kept = (there**2 - variance).clamp(min=0.0).sqrt()
        moved = self._column(1 - there) * clean + self._column(kept) * noise
        self.current[index] = moved + self._column(variance.sqrt()) * self._fresh(rows, variance)
        self.predicted[index] = predicted
        for row in rows:
            self.done[row] += 1

    def _levels(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(N,) float64 each: where the rows are, where they go, and where they were (0 at the start)."""
        places = [(self.ladders[row], self.done[row]) for row in rows]
        triples = [(ladder[k], ladder[k + 1], ladder[k - 1] if k else 0.0) for ladder, k in places]
        here, there, before = torch.tensor(triples, dtype=torch.float64).unbind(1)
        return here, there, before

    def _fresh(self, rows: Sequence[int], variance: Tensor) -> Tensor:
        """(N, C, h, w) noise from each row's own generator; none is drawn where none is needed."""
        shape = self.backbone.latent_shape
        draws = [
            torch.randn(shape, generator=self.generators[row]) if needed else torch.zeros(shape)
            for row, needed in zip(rows, (variance > 0).tolist(), strict=True)
        ]
        return torch.stack(draws).to(self.current.device)

    def _column(self, factors: Tensor) -> Tensor:
        """(N,) -> (N, 1, 1, 1) float32 on the latents' device."""
        shape = (-1, *(1 for _ in self.backbone.latent_shape))
        return factors.to(self.current.device, torch.float32).reshape(shape)


def rollout_sigmas(backbone: Backbone, sigma: float, steps: int, shift: float | None = None) -> list[float]:
    """(steps + 1) levels from ``sigma`` to 0, evenly spaced along the sampler's own curve of noise levels."""
    curve = backbone.sigmas(_CURVE_POINTS, shift).numpy()[::-1]
    place = np.linspace(0.0, 1.0, len(curve))
    start = np.interp(sigma, curve, place)
    levels = np.interp(np.linspace(start, 0.0, steps + 1), place, curve)
    return [sigma, *(float(level) for level in levels[1:])]
