"""Solvers and the posterior sampler against a Gaussian flow whose velocity is known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from numpy.typing import NDArray
from torch import Tensor, nn

from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.catalogue import flow_sigmas
from recast_engine.backbones.sampling import (
    Solver,
    denoise_stochastic,
    initial_noise,
    integrate,
    rollout_sigmas,
    sample,
)
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.observer import NullObserver, Stopped

MEAN, SPREAD = 0.7, 0.4


class GaussianBackbone:
    """Data N(MEAN, SPREAD^2) in every pixel: the flow's velocity E[eps - x0 | x_sigma] is linear in x."""

    id = "gaussian"
    transformer = nn.Identity()
    device = torch.device("cpu")
    dtype = torch.float32
    lora_targets = ()

    def __init__(self, pixels: int = 1, shift: float = 1.0) -> None:
        self.latent_shape: tuple[int, ...] = (1, 1, pixels)
        self.shift = shift
        self.evaluations = 0

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        return Conditioning(torch.zeros(len(prompts), 1, 1), torch.zeros(len(prompts), 1))

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        return torch.from_numpy(flow_sigmas(steps, self.shift if shift is None else shift))

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        self.evaluations += len(latents)
        level = sigma.reshape(-1, 1, 1, 1)
        surprise = (latents - (1 - level) * MEAN) / ((1 - level) ** 2 * SPREAD**2 + level**2)
        return level * surprise - (MEAN + (1 - level) * SPREAD**2 * surprise)

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        raise NotImplementedError


def _error(solver: Solver, steps: int) -> float:
    """Mean distance from the exact end of the ODE: x0 = MEAN + SPREAD * noise."""
    backbone = GaussianBackbone(pixels=4000)
    noise = initial_noise(backbone, [5])
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    end = integrate(backbone, noise, levels, backbone.encode_prompts([""]), solver)
    return float((end - (MEAN + SPREAD * noise)).abs().mean())


@pytest.mark.parametrize(("solver", "order"), [("euler", 1.0), ("ab2", 2.0)])
def test_order_of_convergence(solver: Solver, order: float) -> None:
    errors = [_error(solver, steps) for steps in (20, 40, 80)]
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    np.testing.assert_allclose(orders, order, atol=0.15)


def test_ab2_is_better_on_the_schedulers_own_levels() -> None:
    backbone = GaussianBackbone(pixels=2000)
    noise = initial_noise(backbone, [5])
    conditioning = backbone.encode_prompts([""])
    exact = MEAN + SPREAD * noise
    errors = {
        solver: (integrate(backbone, noise, backbone.sigmas(10), conditioning, solver) - exact).abs().mean()
        for solver in ("euler", "ab2", "dpm2")
    }
    assert errors["ab2"] < 0.25 * min(errors["euler"], errors["dpm2"])


def test_dpm2_is_of_second_order_in_log_snr() -> None:
    """Between levels where log-SNR is finite, in equal steps of it."""
    backbone = GaussianBackbone(pixels=2000)
    conditioning = backbone.encode_prompts([""])
    start = initial_noise(backbone, [5])

    def end(steps: int) -> Tensor:
        levels = torch.sigmoid(torch.linspace(3.0, -3.0, steps + 1, dtype=torch.float64))
        return integrate(backbone, start, levels, conditioning, "dpm2")

    exact = end(1000)
    errors = [float((end(steps) - exact).abs().mean()) for steps in (20, 40, 80)]
    np.testing.assert_allclose(np.log2(np.divide(errors[:-1], errors[1:])), 2.0, atol=0.25)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_dpm2_is_diffusers_dpm_solver(steps: int) -> None:
    """Step by step on the same levels; theirs also falls back to first order where log-SNR is infinite."""
    backbone = GaussianBackbone(pixels=500, shift=3.0)
    conditioning = backbone.encode_prompts([""])
    levels = backbone.sigmas(steps)
    theirs = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
        euler_at_final=True,
    )
    theirs.set_timesteps(steps)
    theirs.sigmas, theirs.timesteps = levels, levels[:-1] * 1000
    theirs.set_begin_index(0)
    latents = initial_noise(backbone, [5])
    ours = integrate(backbone, latents, levels, conditioning, "dpm2")
    for level, timestep in zip(levels[:-1], theirs.timesteps, strict=True):
        velocity = backbone.velocity(latents, level.float().expand(1), conditioning)
        latents = theirs.step(velocity, timestep, latents).prev_sample
    torch.testing.assert_close(ours, latents.float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("solver", ["euler", "ab2", "dpm2"])
def test_one_step_is_exact_for_the_mean(solver: Solver) -> None:
    backbone = GaussianBackbone(pixels=3)
    noise = initial_noise(backbone, [5])
    end = integrate(backbone, noise, torch.tensor([1.0, 0.0]), backbone.encode_prompts([""]), solver)
    np.testing.assert_allclose(end, MEAN, atol=1e-6)  # x1 - v(x1, 1) = E[x0]


@pytest.mark.parametrize("solver", ["euler", "ab2", "dpm2"])
def test_an_image_can_be_drawn_again_alone(tiny_pipeline: Path, solver: Solver) -> None:
    backbone = SD3Backbone.from_pretrained(tiny_pipeline, id="tiny")
    conditioning = backbone.encode_prompts(["a", "b", "c", "d", "e"])
    seeds = [11, 12, 13, 14, 15]
    together = sample(backbone, conditioning, seeds, steps=6, solver=solver, batch_size=2)
    alone = sample(backbone, conditioning.select([3]), seeds[3:4], steps=6, solver=solver)
    torch.testing.assert_close(alone[0], together[3], rtol=0, atol=2e-5)
    assert not torch.allclose(together[2], together[3], atol=0.1)


def test_stops_between_batches() -> None:
    class Impatient(NullObserver):
        asked = 0

        def should_stop(self) -> bool:
            self.asked += 1
            return self.asked > 2

    backbone = GaussianBackbone()
    conditioning = backbone.encode_prompts([""] * 8)
    with pytest.raises(Stopped):
        sample(backbone, conditioning, range(8), steps=3, batch_size=2, observer=Impatient())
    assert backbone.evaluations == 2 * 2 * 3


@pytest.mark.parametrize(("steps", "tolerance"), [(10, 0.06), (40, 0.02)])
@pytest.mark.parametrize("sigma", [0.25, 0.6, 0.9])
def test_rollouts_have_the_posteriors_moments(sigma: float, steps: int, tolerance: float) -> None:
    """x0 ~ p, x_sigma, x0' ~ p(.|x_sigma): Var x0' = SPREAD^2 and Cov(x0, x0') = SPREAD^2 * signal share.

    The tolerance is the discretisation's; a variance's statistical error is sqrt(2 / 200000) = 0.3%.
    """
    pixels = 200_000
    backbone = GaussianBackbone(pixels)
    conditioning = backbone.encode_prompts([""])
    generator = torch.Generator().manual_seed(1)
    clean = MEAN + SPREAD * torch.randn(1, 1, 1, pixels, generator=generator)
    noisy = (1 - sigma) * clean + sigma * torch.randn(clean.shape, generator=generator)
    rollout = denoise_stochastic(backbone, noisy, sigma, conditioning, [7], steps=steps)
    share = (1 - sigma) ** 2 * SPREAD**2 / ((1 - sigma) ** 2 * SPREAD**2 + sigma**2)
    covariance = np.cov(clean.flatten(), rollout.flatten())
    assert backbone.evaluations == steps
    assert float(rollout.mean()) == pytest.approx(MEAN, abs=0.005)
    assert covariance[1, 1] == pytest.approx(SPREAD**2, rel=tolerance)
    assert covariance[0, 1] == pytest.approx(SPREAD**2 * share, abs=0.01 * SPREAD**2)


def test_rollouts_are_reproducible_alone_and_do_not_replay_the_initial_noise() -> None:
    backbone = GaussianBackbone(pixels=20_000)
    conditioning = backbone.encode_prompts([""] * 3)
    noisy = torch.zeros(3, *backbone.latent_shape)
    together = denoise_stochastic(backbone, noisy, 0.8, conditioning, [1, 2, 3], steps=4)
    alone = denoise_stochastic(backbone, noisy[:1], 0.8, conditioning.select([0]), [2], steps=4)
    torch.testing.assert_close(alone[0], together[1])
    noise = initial_noise(backbone, [2])
    assert abs(np.corrcoef(noise.flatten(), alone.flatten())[0, 1]) < 0.04  # 5 standard errors


def test_rollout_levels_follow_the_samplers_curve() -> None:
    flat = rollout_sigmas(GaussianBackbone(), 0.8, 4)
    np.testing.assert_allclose(flat, [0.8, 0.6, 0.4, 0.2, 0.0], atol=1e-9)
    shifted = rollout_sigmas(GaussianBackbone(shift=3.0), 0.75, 2)  # 0.75 = 3 u / (1 + 2 u) at u = 0.5
    np.testing.assert_allclose(shifted, [0.75, 0.5, 0.0], atol=2e-3)


def test_rollouts_of_different_levels_share_forward_passes(tiny_pipeline: Path) -> None:
    """Ten rows from three levels, four at a time: each as if alone, in no more passes than they fill."""
    backbone = SD3Backbone.from_pretrained(tiny_pipeline, id="tiny")
    passes: list[int] = []
    velocity = backbone.velocity
    backbone.velocity = lambda x, s, c: (passes.append(len(x)), velocity(x, s, c))[1]  # type: ignore[method-assign]
    conditioning = backbone.encode_prompts(["a", "b", "c"])
    prompts = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    sigmas, steps = [0.3, 0.9, 0.6, 0.9, 0.3, 1.0, 0.6, 0.9, 0.3, 0.9], [2, 6, 4, 6, 2, 7, 4, 6, 2, 6]
    noisy = torch.randn(10, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    together = denoise_stochastic(
        backbone, noisy, sigmas, conditioning, range(10), steps=steps, prompts=prompts, batch_size=4
    )
    assert sum(passes) == sum(steps) == 45
    assert max(passes) == 4
    assert len(passes) <= 13  # 45 / 4, and less than one ladder of half-empty passes at the end
    for row in range(10):
        alone = denoise_stochastic(
            backbone,
            noisy[row : row + 1],
            sigmas[row],
            conditioning.select([prompts[row]]),
            [row],
            steps=steps[row],
        )
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=2e-5)
