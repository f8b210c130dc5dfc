"""Scores batches of images with several rewards at once, failures kept apart from bad scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError, EngineError, RewardFailure, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import PartialFailure, Reward, Scores
from recast_engine.rewards.catalogue import reward_info

logger = logging.getLogger(__name__)

SINGLE = np.finfo(np.float32)
"""What scores are computed in: one beyond its range has failed, one below it is 0."""


class Scorer:
    """R rewards applied together; what one of them does never hurts another."""

    def __init__(self, rewards: Sequence[Reward]):
        self._rewards = tuple(rewards)
        self.rewards: tuple[str, ...] = tuple(reward.id for reward in rewards)
        if len(set(self.rewards)) != len(self.rewards):
            raise ConfigError(f"rewards must differ, got {', '.join(self.rewards)}")

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        """(R, N) whether each prompt carries the metadata that each reward needs."""
        needs = [reward_info(reward).needs_metadata for reward in self.rewards]
        rows = [[all(prompt.has(name) for name in names) for prompt in prompts] for names in needs]
        return np.array(rows, dtype=bool).reshape(len(self.rewards), len(prompts))

    def select(self, rewards: Sequence[str]) -> Scorer:
        """A scorer of ``rewards`` alone, in that order. Raises ConfigError naming what is not here."""
        loaded = dict(zip(self.rewards, self._rewards, strict=True))
        if absent := [reward for reward in rewards if reward not in loaded]:
            raise ConfigError(f"rewards not loaded: {', '.join(absent)}")
        return Scorer([loaded[reward] for reward in rewards])

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        """Score ``images`` (N, H, W, 3) uint8 against ``prompts`` (N).

        A reward that raises gives NaN for the whole batch (what it has, if it raises PartialFailure), and
        ``Scores.errors`` and the log the reason; a value that is not finite becomes NaN. All count in
        ``Scores.failed``. A reward is never asked about a prompt without the metadata it needs.

        Raises:
            ValueError: images of another layout, or not one prompt per image.
        """
        check_batch(images, prompts)
        applicable = self.applicable(prompts)
        rows = [
            score_row(reward, images, prompts, applicable[row]) for row, reward in enumerate(self._rewards)
        ]
        return gather(self.rewards, applicable, rows)

    @property
    def members(self) -> tuple[Reward, ...]:
        """The rewards themselves, in order."""
        return self._rewards


@dataclass(frozen=True)
class Row:
    """One reward's scores (N,) of a batch, NaN where it does not apply or failed; ``error`` "" for none."""

    values: NDArray[np.float64]
    seconds: float
    error: str


def check_batch(images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for images of another layout than (N, H, W, 3) uint8, or not one prompt per image."""
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"expected uint8 images (N, H, W, 3), got {images.dtype} {images.shape}")
    if len(images) != len(prompts):
        raise ValueError(f"{len(images)} images for {len(prompts)} prompts")


def gather(rewards: tuple[str, ...], applicable: NDArray[np.bool_], rows: Sequence[Row]) -> Scores:
    """The scores of R rewards from their rows."""
    values = np.stack([row.values for row in rows]) if rows else np.full(applicable.shape, np.nan)
    seconds = np.array([row.seconds for row in rows])
    return Scores(rewards, values, applicable, seconds, tuple(row.error for row in rows))


def score_row(
    reward: Reward, images: NDArray[np.uint8], prompts: Sequence[Prompt], applicable: NDArray[np.bool_]
) -> Row:
    """Scores of one reward on the images it applies to."""
    values = np.full(len(images), np.nan)
    index = np.flatnonzero(applicable).tolist()
    start, error = time.perf_counter(), ""
    if index:
        values[index], error = _score(reward, images[index], [prompts[i] for i in index])
    return Row(values, time.perf_counter() - start, error)


def _score(
    reward: Reward, images: NDArray[np.uint8], prompts: Sequence[Prompt]
) -> tuple[NDArray[np.float64], str]:
    """Scores (N,) of one reward, NaN where it failed, and why ("" where it did not)."""
    error = ""
    try:
        try:
            given = reward.score(images, prompts)
        except PartialFailure as failure:
            logger.warning("reward %s: %s", reward.id, failure)
            given, error = failure.values, str(failure)
        values = np.asarray(given, dtype=np.float64)
        if values.shape != (len(images),):
            raise RewardFailure(f"{len(images)} images gave scores of shape {values.shape}")
    except Exception as failure:
        logger.exception("reward %s failed on %d images: %s", reward.id, len(images), type(failure).__name__)
        # Only our own errors are worded for people; another's text may hold paths of this machine.
        told = str(failure) if isinstance(failure, EngineError) else type(failure).__name__
        return np.full(len(images), np.nan), told
    values = np.where(np.abs(values) < SINGLE.tiny, 0.0, values)
    finite = np.abs(values) <= SINGLE.max  # not NaN either
    if not error and not finite.all():
        error = "no finite score"
    return np.where(finite, values, np.nan), error


def load_scorer(rewards: Sequence[str], world: RewardWorld, *, device: str = "cpu") -> Scorer:
    """Load ``rewards`` with the checkpoints that score images of ``world``.

    Raises:
        ConfigError: an unknown reward, or one named twice.
        WeightsUnavailable: a reward cannot score here; the text says why and what to do.
    """
    for reward in rewards:
        if reason := reward_info(reward).missing(world):
            raise WeightsUnavailable(f"reward {reward!r} is not available: {reason}")
    return Scorer([reward_info(reward).load(world, device) for reward in rewards])
