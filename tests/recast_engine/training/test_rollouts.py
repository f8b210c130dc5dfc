"""Which prompts and seeds an epoch gets, and when failing rewards end a training."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import LoRAConfig, SamplingConfig
from recast_engine.errors import RewardFailure
from recast_engine.observer import NullObserver
from recast_engine.rewards.base import Scores
from recast_engine.training.adapters import EMA, OLD, POLICY, AdapterSet, attached
from recast_engine.training.rollouts import (
    check_failures,
    choose_prompts,
    draw_rollouts,
    image_seeds,
    update_generator,
)
from tests.recast_engine.training.tiny import PROMPTS, PixelScorer


def test_every_prompt_is_used_equally_often() -> None:
    drawn = [choose_prompts(10, 4, epoch, seed=3) for epoch in range(5)]
    assert Counter(np.concatenate(drawn).tolist()) == dict.fromkeys(range(10), 2)
    first_round = np.concatenate(drawn)[:10]
    assert sorted(first_round.tolist()) == list(range(10))
    assert first_round.tolist() != np.concatenate(drawn)[10:].tolist()


def test_draws_depend_on_seed_and_epoch_alone() -> None:
    assert choose_prompts(10, 4, 7, seed=3) == choose_prompts(10, 4, 7, seed=3)
    assert choose_prompts(50, 20, 7, seed=3) != choose_prompts(50, 20, 7, seed=4)
    assert image_seeds(1, 2, 8) == image_seeds(1, 2, 8)
    assert len({*image_seeds(1, 2, 8), *image_seeds(1, 3, 8), *image_seeds(2, 2, 8)}) == 24
    assert max(image_seeds(1, 2, 4096)) < 2**31
    noise = [torch.randn(4, generator=update_generator(*key)) for key in ((1, 2), (1, 2), (1, 3), (2, 2))]
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[3])


def _scores(failed: int, applicable: int = 10) -> Scores:
    values = np.ones((1, 12))
    mask = np.arange(12)[None] < applicable
    values[0, :failed] = np.nan
    return Scores(("ocr",), np.where(mask, values, np.nan), mask, np.zeros(1))


def test_a_fifth_of_failures_is_tolerated_and_more_is_not() -> None:
    check_failures(_scores(2))
    with pytest.raises(RewardFailure, match="ocr failed on 3 of 10 images"):
        check_failures(_scores(3))


def test_images_come_from_the_old_policy_alone(backbone: SD3Backbone) -> None:
    """Other adapters may be anything; a changed old one changes every image."""

    def drawn(adapters: AdapterSet) -> torch.Tensor:
        config = SamplingConfig(steps=2, prompts_per_epoch=2, images_per_prompt=2)
        scorers = (PixelScorer("redness"),)
        found = draw_rollouts(backbone, adapters, scorers, PROMPTS[:2], config, range(4), NullObserver())
        return found.latents

    def scramble(adapters: AdapterSet, name: str) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in adapters.parameters(name):
            parameter.data = torch.randn(parameter.shape, generator=generator)

    with attached(backbone, LoRAConfig(rank=2, alpha=4.0), seed=0) as adapters:
        before = drawn(adapters)
        scramble(adapters, POLICY)
        scramble(adapters, EMA)
        assert torch.equal(drawn(adapters), before)
        scramble(adapters, OLD)
        changed = drawn(adapters) - before
    assert bool((changed.abs().amax((1, 2, 3)) > 1e-3).all())
