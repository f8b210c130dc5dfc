"""A world with a known posterior: every image is a draw of N(0, I), rewards are Hermite polynomials of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.polynomial.hermite_e import hermeval
from numpy.typing import NDArray
from torch import Tensor, nn

from recast_engine.backbones.base import Conditioning
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Scores


class GaussianBackbone:
    """Flow matching of N(0, I) in four dimensions, in closed form: E[eps - x0 | x_sigma]."""

    id = "gaussian"
    lora_targets = ()

    def __init__(self) -> None:
        self.transformer = nn.Identity()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.latent_shape = (4, 1, 1)
        self.evaluations = 0

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        rows = torch.tensor([float(prompt) for prompt in prompts])
        return Conditioning(rows[:, None, None], rows[:, None])

    def sigmas(self, steps: int, shift: float | None = None) -> Tensor:
        return torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert len(latents) == len(conditioning)
        self.evaluations += len(latents)
        sigma = sigma.to(latents.dtype).reshape(-1, 1, 1, 1)
        return (2 * sigma - 1) / ((1 - sigma) ** 2 + sigma**2) * latents

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """The four floats' bytes as the pixels of a 6 x 1 image, without loss."""
        raw = latents.reshape(-1, 4).float().contiguous().numpy().view(np.uint8)
        return np.pad(raw, ((0, 0), (0, 2))).reshape(-1, 6, 1, 3)


def read_images(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What ``GaussianBackbone.decode`` wrote: (N, 4)."""
    raw = np.ascontiguousarray(images.reshape(len(images), 18)[:, :16])
    return raw.view(np.float32).astype(np.float64)


class HermiteScorer:
    """Reward ``hermite-n`` is He_n of the first coordinate plus the prompt's number; unit variance.

    Cov(He_n(x), He_n(x')) = n! rho^n for a bivariate normal, so Cov(r, r') is known at every level.
    """

    def __init__(self, orders: Sequence[int], *, fails_on: int | None = None) -> None:
        self.orders = tuple(orders)
        self.rewards = tuple(f"hermite-{order}" for order in orders)
        self.fails_on = fails_on

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        """The last reward needs a text, the others nothing."""
        rows = np.ones((len(self.orders), len(prompts)), dtype=bool)
        if len(self.orders) > 1:
            rows[-1] = [prompt.has("text") for prompt in prompts]
        return rows

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        place = read_images(images)[:, 0]
        offset = np.array([float(prompt.prompt) for prompt in prompts])
        return np.array([_hermite(order, place) + offset for order in self.orders])

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        values, applicable = self.score(images, prompts), self.applicable(prompts)
        values[~applicable] = np.nan
        if self.fails_on is not None:
            values[:, self.fails_on :: 7] = np.nan
        return Scores(self.rewards, values, applicable, np.zeros(len(self.orders)))


def _hermite(order: int, place: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(hermeval(place, np.eye(order + 1)[order]) / math.sqrt(math.factorial(order)))


@pytest.fixture
def backbone() -> GaussianBackbone:
    return GaussianBackbone()


@pytest.fixture
def hermite() -> type[HermiteScorer]:
    return HermiteScorer


@pytest.fixture
def read_latents() -> Callable[[NDArray[np.uint8]], NDArray[np.float64]]:
    return read_images


@pytest.fixture
def retained() -> Callable[[float], float]:
    """sigma -> rho = Cov(x0, x0') of two posterior draws of a standard normal given x_sigma."""
    return lambda sigma: (1 - sigma) ** 2 / ((1 - sigma) ** 2 + sigma**2)
