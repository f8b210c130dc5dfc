"""Both profile estimators on the analytic mixture: error, bias and coverage at equal model evaluations."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from mixture import Mixture, MixtureBackbone
from numpy.typing import NDArray
from scipy.special import stdtrit

from recast_engine.backbones.sampling import denoise_stochastic
from recast_engine.profiling import renyi_self_tilted
from recast_engine.profiling.estimator import jackknife, proposal_moments
from recast_engine.profiling.levels import rollout_steps

Array = NDArray[np.float64]

LEAST_SPREAD = 1e-12


def rollouts(world: Mixture, clean: Array, sigma: float, steps: int, rng: np.random.Generator) -> Array:
    """One stochastic rollout of each of ``clean`` from noise level ``sigma``."""
    backbone = MixtureBackbone(world, clean.size)
    noised = (1 - sigma) * clean + sigma * rng.normal(size=clean.shape)
    start = torch.from_numpy(noised.reshape(1, 1, 1, -1)).float()
    seed = int(rng.integers(2**31))
    drawn = denoise_stochastic(backbone, start, sigma, backbone.encode_prompts([""]), [seed], steps=steps)
    return drawn.double().numpy().reshape(clean.shape)


def study(arguments: argparse.Namespace) -> None:
    """Both estimators at equal model evaluations: error, bias by standard deviation, coverage."""
    world, steps, prompts, images = Mixture(), arguments.steps, 48, 8
    biased = Mixture((1.0,), (0.8,), 0.8)
    print(f"{arguments.repeats} profiles of {prompts} x {images} images, {steps} steps, alpha 2")
    print(
        f"{'sigma':>6}{'D':>8}  {'estimator':<34}{'evaluations':>12}{'rms error':>11}{'bias/sd':>9}"
        f"{'cover':>8}"
    )
    for sigma in (0.3, 0.6, 0.85):
        exact = world.divergence(sigma)
        evaluations = prompts * images * (steps + rollout_steps(sigma, steps))
        for name, values in {
            "self-tilted": _self_tilted(world, sigma, arguments, prompts, images),
            "external, the positive policy": _external(
                world, world.positive_policy(), sigma, arguments, prompts, images
            ),
            "external, another proposal": _external(world, biased, sigma, arguments, prompts, images),
        }.items():
            estimates, reach = values
            error = estimates - exact
            bias = error.mean() / max(estimates.std(), LEAST_SPREAD)
            print(
                f"{sigma:>6}{exact:>8.4f}  {name:<34}{evaluations:>12}{np.sqrt((error**2).mean()):>11.4f}"
                f"{bias:>9.2f}{np.mean(np.abs(error) <= reach):>8.3f}"
            )


def _self_tilted(
    world: Mixture, sigma: float, arguments: argparse.Namespace, prompts: int, images: int
) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    clean = world.draw(rng, (arguments.repeats, prompts, images))
    again = rollouts(world, clean, sigma, rollout_steps(sigma, arguments.steps), rng)
    pairs = zip(world.optimality(clean), world.optimality(again), strict=True)
    found = [renyi_self_tilted(first, second) for first, second in pairs]
    reach = [estimate.interval()[1] - estimate.value for estimate in found]
    return np.array([estimate.value for estimate in found]), np.array(reach)


def _external(
    world: Mixture,
    proposal: Mixture,
    sigma: float,
    arguments: argparse.Namespace,
    prompts: int,
    images: int,
) -> tuple[Array, Array]:
    """Z of each prompt from as many images of the model as there are proposals, as in a profile."""
    rng = np.random.default_rng(1)
    shape = (arguments.repeats, prompts, images)
    partitions = world.optimality(world.draw(rng, shape)).mean(axis=2)
    drawn = rollouts(world, proposal.draw(rng, shape), sigma, rollout_steps(sigma, arguments.steps), rng)
    found = [
        proposal_moments(values[..., None], partition, 2.0)
        for values, partition in zip(world.optimality(drawn), partitions, strict=True)
    ]
    estimates = np.array([float(moments.divergence(np.ones(prompts))) for moments in found])
    return estimates, stdtrit(prompts - 1, 0.975) * np.array([jackknife(moments) for moments in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--steps", type=int, default=25)
    torch.set_num_threads(1)
    study(parser.parse_args())


if __name__ == "__main__":
    main()
