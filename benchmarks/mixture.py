"""A world with every answer known: a mixture of Gaussians and a bell-shaped optimality, in one dimension.

Posteriors given x_sigma are mixtures too, so velocity, conditional optimality and Rényi divergence are exact
(the last by quadrature).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import simpson
from scipy.stats import norm
from torch import Tensor, nn

from recast_engine.backbones.base import Conditioning
from recast_engine.backbones.catalogue import flow_sigmas

Array = NDArray[np.float64]

GRID = np.linspace(-12.0, 12.0, 8001)


@dataclass(frozen=True)
class Mixture:
    """p = sum_j weights_j N(means_j, spread^2); optimality r(x) = exp(-(x - centre)^2 / (2 width))."""

    weights: tuple[float, ...] = (0.5, 0.5)
    means: tuple[float, ...] = (-1.5, 1.5)
    spread: float = 0.5
    centre: float = 1.2
    width: float = 1.0

    def _columns(self) -> tuple[Array, Array]:
        return np.array(self.weights)[:, None], np.array(self.means)[:, None]

    def posterior(self, x: Array, sigma: float) -> tuple[Array, Array, float]:
        """Given x_sigma = ``x`` (N,): the components' weights (J, N) and means (J, N), and their variance."""
        weights, means = self._columns()
        variance = (1 - sigma) ** 2 * self.spread**2 + sigma**2
        density = weights * norm.pdf(x, (1 - sigma) * means, np.sqrt(variance))
        gain = (1 - sigma) * self.spread**2 / variance
        shares = density / density.sum(axis=0)
        return shares, means + gain * (x - (1 - sigma) * means), self.spread**2 * sigma**2 / variance

    def density(self, x: Array, sigma: float) -> Array:
        """p_sigma(x)."""
        weights, means = self._columns()
        scale = np.sqrt((1 - sigma) ** 2 * self.spread**2 + sigma**2)
        return np.asarray((weights * norm.pdf(x, (1 - sigma) * means, scale)).sum(axis=0))

    def optimality(self, x: Array) -> Array:
        """r in (0, 1]."""
        return np.asarray(np.exp(-((x - self.centre) ** 2) / (2 * self.width)))

    def _smoothed(self, means: Array, variance: float) -> Array:
        """E[r] under N(means, variance)."""
        total = self.width + variance
        return np.sqrt(self.width / total) * np.exp(-((means - self.centre) ** 2) / (2 * total))

    def partition(self) -> float:
        """Z = E_p[r]."""
        weights, means = self._columns()
        return float((weights * self._smoothed(means, self.spread**2)).sum())

    def divergence(self, sigma: float, alpha: float = 2.0) -> float:
        """D_alpha(p+_sigma || p_sigma), exactly."""
        if sigma == 1.0:
            return 0.0
        shares, means, variance = self.posterior(GRID, sigma)
        ratio = (shares * self._smoothed(means, variance)).sum(axis=0) / self.partition()
        density = self.density(GRID, sigma)
        if alpha == 1.0:
            return float(simpson(density * ratio * np.log(ratio), x=GRID))
        return float(np.log(simpson(density * ratio**alpha, x=GRID)) / (alpha - 1))

    def surrogate(self, sigma: float, proposal: Mixture, alpha: float = 2.0) -> float:
        """What the external estimator tends to when ``proposal`` stands in for the positive policy."""
        shares, means, variance = self.posterior(GRID, sigma)
        ratio = (shares * self._smoothed(means, variance)).sum(axis=0) / self.partition()
        density = proposal.density(GRID, sigma)
        if alpha == 1.0:
            return float(simpson(density * np.log(ratio), x=GRID))
        return float(np.log(simpson(density * ratio ** (alpha - 1), x=GRID)) / (alpha - 1))

    def positive_policy(self) -> Mixture:
        """p+ = r p / Z, a mixture of the same number of components."""
        weights, means = self._columns()
        shares = (weights * self._smoothed(means, self.spread**2))[:, 0]
        shrunk = 1 / (1 / self.spread**2 + 1 / self.width)
        moved = shrunk * (means[:, 0] / self.spread**2 + self.centre / self.width)
        return Mixture(
            tuple(shares / shares.sum()), tuple(moved), float(np.sqrt(shrunk)), self.centre, self.width
        )

    def draw(self, rng: np.random.Generator, shape: Sequence[int]) -> Array:
        """Draws of p."""
        component = rng.choice(len(self.weights), size=shape, p=self.weights)
        return np.asarray(np.array(self.means)[component] + self.spread * rng.normal(size=shape))


class MixtureBackbone:
    """Flow matching of a :class:`Mixture`: every pixel of an "image" is a draw of its own."""

    id = "mixture"
    lora_targets = ()
    resolution = 1

    def __init__(self, mixture: Mixture, pixels: int) -> None:
        self.mixture = mixture
        self.transformer = nn.Identity()
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.latent_shape = (1, 1, pixels)
        self.evaluations = 0

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        return Conditioning(torch.zeros(len(prompts), 1, 1), torch.zeros(len(prompts), 1))

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        return torch.from_numpy(flow_sigmas(steps, 1.0))

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """E[eps - x0 | x_sigma] = (x_sigma - E[x0 | x_sigma]) / sigma."""
        self.evaluations += latents.numel()
        rows = []
        for row, level in zip(latents.double().numpy(), sigma.double().tolist(), strict=True):
            shares, means, _ = self.mixture.posterior(row.ravel(), level)
            rows.append(((row.ravel() - (shares * means).sum(axis=0)) / level).reshape(row.shape))
        return torch.from_numpy(np.stack(rows)).float()

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        raise NotImplementedError

    def encode_images(self, images: NDArray[np.uint8]) -> Tensor:
        raise NotImplementedError
