"""Rollouts and both estimators against a mixture of two Gaussians, where every answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.integrate import simpson
from scipy.special import stdtrit
from scipy.stats import ks_2samp, kstest, norm

from benchmarks.mixture import GRID, Mixture, MixtureBackbone
from recast_engine.backbones.sampling import denoise_stochastic
from recast_engine.profiling import renyi_self_tilted
from recast_engine.profiling.estimator import jackknife, proposal_moments

Array = NDArray[np.float64]

WORLDS = {
    "gaussian": Mixture((1.0,), (0.7,), 0.6, centre=1.5, width=1.0),
    "two components": Mixture(),
}


def rollouts(world: Mixture, noised: Array, sigma: float, count: int = 1, steps: int = 60) -> Array:
    """(..., count) posterior draws of x0 given x_sigma = ``noised``."""
    repeated = np.repeat(noised[..., None], count, axis=-1)
    backbone = MixtureBackbone(world, repeated.size)
    start = torch.from_numpy(repeated.reshape(1, 1, 1, -1)).float()
    drawn = denoise_stochastic(backbone, start, sigma, backbone.encode_prompts([""]), [5], steps=steps)
    return drawn.double().numpy().reshape(repeated.shape)


def noised(rng: np.random.Generator, clean: Array, sigma: float) -> Array:
    return (1 - sigma) * clean + sigma * rng.normal(size=clean.shape)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Mixture:
    return WORLDS[request.param]


@pytest.mark.parametrize("sigma", [0.3, 0.7, 0.95])
def test_rollouts_keep_the_marginal(world: Mixture, sigma: float) -> None:
    """x0 ~ p, x_sigma, x0' ~ p(.|x_sigma): x0' is a draw of p. Kolmogorov-Smirnov at 1%, and moments."""
    rng = np.random.default_rng(1)
    drawn = rollouts(world, noised(rng, world.draw(rng, (8000,)), sigma), sigma)[:, 0]
    fresh = world.draw(rng, (8000,))
    assert ks_2samp(drawn, fresh).pvalue > 0.01
    for power in (1, 2, 4):
        error = math.hypot((drawn**power).std(), (fresh**power).std()) / math.sqrt(8000)
        assert abs((drawn**power).mean() - (fresh**power).mean()) < 3.5 * error


@pytest.mark.parametrize(("sigma", "place"), [(0.4, -0.3), (0.6, 0.1), (0.8, 0.5), (0.8, -1.2)])
def test_rollouts_are_draws_of_the_posterior(world: Mixture, sigma: float, place: float) -> None:
    """All rollouts from one x_sigma, against the exact posterior's distribution function."""
    shares, means, variance = world.posterior(np.array([place]), sigma)
    drawn = rollouts(world, np.full(4000, place), sigma, steps=120)[:, 0]

    def cumulative(x: Array) -> Array:
        return (shares * norm.cdf(x, means, math.sqrt(variance))).sum(axis=0)

    assert kstest(drawn, cumulative).pvalue > 0.01
    mean = float((shares * means).sum())
    assert drawn.mean() == pytest.approx(mean, abs=3.5 * drawn.std() / math.sqrt(4000))


def test_the_closed_forms_agree_with_plain_integrals(world: Mixture) -> None:
    density, positive = world.density(GRID, 0.0), world.positive_policy().density(GRID, 0.0)
    partition = simpson(density * world.optimality(GRID), x=GRID)
    assert world.partition() == pytest.approx(partition, rel=1e-9)
    np.testing.assert_allclose(positive, density * world.optimality(GRID) / partition, atol=1e-9)
    assert world.divergence(0.0) == pytest.approx(math.log(simpson(positive**2 / density, x=GRID)), rel=1e-6)
    for alpha in (1.0, 2.0, 3.0):
        surrogate = world.surrogate(0.5, world.positive_policy(), alpha)
        assert surrogate == pytest.approx(world.divergence(0.5, alpha), rel=1e-8)
    values = [world.divergence(sigma) for sigma in np.linspace(0, 0.99, 12)]
    assert np.all(np.diff(values) < 0)


@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.6, 0.85])
def test_self_tilted_is_unbiased_and_its_intervals_cover(world: Mixture, sigma: float) -> None:
    """400 profiles of 48 prompts x 8 images: covering 95% has a standard error of 1.1%."""
    rng = np.random.default_rng(2)
    clean = world.draw(rng, (400, 48, 8))
    again = clean if sigma == 0.0 else rollouts(world, noised(rng, clean, sigma), sigma, steps=25)[..., 0]
    found = [
        renyi_self_tilted(r, s) for r, s in zip(world.optimality(clean), world.optimality(again), strict=True)
    ]
    exact = world.divergence(sigma)
    values = np.array([estimate.value for estimate in found])
    covered = np.mean([low <= exact <= high for low, high in (estimate.interval() for estimate in found)])
    assert 0.92 <= covered <= 0.98
    assert abs(values.mean() - exact) < 0.25 * values.std()


@pytest.mark.parametrize("sigma", [0.3, 0.6, 0.85])
def test_external_proposal_of_the_positive_policy_is_unbiased_and_covers(
    world: Mixture, sigma: float
) -> None:
    """Images of p+ itself: then, for order 2, one rollout each is enough for the closed form."""
    rng = np.random.default_rng(3)
    proposed = world.positive_policy().draw(rng, (400, 48, 8))
    drawn = rollouts(world, noised(rng, proposed, sigma), sigma, steps=25)
    partition, exact = np.full(48, world.partition()), world.divergence(sigma)
    found = [proposal_moments(values, partition, 2.0) for values in world.optimality(drawn)]
    values = np.array([float(moments.divergence(np.ones(48))) for moments in found])
    reach = stdtrit(47, 0.975) * np.array([jackknife(moments) for moments in found])
    assert 0.92 <= np.mean(np.abs(values - exact) <= reach) <= 0.98
    assert abs(values.mean() - exact) < 0.25 * values.std()


@pytest.mark.parametrize("alpha", [1.0, 1.5, 3.0])
def test_plug_in_bias_of_other_orders_shrinks_with_rollouts(alpha: float) -> None:
    """As 1 / M, by the formula that is documented to leading order."""
    world, sigma = WORLDS["two components"], 0.7
    rng = np.random.default_rng(4)
    proposed = world.positive_policy().draw(rng, (64, 150))
    drawn = world.optimality(rollouts(world, noised(rng, proposed, sigma), sigma, count=16, steps=25))
    exact, partition = world.divergence(sigma, alpha), np.full(64, world.partition())

    def error(count: int) -> float:
        parts = [proposal_moments(drawn[..., k : k + count], partition, alpha) for k in range(0, 16, count)]
        return float(np.mean([part.divergence(np.ones(64)) for part in parts])) - exact

    one, four, sixteen = error(1), error(4), error(16)
    assert abs(one) > 0.03
    assert abs(four) < 0.4 * abs(one)
    assert abs(sixteen) < 0.4 * abs(four) + 0.005


def test_a_proposal_that_is_no_positive_policy_tends_to_the_surrogate() -> None:
    """Its raw curve may rise with the noise level: the theory of section 3 does not hold for it."""
    world, proposal = WORLDS["two components"], Mixture((1.0,), (-0.2,), 0.3)
    rng = np.random.default_rng(5)
    curve = [world.surrogate(sigma, proposal) for sigma in (0.01, 0.3, 0.6, 0.9)]
    assert max(np.diff(curve)) > 0.01
    for sigma, limit in zip((0.3, 0.6), curve[1:3], strict=True):
        drawn = rollouts(world, noised(rng, proposal.draw(rng, (64, 64)), sigma), sigma, steps=25)
        moments = proposal_moments(world.optimality(drawn), np.full(64, world.partition()), 2.0)
        assert abs(float(moments.divergence(np.ones(64))) - limit) < 3.5 * jackknife(moments)
        assert abs(limit - world.divergence(sigma)) > 10 * jackknife(moments)
