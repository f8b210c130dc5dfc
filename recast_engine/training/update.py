"""One epoch's gradient steps on the policy, from scored rollouts and an allocation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_engine.backbones.base import Backbone
from recast_engine.config import OptimizerConfig
from recast_engine.errors import NonFinite
from recast_engine.observer import Observer, Stopped
from recast_engine.training.adapters import EMA, OLD, POLICY, AdapterSet
from recast_engine.training.advantages import group_advantages, optimality, usable_samples
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.loss import NFTLoss, nft_loss
from recast_engine.training.rollouts import Rollouts


@dataclass
class UpdateReport:
    """What happened in an epoch's updates.

    Attributes:
        step: optimiser steps taken over the whole run, after this epoch.
        images_used: images that carried a usable reward, of ``images``.
        clipped: (image, step) pairs whose |A_t| exceeded A_max, of ``pairs``.
        losses: (total, policy, kl) of every optimiser step.
        gradient_norms: before clipping, of every optimiser step.
    """

    step: int
    images: int
    images_used: int
    pairs: int = 0
    clipped: int = 0
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class TimedAdvantages:
    """A_i of every image and the allocation that mixes them at each step.

    Attributes:
        values: (R, N) float64 group-normalised advantages.
        usable: (N,) bool: at least one reward with a budget has an opinion.
        matrix: W, (R, T) float64.
    """

    values: Tensor
    usable: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, rollouts: Rollouts, matrix: NDArray[np.float64], config: OptimizerConfig) -> TimedAdvantages:
        """Advantages of ``rollouts``, each reward normalised on its own."""
        weights = torch.from_numpy(matrix)
        scores = rollouts.scores.values
        values = group_advantages(scores, rollouts.groups, scale=config.advantage_scale)
        alive = usable_samples(scores, rollouts.groups) & (weights.sum(1) > 0)[:, None]
        return cls(values, alive.any(0), weights)

    def at(self, images: Tensor, steps: Tensor) -> Tensor:
        """A_t = sum_i W[i,t] A_i for pairs of image and step, both (B,): (B,) float64."""
        return (self.matrix[:, steps] * self.values[:, images]).sum(0)


def draw_pairs(images: Tensor, steps: int, per_image: int, generator: torch.Generator) -> Tensor:
    """Every image with ``per_image`` of the sampler's steps, shuffled: (len(images) * per_image, 2) int64.

    The steps of an image differ as long as ``per_image <= steps``; every step is equally likely.
    """
    rounds = math.ceil(per_image / steps)
    orders = torch.rand(len(images), rounds, steps, generator=generator).argsort(-1).flatten(1)
    chosen = orders[:, :per_image]
    pairs = torch.stack([images[:, None].expand_as(chosen), chosen], dim=-1).reshape(-1, 2)
    return pairs[torch.randperm(len(pairs), generator=generator)]


def update_policy(
    backbone: Backbone,
    adapters: AdapterSet,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: TimedAdvantages,
    sigmas: Tensor,
    config: OptimizerConfig,
    *,
    step: int,
    generator: torch.Generator,
    observer: Observer,
    devices: Devices = ALONE,
) -> UpdateReport:
    """One pass over the usable (image, step) pairs; the EMA follows every optimiser step.

    Args:
        sigmas: (T + 1,) noise levels of the sampler; an image is noised to those it was drawn through.
        step: optimiser steps taken so far.
        devices: each trains on its share of every batch.

    Raises:
        NonFinite: a loss or gradient is not finite; the weights are those before that step.
        Stopped: the observer asked to stop.
    """
    used = advantages.usable.nonzero()[:, 0]
    pairs = draw_pairs(used, len(sigmas) - 1, config.timesteps_per_image, generator)
    report = UpdateReport(step, len(advantages.usable), len(used), pairs=len(pairs))
    parameters = adapters.parameters(POLICY)
    chunks = torch.split(pairs, config.batch_size * config.accumulation) if len(pairs) else ()
    for chunk in chunks:
        if devices.agree(observer.should_stop()):
            raise Stopped
        optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in torch.split(chunk, config.batch_size):
            timed = advantages.at(batch[:, 0], batch[:, 1])
            report.clipped += int((timed.abs() > config.advantage_clip).sum())
            noise = torch.randn(len(batch), *rollouts.latents.shape[1:], generator=generator)
            own = devices.share(len(batch))
            if not own:
                continue
            rows = slice(own.start, own.stop)
            loss = _loss(backbone, adapters, rollouts, batch[rows], noise[rows], timed[rows], sigmas, config)
            weight = len(own) / len(chunk)
            sums += weight * torch.stack([loss.total, loss.policy, loss.kl]).detach().double().cpu()
            with adapters.using(POLICY):
                (weight * loss.total).backward()  # type: ignore[no-untyped-call]
        _require_finite(devices.add(sums), "loss", report.step)
        devices.add_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.gradient_clip)
        _require_finite(norm, "gradient", report.step)
        optimizer.step()
        adapters.blend(EMA, POLICY, config.ema_decay)
        report.step += 1
        report.losses.append((float(sums[0]), float(sums[1]), float(sums[2])))
        report.gradient_norms.append(float(norm))
    return report


def _loss(
    backbone: Backbone,
    adapters: AdapterSet,
    rollouts: Rollouts,
    batch: Tensor,
    noise: Tensor,
    timed: Tensor,
    sigmas: Tensor,
    config: OptimizerConfig,
) -> NFTLoss:
    """The NFT loss of pairs ``batch`` (B, 2) of image and step, with gradient to the policy."""
    images, steps = batch.unbind(1)
    clean = rollouts.latents[images.to(rollouts.latents.device)]
    noise = noise.to(clean)
    sigma = sigmas[steps].to(clean)
    level = sigma.reshape(-1, *[1] * (clean.ndim - 1))
    noisy = (1 - level) * clean + level * noise
    conditioning = rollouts.conditioning.select(rollouts.groups[images])

    def velocity(adapter: str | None) -> Tensor:
        with adapters.using(adapter):
            return backbone.velocity(noisy, sigma, conditioning).float()

    with torch.no_grad():
        old = velocity(OLD)
        reference = velocity(None) if config.kl_weight > 0 else None
    return nft_loss(
        clean,
        noisy,
        sigma,
        velocity(POLICY),
        old,
        optimality(timed, config.advantage_clip).to(clean),
        beta=config.beta,
        advantage_clip=config.advantage_clip,
        reference_velocity=reference,
        kl_weight=config.kl_weight,
    )


def _require_finite(values: Tensor, what: str, step: int) -> None:
    if not bool(torch.isfinite(values).all()):
        raise NonFinite(f"{what} is not finite at optimiser step {step + 1}")
