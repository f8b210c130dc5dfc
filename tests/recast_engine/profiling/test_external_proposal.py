"""The external-proposal estimator from images to the profile, in the Gaussian world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_engine.config import EstimatorConfig, ProposalConfig
from recast_engine.errors import ConfigError, RewardFailure
from recast_engine.profiling.measure import measure_profile
from recast_engine.prompts import Prompt

PROMPTS = [Prompt(f"{number / 10**6:.6f}") for number in range(60)]


class Shifted:
    """N(shift, 1) in every coordinate, coded as the Gaussian world codes its latents."""

    bought = 5

    def __init__(self, backbone: Any, shift: float, images: int, *, refused: tuple[str, ...] = ()) -> None:
        self.backbone, self.shift, self.count, self.refused = backbone, shift, images, refused
        backbone.encode_images = self.encode

    def images(self, prompt: Prompt) -> NDArray[np.uint8]:
        rng = np.random.default_rng(int(float(prompt.prompt) * 10**6 + 0.5))
        count = 0 if prompt.prompt in self.refused else self.count
        latents = torch.from_numpy(rng.normal(self.shift, 1.0, (count, 4, 1, 1))).float()
        return np.asarray(self.backbone.decode(latents))

    def encode(self, images: NDArray[np.uint8]) -> Tensor:
        raw = np.ascontiguousarray(images.reshape(len(images), 18)[:, :16]).view(np.float32)
        return torch.from_numpy(raw.copy()).reshape(-1, 4, 1, 1)


def config(**fields: Any) -> EstimatorConfig:
    settings: dict[str, Any] = {"prompts": 60, "images_per_prompt": 8, "levels": 5, "sampling_steps": 10}
    return EstimatorConfig(
        kind="external_proposal", proposals=ProposalConfig(source="openai"), **(settings | fields)
    )


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_a_shifted_proposal_has_the_curve_that_follows_from_its_shift(
    backbone: Any, hermite: Any, alpha: float
) -> None:
    """r = 1/2 + x / 10, Z = 1/2: E rbar / Z = 1 + shift rho / 5, by which D = log(...) for alpha = 2."""
    profile = measure_profile(
        backbone,
        hermite([1]),
        PROMPTS,
        config(alpha=alpha, rollouts=4, anchor=True),
        seed=0,
        proposals=Shifted(backbone, 1.0, 8),
    )
    curve = profile.curves["hermite-1"]
    levels = np.array(profile.levels)
    rho = (1 - levels) ** 2 / ((1 - levels) ** 2 + levels**2)
    noise = 0.03 if alpha == 1.0 else 0.0  # the plug-in bias of a logarithm, Var / (2 Z^2)
    error = np.abs(np.array(curve.divergence_raw) - np.log1p(rho / 5))[:-1]
    assert np.all(error < 3.5 * np.array(curve.standard_error)[:-1] + noise)
    assert curve.total == pytest.approx(np.log(1.2), abs=0.05)
    images = 60 * 8
    steps = sum(int(np.ceil(sigma * 10)) for sigma in levels[1:])
    assert profile.cost["model_evaluations"] == images * (10 + 4 * steps)
    assert profile.cost["reward_calls"] == images * (1 + 1 + 4 * 4)
    assert profile.cost["proposal_images"] == 5


def test_a_proposal_worse_than_the_model_is_reported_raw(backbone: Any, hermite: Any) -> None:
    profile = measure_profile(
        backbone, hermite([1]), PROMPTS, config(), seed=0, proposals=Shifted(backbone, -1.0, 8)
    )
    curve = profile.curves["hermite-1"]
    assert curve.divergence_raw[0] == pytest.approx(np.log(0.8), abs=0.06)
    assert min(-np.diff(curve.divergence_raw)) < -0.02
    assert curve.divergence == (0.0,) * 5
    assert any("negative at noise 0.00 to 0.35" in text for text in profile.warnings)
    assert any("do not score above" in text for text in profile.warnings)


def test_refused_prompts_are_left_out(backbone: Any, hermite: Any) -> None:
    refused = tuple(prompt.prompt for prompt in PROMPTS[:20])
    source = Shifted(backbone, 1.0, 8, refused=refused)
    curve = measure_profile(backbone, hermite([1]), PROMPTS, config(), seed=0, proposals=source).curves
    assert curve["hermite-1"].prompts == 40
    nothing = Shifted(backbone, 1.0, 8, refused=tuple(prompt.prompt for prompt in PROMPTS))
    with pytest.raises(RewardFailure, match="fewer than two prompts"):
        measure_profile(backbone, hermite([1]), PROMPTS, config(), seed=0, proposals=nothing)


def test_missing_proposals_are_named(backbone: Any, hermite: Any) -> None:
    with pytest.raises(ConfigError, match="proposals"):
        measure_profile(backbone, hermite([1]), PROMPTS, config(), seed=0)
    with pytest.raises(ConfigError, match="8 images of a prompt are needed, got 5"):
        measure_profile(
            backbone, hermite([1]), PROMPTS, config(), seed=0, proposals=Shifted(backbone, 1.0, 5)
        )
