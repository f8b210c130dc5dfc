"""The loss against a closed form in float64, and against the published reference's arithmetic in float32.

The reference is DiffusionNFT's training script (github.com/NVlabs/DiffusionNFT, ``scripts/train_nft_sd3.py``
and ``flow_grpo``, commit 24af555), read and written out here anew.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import LoRAConfig, OptimizerConfig
from recast_engine.training import group_advantages, nft_loss, optimality
from recast_engine.training.adapters import EMA, POLICY, attached
from recast_engine.training.loss import WEIGHT_FLOOR
from recast_engine.training.old_policy import old_policy_decay

Floats = NDArray[np.float64]

BETAS = (0.05, 0.1, 0.5, 1.0, 2.0)
CLIPS = (0.5, 1.0, 5.0)
OPTIMALITIES = (0.0, 0.2, 0.5, 0.9, 1.0)
SIGMAS = (1e-3, 0.1, 0.5, 0.9, 1.0)


def _draw(shape: tuple[int, ...], seed: int) -> dict[str, Floats]:
    """Latents and velocities; those of sample 0 are so small that its normalisers are at their floor."""
    rng = np.random.default_rng(seed)
    names = ("clean", "noise", "velocity", "old", "reference")
    drawn = {name: rng.standard_normal(shape) for name in names}
    for values in drawn.values():
        values[0] *= 1e-6
    return drawn


def _closed_form(
    drawn: dict[str, Floats], sigma: Floats, optimality: Floats, beta: float, clip: float, kl_weight: float
) -> tuple[float, float, float, Floats]:
    """Loss terms and d total / d v without automatic differentiation.

    With e = (x_sigma - sigma v_old) - x0 and d = v - v_old the errors of the two implicit policies are
    e_plus = e - sigma b d and e_minus = e + sigma b d, so that, w held fixed and D numbers per sample,

        d policy / d v = 2 A_max sigma / (N D) * ( (1 - o) e_minus / w_minus - o e_plus / w_plus ).
    """
    count, size = len(sigma), drawn["clean"][0].size
    clean, noise, velocity, old, reference = (drawn[name].reshape(count, size) for name in drawn)
    s, o = sigma[:, None], optimality[:, None]
    error = (1 - s) * clean + s * noise - s * old - clean
    shift = s * beta * (velocity - old)
    plus, minus = error - shift, error + shift
    w_plus, w_minus = (np.maximum(np.abs(e).mean(1, keepdims=True), WEIGHT_FLOOR) for e in (plus, minus))
    terms = o * plus**2 / w_plus + (1 - o) * minus**2 / w_minus
    policy = clip / beta * terms.mean()
    kl = ((velocity - reference) ** 2).mean()
    slope = 2 * clip * s * ((1 - o) * minus / w_minus - o * plus / w_plus)
    slope = slope + 2 * kl_weight * (velocity - reference)
    return policy + kl_weight * kl, policy, kl, slope / (count * size)


def _ours(
    drawn: dict[str, Floats], sigma: Floats, optimal: Floats, dtype: torch.dtype, **options: float
) -> tuple[Any, Tensor]:
    """``nft_loss`` and its gradient in v."""
    tensors = {name: torch.from_numpy(values).to(dtype) for name, values in drawn.items()}
    level = torch.from_numpy(sigma).to(dtype)
    broad = level.reshape(-1, *[1] * (tensors["clean"].ndim - 1))
    velocity = tensors["velocity"].requires_grad_()
    loss = nft_loss(
        tensors["clean"],
        (1 - broad) * tensors["clean"] + broad * tensors["noise"],
        level,
        velocity,
        tensors["old"],
        torch.from_numpy(optimal).to(dtype),
        beta=options["beta"],
        advantage_clip=options["clip"],
        reference_velocity=tensors["reference"],
        kl_weight=options["kl_weight"],
    )
    (gradient,) = torch.autograd.grad(loss.total, velocity)
    return loss, gradient


@pytest.mark.parametrize(("beta", "clip"), itertools.product(BETAS, CLIPS))
def test_loss_and_gradient_are_the_closed_form(beta: float, clip: float) -> None:
    """Every pair of optimality and sigma in one batch; each sample's gradient to a relative 1e-10."""
    pairs = np.array(list(itertools.product(OPTIMALITIES, SIGMAS)))
    optimal, sigma = pairs[:, 0], pairs[:, 1]
    for kl_weight, shape in ((0.0, (4,)), (1e-4, (2, 3, 3)), (0.7, (3, 2))):
        drawn = _draw((len(pairs), *shape), seed=len(shape))
        loss, gradient = _ours(
            drawn, sigma, optimal, torch.float64, beta=beta, clip=clip, kl_weight=kl_weight
        )
        total, policy, kl, slope = _closed_form(drawn, sigma, optimal, beta, clip, kl_weight)
        for mine, expected in ((loss.total, total), (loss.policy, policy), (loss.kl, kl)):
            assert float(mine.detach()) == pytest.approx(expected, rel=1e-10)
        theirs = gradient.flatten(1).numpy()
        scale = np.linalg.norm(slope, axis=1)
        assert (np.linalg.norm(theirs - slope, axis=1) <= 1e-10 * scale).all()
        assert (scale > 0).all()


def _reference_loss(
    drawn: dict[str, Tensor], timestep: Tensor, advantage: Tensor, beta: float, clip: float, kl_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One (micro-batch, timestep) of the reference: total, policy and kl.

    Noise level t = timestep / 1000; the normalisers in float64, all else in float32; the optimality as
    clamp(clamp(A, -A_max, A_max) / A_max / 2 + 1/2, 0, 1).
    """
    x0 = drawn["clean"]
    t = (timestep / 1000.0).view(-1, *[1] * (x0.ndim - 1))
    axes = tuple(range(1, x0.ndim))
    xt = (1 - t) * x0 + t * drawn["noise"]
    r = ((advantage.clamp(-clip, clip) / clip) / 2.0 + 0.5).clamp(0, 1)

    def branch(prediction: Tensor) -> Tensor:
        predicted = xt - t * prediction
        weight = (predicted.detach().double() - x0.double()).abs().mean(dim=axes, keepdim=True)
        return ((predicted - x0) ** 2 / weight.clip(min=0.00001)).mean(dim=axes)

    new, old = drawn["velocity"], drawn["old"]
    positive = branch(beta * new + (1 - beta) * old)
    negative = branch((1.0 + beta) * old - beta * new)
    policy = ((r * positive / beta + (1.0 - r) * negative / beta) * clip).mean()
    kl = ((new - drawn["reference"]) ** 2).mean(dim=axes).mean()
    return policy + kl_weight * kl, policy, kl


@pytest.mark.parametrize(("beta", "clip"), itertools.product((0.1, 1.0), (1.0, 5.0)))
def test_loss_and_gradient_are_the_references(beta: float, clip: float) -> None:
    """Advantages beyond the clip included; float32 to 1e-5."""
    rng = np.random.default_rng(3)
    count = 48
    sigma = rng.choice([0.02, 0.25, 0.6, 0.95, 1.0], count)
    advantage = torch.from_numpy(rng.normal(0.0, 3.0, count)).float()
    drawn = _draw((count, 4, 6, 6), seed=4)
    optimal = optimality(advantage.double(), clip).numpy()
    loss, gradient = _ours(drawn, sigma, optimal, torch.float32, beta=beta, clip=clip, kl_weight=1e-4)
    tensors = {name: torch.from_numpy(values).float() for name, values in drawn.items()}
    tensors["velocity"].requires_grad_()
    timestep = torch.from_numpy(sigma * 1000.0).float()
    total, policy, kl = _reference_loss(tensors, timestep, advantage, beta, clip, 1e-4)
    (slope,) = torch.autograd.grad(total, tensors["velocity"])
    for mine, theirs in ((loss.total, total), (loss.policy, policy), (loss.kl, kl)):
        assert float(mine.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    ours, published = gradient.flatten(1).double(), slope.flatten(1).double()
    assert bool(((ours - published).norm(dim=1) <= 1e-5 * published.norm(dim=1)).all())
    assert float((ours - published).norm()) <= 1e-5 * float(published.norm())


def _reference_advantages(rewards: Floats, groups: NDArray[np.int64], global_std: bool) -> Floats:
    """The reference's per-prompt tracker: the group's mean, and a population deviation plus 1e-4."""
    advantages = np.zeros_like(rewards)
    for group in np.unique(groups):
        own = rewards[groups == group]
        deviation = (rewards if global_std else own).std() + 1e-4
        advantages[groups == group] = (own - own.mean()) / deviation
    return advantages


@pytest.mark.parametrize("scale", ["global", "group"])
def test_advantages_are_the_references_up_to_its_added_deviation(scale: str) -> None:
    """The reference adds 1e-4 to the deviation, so its advantages are smaller by exactly that factor.

    Here nothing is added: a group without spread has no advantages instead (``usable_samples``).
    """
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(6), 24)
    rewards = rng.normal(0.4, 0.1, len(groups)) + 0.05 * groups
    published = _reference_advantages(rewards, groups, scale == "global")
    spread = rewards.std() if scale == "global" else np.repeat(rewards.reshape(6, 24).std(1), 24)
    ours = group_advantages(rewards, groups, scale=scale).numpy()  # type: ignore[arg-type]
    np.testing.assert_allclose(ours * spread / (spread + 1e-4), published, rtol=1e-10, atol=1e-14)
    dead = np.full(len(groups), 0.3)
    assert not group_advantages(dead, groups).any()
    np.testing.assert_allclose(_reference_advantages(dead, groups, True), 0.0, atol=1e-10)


def test_rewards_are_normalised_before_they_are_weighted_unlike_the_reference() -> None:
    """METHOD section 6 and the reference differ for several rewards; for a single one they agree.

    The reference normalises the weighted sum of raw rewards, so that a reward's say grows with its spread:
    with equal weights, one of ten times the spread decides nearly alone. Here every reward has spread 1
    first, so that its say is its budget.
    """
    rng = np.random.default_rng(6)
    groups = np.repeat(np.arange(8), 32)
    narrow, wide = rng.normal(0.0, 0.05, 256), rng.normal(0.0, 0.5, 256)
    together = _reference_advantages((narrow + wide) / 2, groups, True)
    own = group_advantages(np.stack([narrow, wide]), groups).numpy()
    budgeted = own.mean(0)

    def say(mixture: Floats) -> list[float]:
        return [float(np.corrcoef(mixture, one)[0, 1]) for one in own]

    assert say(together)[1] > 0.98
    assert say(together)[0] < 0.25
    assert say(budgeted) == pytest.approx([0.5**0.5] * 2, abs=0.06)
    alone = _reference_advantages(narrow, groups, True) * (narrow.std() + 1e-4) / narrow.std()
    np.testing.assert_allclose(own[0], alone, rtol=1e-10, atol=1e-14)


def _reference_decay(step: int, kind: str) -> float:
    flat, rate, ceiling = {"fast": (0, 0.001, 0.5), "slow": (75, 0.0075, 0.999)}[kind]
    return 0.0 if step < flat else min((step - flat) * rate, ceiling)


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_old_policy_schedules_are_the_references(kind: str) -> None:
    for step in range(0, 1000):
        assert old_policy_decay(kind, step) == pytest.approx(_reference_decay(step, kind), abs=1e-15)


def test_the_average_lags_at_first_where_the_reference_warms_up(backbone: SD3Backbone) -> None:
    """METHOD section 6 and the reference differ for the first steps and agree after a hundred.

    The reference averages with min((1 + n) / (10 + n), 0.9) after optimiser step n, METHOD with 0.9 always.
    The policy jumps from 0 to 1 here; the average has covered 1 - prod(decay).
    """
    decay = OptimizerConfig().ema_decay
    published = 0.0
    with attached(backbone, LoRAConfig(rank=1, alpha=1.0, targets=("to_q",))) as adapters:
        for name, value in ((EMA, 0.0), (POLICY, 1.0)):
            adapters.load_state(
                name, {key: torch.full_like(old, value) for key, old in adapters.state(name).items()}
            )
        for step in range(1, 101):
            adapters.blend(EMA, POLICY, decay)
            slowness = min((1 + step) / (10 + step), decay)
            published += (1 - slowness) * (1 - published)
            ours = float(adapters.parameters(EMA)[0].detach().flatten()[0])
            assert ours == pytest.approx(1 - decay**step, rel=1e-5)
            if step == 4:
                assert ours == pytest.approx(0.3439, abs=1e-4)
                assert published == pytest.approx(1 - 2 / 11 * 3 / 12 * 4 / 13 * 5 / 14, abs=1e-9)
    assert ours == pytest.approx(published, abs=1e-4)
