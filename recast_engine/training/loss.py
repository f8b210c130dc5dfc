"""The DiffusionNFT loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

WEIGHT_FLOOR = 1e-5
"""Smallest normaliser of a prediction error, so that a perfect prediction does not divide by zero."""


@dataclass(frozen=True)
class NFTLoss:
    """Scalars (0-dim tensors): ``total = policy + kl_weight * kl``; only ``total`` need be differentiated."""

    total: Tensor
    policy: Tensor
    kl: Tensor


def nft_loss(
    clean: Tensor,
    noisy: Tensor,
    sigma: Tensor,
    velocity: Tensor,
    old_velocity: Tensor,
    optimality: Tensor,
    *,
    beta: float,
    advantage_clip: float,
    reference_velocity: Tensor | None = None,
    kl_weight: float = 0.0,
) -> NFTLoss:
    """Contrast the implicit positive and negative policies against clean samples.

    With x0(v) = x_sigma - sigma v, v_plus = (1-b) v_old + b v and v_minus = (1+b) v_old - b v,

        policy = A_max / b * mean_n( o |x0(v_plus) - x0|^2 / w_plus + (1-o) |x0(v_minus) - x0|^2 / w_minus )
        kl     = mean_n |v - v_ref|^2

    where |.|^2 is a mean over a sample's axes, and w = mean |x0(v) - x0| per sample, without gradient and at
    least 1e-5.

    Args:
        clean: x0, (N, ...) of any rank.
        noisy: x_sigma, (N, ...).
        sigma: (N,) noise levels in (0, 1].
        velocity: v of the policy being trained, (N, ...), with gradient.
        old_velocity: v_old of the policy that drew ``clean``, (N, ...).
        optimality: o in [0, 1], (N,).
        beta: b, the strength of the implicit policy step.
        advantage_clip: A_max.
        reference_velocity: v_ref, (N, ...); None leaves ``kl`` at 0.

    Source: DiffusionNFT, arXiv 2509.16117; METHOD section 6.
    """
    level = _per_sample(sigma, clean)
    positive = (1 - beta) * old_velocity + beta * velocity
    negative = (1 + beta) * old_velocity - beta * velocity
    attraction = _normalised_error(noisy - level * positive, clean)
    repulsion = _normalised_error(noisy - level * negative, clean)
    policy = advantage_clip / beta * (optimality * attraction + (1 - optimality) * repulsion).mean()
    if reference_velocity is None:
        return NFTLoss(policy, policy, policy.new_zeros(()))
    kl = (velocity - reference_velocity).square().mean()
    return NFTLoss(policy + kl_weight * kl, policy, kl)


def _normalised_error(predicted: Tensor, clean: Tensor) -> Tensor:
    """mean (x0hat - x0)^2 / w per sample: (N,)."""
    error = (predicted - clean).flatten(1)
    weight = error.detach().abs().mean(1).clamp_min(WEIGHT_FLOOR)
    return error.square().mean(1) / weight


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like).reshape(-1, *[1] * (like.ndim - 1))
