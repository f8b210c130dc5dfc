"""Which prompts and seeds an epoch gets, and when failing rewards end a training."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from recast_engine.errors import RewardFailure
from recast_engine.rewards.base import Scores
from recast_engine.training.rollouts import (
    check_failures,
    choose_prompts,
    image_seeds,
    update_generator,
)


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
