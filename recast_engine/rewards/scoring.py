"""Scores batches of images with several rewards at once, failures kept apart from bad scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recast_engine import miniature
from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Reward, Scores
from recast_engine.rewards.catalogue import reward_info

if TYPE_CHECKING:
    from recast_engine.rewards.clip import ClipEmbedder

logger = logging.getLogger(__name__)


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

        A reward that raises gives NaN for the whole batch, and the log the reason; a value that is not
        finite becomes NaN. Both count in ``Scores.failed``. A reward is never asked about a prompt without
        the metadata it needs.

        Raises:
            ValueError: images of another layout, or not one prompt per image.
        """
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise ValueError(f"expected uint8 images (N, H, W, 3), got {images.dtype} {images.shape}")
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images for {len(prompts)} prompts")
        applicable = self.applicable(prompts)
        values = np.full(applicable.shape, np.nan)
        seconds = np.zeros(len(self.rewards))
        for row, reward in enumerate(self._rewards):
            index = np.nonzero(applicable[row])[0].tolist()
            start = time.perf_counter()
            if index:
                values[row, index] = _score(reward, images[index], [prompts[i] for i in index])
            seconds[row] = time.perf_counter() - start
        return Scores(self.rewards, values, applicable, seconds)


def _score(reward: Reward, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
    """Scores (N,) of one reward, NaN where it failed."""
    try:
        values = np.asarray(reward.score(images, prompts), dtype=np.float64)
        if values.shape != (len(images),):
            raise ValueError(f"{len(images)} images gave scores of shape {values.shape}")
    except Exception as error:
        logger.exception("reward %s failed on %d images: %s", reward.id, len(images), type(error).__name__)
        return np.full(len(images), np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def load_scorer(rewards: Sequence[str], world: RewardWorld, *, device: str = "cpu") -> Scorer:
    """Load ``rewards`` with the checkpoints that score images of ``world``.

    Raises:
        ConfigError: an unknown reward, or one named twice.
        WeightsUnavailable: a reward cannot score here; the text says why and what to do.
    """
    for reward in rewards:
        if reason := reward_info(reward).missing(world):
            raise WeightsUnavailable(f"reward {reward!r} is not available: {reason}")
    return Scorer([_LOADERS[reward](world, device) for reward in rewards])


def _geneval(world: RewardWorld, device: str) -> Reward:
    from recast_engine.miniature.detector import MiniatureDetector
    from recast_engine.rewards.geneval import GenEval, Rules

    # GenEval asks for 0.9 when counting because its detector reports one object several times. The
    # miniature's does not, and its confidence measures how crisp a shape is.
    return GenEval(MiniatureDetector(), Rules(counting_threshold=Rules.threshold))


def _ocr(world: RewardWorld, device: str) -> Reward:
    from recast_engine.rewards.ocr import OCR

    return OCR()


def _clipscore(world: RewardWorld, device: str) -> Reward:
    from recast_engine.rewards.clipscore import ClipScore

    return ClipScore(_embedder("clipscore", world, device))


def _hpsv2(world: RewardWorld, device: str) -> Reward:
    from recast_engine.rewards.hpsv2 import HPSv2

    return HPSv2(_embedder("hpsv2", world, device))


def _pickscore(world: RewardWorld, device: str) -> Reward:
    from recast_engine.rewards.pickscore import PickScore

    return PickScore(_embedder("pickscore", world, device))


def _aesthetic(world: RewardWorld, device: str) -> Reward:
    from recast_engine.rewards.aesthetic import Aesthetic

    return Aesthetic.load(_embedder("aesthetic", world, device), miniature.reward_weights("aesthetic"))


def _embedder(reward: str, world: RewardWorld, device: str) -> ClipEmbedder:
    """CLIP with the reward's weights: the packaged ones of the miniature, or the public checkpoint."""
    from recast_engine.rewards.clip import ClipEmbedder

    if world == "miniature":
        return ClipEmbedder.load(miniature.reward_weights(reward), device=device)
    info = reward_info(reward)
    return ClipEmbedder.load(str(info.public_source), revision=info.public_revision, device=device)


_LOADERS: dict[str, Callable[[RewardWorld, str], Reward]] = {
    "clipscore": _clipscore,
    "hpsv2": _hpsv2,
    "pickscore": _pickscore,
    "geneval": _geneval,
    "ocr": _ocr,
    "aesthetic": _aesthetic,
}
