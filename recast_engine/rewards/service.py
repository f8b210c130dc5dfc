"""The scoring service of a job: rewards work beside the sampler, and one that keeps failing ends the job.

Rewards are sorted into lanes, each with a thread of its own: what runs on the device takes turns there; what
runs on the CPU (OCR) and what waits for other machines goes on beside it. A reward never sees two batches at
once, and batches are scored in the order they came in.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from recast_engine.config import MAX_FAILED_SHARE
from recast_engine.errors import RewardFailure
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Reward, Scores
from recast_engine.rewards.scoring import Row, Scorer, check_batch, gather, score_row

MIN_IMAGES = 32
"""Images that a reward must have been asked about before its share of failures counts."""
CACHED_SCORES = 200_000
"""Scores kept by image hash; the oldest go first."""


@dataclass
class Tally:
    """How one reward has fared so far in the job."""

    asked: int = 0
    failed: int = 0
    error: str = ""


class ScoreCache:
    """One reward's finite scores by image and prompt: nothing is scored twice. For one thread at a time."""

    def __init__(self, size: int = CACHED_SCORES):
        self._size = size
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    def get(self, key: bytes) -> float:
        """The score, or NaN."""
        return self._scores.get(key, float("nan"))

    def put(self, key: bytes, score: float) -> None:
        """Keep a score, if it is one."""
        if np.isfinite(score):
            self._scores[key] = score
            if len(self._scores) > self._size:
                self._scores.popitem(last=False)


def image_key(image: NDArray[np.uint8], prompt: Prompt) -> bytes:
    """SHA-256 of the pixels, their shape, and the prompt with its metadata."""
    digest = hashlib.sha256(image.tobytes())
    digest.update(repr(image.shape).encode())
    digest.update(json.dumps(prompt.to_json(), sort_keys=True).encode())
    return digest.digest()


class Pending:
    """Scores that are being made."""

    def __init__(self, service: ScoringService, applicable: NDArray[np.bool_], rows: Sequence[Future[Row]]):
        self._service, self._applicable, self._rows = service, applicable, rows

    def result(self) -> Scores:
        """Wait for the scores. Raises RewardFailure when a reward fails on too many of the job's images."""
        scores = gather(self._service.rewards, self._applicable, [row.result() for row in self._rows])
        self._service.check(scores)
        return scores


class Asked(Protocol):
    """What ``begin`` needs of a scorer."""

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        """Scores of ``images`` (N, H, W, 3) against ``prompts`` (N)."""


def begin(scorer: Asked, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Callable[[], Scores]:
    """Start to score, and return what waits for the scores; a scorer without threads scores at once."""
    if isinstance(scorer, ScoringService):
        return scorer.submit(images, prompts).result
    scores = scorer(images, prompts)
    return lambda: scores


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of several batches of images as one."""
    return Scores(
        parts[0].rewards,
        np.concatenate([part.values for part in parts], axis=1),
        np.concatenate([part.applicable for part in parts], axis=1),
        np.sum([part.seconds for part in parts], axis=0),
        last_errors(parts),
    )


def last_errors(parts: Sequence[Scores]) -> tuple[str, ...]:
    """Per reward the last error of several batches, "" where there was none; empty where nobody kept them."""
    kept = [part.errors for part in parts if part.errors]
    return tuple(next(filter(None, reversed(texts)), "") for texts in zip(*kept, strict=True))


class ScoringService:
    """A :class:`Scorer` with threads: ``submit`` returns at once, a call waits for the scores.

    Use as a context manager, or ``close`` it. ``select`` gives a view that shares threads, tallies and cache.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        device: str = "cpu",
        cache: bool = False,
        max_failed_share: float = MAX_FAILED_SHARE,
    ):
        """``device`` of the local rewards: on the CPU they share one lane, as they share its cores."""
        self._scorer, self._share = scorer, max_failed_share
        self.rewards = scorer.rewards
        self._single = device == "cpu"
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._tallies: dict[str, Tally] = {reward: Tally() for reward in scorer.rewards}
        self._caches: dict[str, ScoreCache] | None = (
            {reward: ScoreCache(CACHED_SCORES // len(scorer.rewards)) for reward in scorer.rewards}
            if cache
            else None
        )
        self._lock = threading.Lock()

    def __enter__(self) -> ScoringService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the threads; batches that have not begun are dropped."""
        with self._lock:
            pools, self._pools = dict(self._pools), {}
        for pool in pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        """(R, N) whether each prompt carries the metadata that each reward needs."""
        return self._scorer.applicable(prompts)

    def select(self, rewards: Sequence[str]) -> ScoringService:
        """The service of ``rewards`` alone, in that order. Raises ConfigError naming what is not here."""
        view = object.__new__(ScoringService)
        view.__dict__.update(self.__dict__)
        view._scorer = self._scorer.select(rewards)
        view.rewards = view._scorer.rewards
        return view

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        """Score and wait. Raises what ``submit`` and ``Pending.result`` raise."""
        return self.submit(images, prompts).result()

    def submit(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Pending:
        """Begin to score ``images`` (N, H, W, 3) uint8; the array must not change until the result is there.

        Raises:
            ValueError: images of another layout, or not one prompt per image.
        """
        check_batch(images, prompts)
        applicable = self.applicable(prompts)
        keys = None
        if self._caches is not None:
            keys = [image_key(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        rows = [
            self._pool(reward).submit(self._row, reward, images, list(prompts), applicable[row], keys)
            for row, reward in enumerate(self._scorer.members)
        ]
        return Pending(self, applicable, rows)

    def _pool(self, reward: Reward) -> ThreadPoolExecutor:
        lane = getattr(reward, "lane", "device")
        if lane == "remote":
            lane = f"remote:{reward.id}"
        elif self._single:
            lane = "device"
        with self._lock:
            if lane not in self._pools:
                self._pools[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"scoring-{lane}")
            return self._pools[lane]

    def _row(
        self,
        reward: Reward,
        images: NDArray[np.uint8],
        prompts: Sequence[Prompt],
        applicable: NDArray[np.bool_],
        keys: Sequence[bytes] | None,
    ) -> Row:
        if keys is None or self._caches is None:
            return score_row(reward, images, prompts, applicable)
        cache = self._caches[reward.id]
        known = np.array([cache.get(key) for key in keys])
        first: dict[bytes, int] = {}  # an image that stands twice in the batch is asked about once
        place = np.array([first.setdefault(key, index) for index, key in enumerate(keys)], dtype=np.intp)
        asked = applicable & ~np.isfinite(known) & (place == np.arange(len(keys)))
        row = score_row(reward, images, prompts, asked)
        for key, value in zip(keys, row.values.tolist(), strict=True):
            cache.put(key, value)
        values = np.where(applicable & np.isfinite(known), known, row.values[place])
        return Row(values, row.seconds, row.error)

    def check(self, scores: Scores) -> None:
        """Add ``scores`` to the job's tally. Raises RewardFailure with the error of a reward that fails."""
        failed, asked = scores.failed.sum(1), scores.applicable.sum(1)
        bad = []
        with self._lock:
            for row, reward in enumerate(scores.rewards):
                tally = self._tallies[reward]
                tally.asked += int(asked[row])
                tally.failed += int(failed[row])
                tally.error = (scores.errors[row] if scores.errors else "") or tally.error
                if tally.asked >= MIN_IMAGES and tally.failed > self._share * tally.asked:
                    why = f": {tally.error}" if tally.error else ""
                    bad.append(f"{reward} failed on {tally.failed} of {tally.asked} images{why}")
        if bad:
            raise RewardFailure("; ".join(bad))

    @property
    def tallies(self) -> dict[str, Tally]:
        """How each reward has fared so far."""
        return dict(self._tallies)
