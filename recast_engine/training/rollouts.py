"""One epoch's images: which prompts, which seeds, drawn with the old policy and scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_engine.backbones.base import Backbone, Conditioning
from recast_engine.backbones.sampling import sample
from recast_engine.config import MAX_FAILED_SHARE, SamplingConfig
from recast_engine.errors import RewardFailure
from recast_engine.observer import Observer
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Scores
from recast_engine.rewards.service import begin, joined
from recast_engine.training.adapters import OLD, AdapterSet

_PROMPTS, _IMAGES, _UPDATES = 1, 2, 3


class Scorer(Protocol):
    """What training needs of ``recast_engine.rewards.scoring.Scorer``."""

    rewards: tuple[str, ...]

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        """Score images (N, H, W, 3) against prompts (N)."""

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        """(R, N) whether each prompt carries the metadata that each reward needs."""

    def select(self, rewards: Sequence[str]) -> Scorer:
        """A scorer of ``rewards`` alone, in that order."""


@dataclass(frozen=True)
class Rollouts:
    """P groups of k images, N = P k in all.

    Attributes:
        latents: (N, C, h, w) float32 clean latents.
        groups: (N,) int64 group of each image, 0..P-1.
        conditioning: of the P prompts.
        scores: of the N images.
        sampling_seconds: time to draw and decode, and to score on the way.
        scoring_seconds: time spent waiting for scores once all was drawn.
    """

    latents: Tensor
    groups: Tensor
    conditioning: Conditioning
    scores: Scores
    sampling_seconds: float
    scoring_seconds: float


def choose_prompts(count: int, wanted: int, epoch: int, seed: int) -> list[int]:
    """Indices of the ``wanted`` prompts of ``epoch`` (from 0) out of ``count``.

    The set is walked in a new random order each time round, so every prompt is used equally often; which
    prompts an epoch gets depends on nothing but the arguments.
    """
    cycles: dict[int, NDArray[np.int64]] = {}
    chosen: list[int] = []
    for position in range(epoch * wanted, (epoch + 1) * wanted):
        cycle, place = divmod(position, count)
        if cycle not in cycles:
            cycles[cycle] = np.random.default_rng([seed, _PROMPTS, cycle]).permutation(count)
        chosen.append(int(cycles[cycle][place]))
    return chosen


def image_seeds(seed: int, epoch: int, count: int) -> list[int]:
    """One seed per image of ``epoch``, below 2^31."""
    return [int(s) for s in np.random.default_rng([seed, _IMAGES, epoch]).integers(0, 2**31, count)]


def update_generator(seed: int, epoch: int) -> torch.Generator:
    """The generator of an epoch's training noise, steps and shuffling."""
    state = np.random.SeedSequence([seed, _UPDATES, epoch]).generate_state(1)
    return torch.Generator("cpu").manual_seed(int(state[0]))


def draw_rollouts(
    backbone: Backbone,
    adapters: AdapterSet,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    config: SamplingConfig,
    seeds: Sequence[int],
    observer: Observer,
) -> Rollouts:
    """Draw ``config.images_per_prompt`` images of every prompt with the *old* policy, and score them.

    A batch is scored while the next one is drawn, if ``scorer`` is a ScoringService.

    Raises:
        RewardFailure: a reward failed on more than a fifth of the images it applies to.
        Stopped: the observer asked to stop.
    """
    started = time.perf_counter()
    groups = torch.arange(len(prompts)).repeat_interleave(config.images_per_prompt)
    conditioning = backbone.encode_prompts([prompt.prompt for prompt in prompts])
    parts: list[Tensor] = []
    waiting: list[Callable[[], Scores]] = []
    with adapters.using(OLD):
        if adapters.active != OLD:
            raise AssertionError("training images must come from the old policy")
        for start in range(0, len(seeds), config.batch_size):
            owners = groups[start : start + config.batch_size]
            latents = sample(
                backbone,
                conditioning.select(owners),
                seeds[start : start + config.batch_size],
                steps=config.steps,
                solver=config.solver,
                shift=config.shift,
                batch_size=config.batch_size,
                observer=observer,
            )
            parts.append(latents.float())
            asked = [prompts[owner] for owner in owners.tolist()]
            waiting.append(begin(scorer, backbone.decode(latents), asked))
    drawn = time.perf_counter()
    scores = joined([scored() for scored in waiting])
    check_failures(scores)
    return Rollouts(
        torch.cat(parts), groups, conditioning, scores, drawn - started, time.perf_counter() - drawn
    )


def check_failures(scores: Scores) -> None:
    """Raises RewardFailure naming every reward that failed on too many of the images it applies to."""
    failed, applicable = scores.failed.sum(1), scores.applicable.sum(1)
    bad = [
        f"{reward} failed on {failed[row]} of {applicable[row]} images" + _reason(scores, row)
        for row, reward in enumerate(scores.rewards)
        if failed[row] > MAX_FAILED_SHARE * applicable[row]
    ]
    if bad:
        raise RewardFailure("; ".join(bad))


def _reason(scores: Scores, row: int) -> str:
    return f": {scores.errors[row]}" if scores.errors and scores.errors[row] else ""
