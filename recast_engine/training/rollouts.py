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
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.guards import group_diversity

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
        held_out: of the N images, by the collapse guard's held-out reward; None: there is none.
        diversity: (P,) float64, how much the images of each group differ (``guards.group_diversity``).
        sampling_seconds: time to draw and decode, and to score on the way.
        scoring_seconds: time spent waiting for scores once all was drawn.
    """

    latents: Tensor
    groups: Tensor
    conditioning: Conditioning
    scores: Scores
    held_out: Scores | None
    diversity: NDArray[np.float64]
    sampling_seconds: float
    scoring_seconds: float

    @property
    def reward_calls(self) -> int:
        """Images scored, summed over the rewards that apply to each, the held-out one among them."""
        parts = (self.scores,) if self.held_out is None else (self.scores, self.held_out)
        return sum(int(part.applicable.sum()) for part in parts)


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
    scorers: Sequence[Scorer],
    prompts: Sequence[Prompt],
    config: SamplingConfig,
    seeds: Sequence[int],
    observer: Observer,
    devices: Devices = ALONE,
) -> Rollouts:
    """Draw ``config.images_per_prompt`` images of every prompt with the *old* policy, and score them.

    A batch is scored while the next one is drawn, by every scorer that is a ScoringService.

    Args:
        scorers: the stage's, and that of the held-out reward if there is one.
        devices: each draws and scores its share of the prompts.

    Raises:
        RewardFailure: a reward failed on more than a fifth of the images it applies to.
        Stopped: the observer asked to stop.
    """
    started = time.perf_counter()
    count, per_prompt = len(prompts), config.images_per_prompt
    groups = torch.arange(count).repeat_interleave(per_prompt)
    owners = [prompts[group] for group in groups.tolist()]
    conditioning = backbone.encode_prompts([prompt.prompt for prompt in prompts])
    mine = devices.share(count)
    last = mine.stop * per_prompt
    latents: list[Tensor] = []
    images: list[NDArray[np.uint8]] = []
    waiting: list[list[Callable[[], Scores]]] = []
    with adapters.using(OLD):
        if adapters.active != OLD:
            raise AssertionError("training images must come from the old policy")
        for start in range(mine.start * per_prompt, last, config.batch_size):
            batch = slice(start, min(start + config.batch_size, last))
            drawn = sample(
                backbone,
                conditioning.select(groups[batch]),
                seeds[batch],
                steps=config.steps,
                solver=config.solver,
                shift=config.shift,
                batch_size=config.batch_size,
                observer=observer if devices.size == 1 else None,  # ranks stop together, in the update
            )
            latents.append(drawn.float())
            images.append(backbone.decode(drawn))
            waiting.append([begin(scorer, images[-1], owners[batch]) for scorer in scorers])
    sampled = time.perf_counter()
    own = [joined([scored() for scored in parts]) for parts in zip(*waiting, strict=True)]
    scores = [
        _everyones(one, scorer, owners, count, devices) for one, scorer in zip(own, scorers, strict=True)
    ]
    check_failures(scores[0])
    waited = time.perf_counter() - sampled
    grouped = np.concatenate(images).reshape(len(mine), per_prompt, *images[0].shape[1:])
    diversity = torch.tensor([group_diversity(group) for group in grouped], dtype=torch.float64)
    by_group = torch.cat(latents).reshape(len(mine), per_prompt, *latents[0].shape[1:])
    return Rollouts(
        devices.join(by_group, count).flatten(0, 1),
        groups,
        conditioning,
        scores[0],
        scores[1] if len(scores) > 1 else None,
        devices.join(diversity, count).numpy(),
        sampled - started,
        waited,
    )


def _everyones(own: Scores, scorer: Scorer, owners: Sequence[Prompt], count: int, devices: Devices) -> Scores:
    """The scores of all ``count`` groups from those of this device's."""
    if devices.size == 1:
        return own
    values = torch.from_numpy(own.values.T.copy()).reshape(-1, len(owners) // count, len(own.rewards))
    joined_values = devices.join(values, count).flatten(0, 1).numpy().T
    seconds = devices.add(torch.from_numpy(own.seconds.copy())).numpy()
    return Scores(own.rewards, joined_values, scorer.applicable(owners), seconds, own.errors)


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
