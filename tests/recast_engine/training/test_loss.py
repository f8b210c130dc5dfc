"""The DiffusionNFT loss: by hand, by finite differences, and by another derivation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recast_engine.training import nft_loss
from recast_engine.training.loss import WEIGHT_FLOOR


def _case(*shape: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    clean, noise, velocity, old = draw(), draw(), draw(), draw()
    sigma = torch.rand(shape[0], generator=generator, dtype=torch.float64) * 0.8 + 0.1
    level = sigma.reshape(-1, *[1] * (len(shape) - 1))
    return {
        "clean": clean,
        "noisy": (1 - level) * clean + level * noise,
        "sigma": sigma,
        "velocity": velocity.requires_grad_(),
        "old_velocity": old,
        "optimality": torch.rand(shape[0], generator=generator, dtype=torch.float64),
    }


def test_by_hand() -> None:
    """One sample of two numbers; every intermediate value is worked out in the comments."""
    loss = nft_loss(
        clean=torch.tensor([[1.0, 2.0]]),
        noisy=torch.tensor([[2.0, 3.0]]),
        sigma=torch.tensor([0.5]),
        velocity=torch.tensor([[2.0, 0.0]]),
        old_velocity=torch.tensor([[0.0, 4.0]]),
        optimality=torch.tensor([0.75]),
        beta=0.5,
        advantage_clip=2.0,
        reference_velocity=torch.tensor([[1.0, 3.0]]),
        kl_weight=0.1,
    )
    # v_plus  = .5 (0, 4) + .5 (2, 0) = (1, 2): x0 = (1.5, 2), error (.5, 0), w = .25, .125 / .25 = .5
    # v_minus = 1.5 (0, 4) - .5 (2, 0) = (-1, 6): x0 = (2.5, 0), error (1.5, -2), w = 1.75,
    #           (2.25 + 4) / 2 / 1.75 = 1.7857142857
    # policy = 2 / .5 * (.75 * .5 + .25 * 1.7857142857) = 3.2857142857;  kl = (1 + 9) / 2 = 5
    assert float(loss.policy) == pytest.approx(3.2857142857, rel=1e-6)
    assert float(loss.kl) == pytest.approx(5.0)
    assert float(loss.total) == pytest.approx(3.7857142857, rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (2, 2, 3, 3), (2, 2, 2, 2, 2)])
def test_gradient_against_finite_differences(shape: tuple[int, ...]) -> None:
    """The normalisers w carry no gradient, so the numerical derivative holds them fixed."""
    case = _case(*shape)
    reference = torch.ones_like(case["clean"])
    options = {"beta": 0.3, "advantage_clip": 2.0, "kl_weight": 0.7}
    total = nft_loss(**case, **options, reference_velocity=reference).total
    (gradient,) = torch.autograd.grad(total, case["velocity"])
    level = case["sigma"].reshape(-1, *[1] * (len(shape) - 1))

    def errors(velocity: Tensor) -> list[Tensor]:
        plus = 0.7 * case["old_velocity"] + 0.3 * velocity
        minus = 1.3 * case["old_velocity"] - 0.3 * velocity
        return [(case["noisy"] - level * v - case["clean"]).flatten(1) for v in (plus, minus)]

    weights = [error.detach().abs().mean(1) for error in errors(case["velocity"])]

    def value(velocity: Tensor) -> float:
        plus, minus = (e.square().mean(1) / w for e, w in zip(errors(velocity), weights, strict=True))
        o = case["optimality"]
        policy = 2.0 / 0.3 * (o * plus + (1 - o) * minus).mean()
        return float(policy + 0.7 * (velocity - reference).square().mean())

    base = case["velocity"].detach()
    assert value(base) == pytest.approx(float(total.detach()), rel=1e-12)
    for place in range(0, base.numel(), max(1, base.numel() // 7)):
        bump = torch.zeros_like(base).flatten()
        bump[place] = 1e-6
        bump = bump.reshape(shape)
        numeric = (value(base + bump) - value(base - bump)) / 2e-6
        assert float(gradient.flatten()[place]) == pytest.approx(numeric, rel=1e-6, abs=1e-9)


def test_on_policy_gradient_is_the_reward_weighted_regression() -> None:
    """At v = v_old both branches have the same error e and normaliser w, and the gradient in v is

        -2 A_max sigma (2 o - 1) e / (w n d) = -2 A sigma e / (w n d)   with A = A_max (2 o - 1),

    independent of b and A_max: samples with positive advantage pull the policy to them, others push it away.
    """
    case = _case(4, 6)
    case["velocity"] = case["old_velocity"].clone().requires_grad_()
    advantages = 5.0 * (2 * case["optimality"] - 1)
    error = case["noisy"] - case["sigma"][:, None] * case["old_velocity"] - case["clean"]
    expected = -2 * (advantages * case["sigma"] / error.abs().mean(1))[:, None] * error / error.numel()
    for beta in (0.1, 1.0):
        total = nft_loss(**case, beta=beta, advantage_clip=5.0).total
        (gradient,) = torch.autograd.grad(total, case["velocity"])
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_a_perfect_prediction_does_not_divide_by_zero() -> None:
    clean = torch.full((1, 4), 0.5)
    noisy = torch.full((1, 4), 1.0)
    velocity = torch.full((1, 4), 1.0, requires_grad=True)  # x0 = 1 - .5 * 1 = .5 exactly
    loss = nft_loss(
        clean,
        noisy,
        torch.tensor([0.5]),
        velocity,
        velocity.detach(),
        torch.tensor([1.0]),
        beta=1.0,
        advantage_clip=1.0,
    )
    loss.total.backward()
    assert float(loss.total) == 0.0
    assert velocity.grad is not None
    assert bool(torch.isfinite(velocity.grad).all())
    assert WEIGHT_FLOOR == 1e-5


def test_without_reference_there_is_no_kl_and_means_are_per_sample() -> None:
    case = _case(4, 3, 2)
    whole = nft_loss(**case, beta=0.2, advantage_clip=3.0)
    assert float(whole.kl) == 0.0
    assert whole.total is whole.policy
    parts = [
        float(nft_loss(**{k: v[i : i + 1] for k, v in case.items()}, beta=0.2, advantage_clip=3.0).policy)
        for i in range(4)
    ]
    assert float(whole.policy) == pytest.approx(math.fsum(parts) / 4, rel=1e-12)
