"""Buying images: several requests at once, retried with patience, stored one by one as they arrive."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recast_engine.config import ProposalConfig
from recast_engine.errors import ProposalFailure
from recast_engine.observer import Observer, Stopped
from recast_engine.proposals.images import UnusableImage, read_image, write_png
from recast_engine.proposals.keys import image_key
from recast_engine.proposals.provider import Provider, Refused, Retryable

log = logging.getLogger(__name__)

BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0
POLL_SECONDS = 0.5
LEAVE_SECONDS = 45.0
"""How long requests under way are waited for when the work ends early: their images are paid."""


@dataclass(frozen=True)
class Wanted:
    """An image to get: number ``number`` of ``prompt``."""

    prompt_key: str
    prompt: str
    number: int

    @property
    def key(self) -> str:
        """What it is known by."""
        return image_key(self.prompt_key, self.number)

    def metadata(self, config: ProposalConfig) -> dict[str, Any]:
        """What is told of the image when it is there."""
        return {
            "prompt_key": self.prompt_key,
            "number": self.number,
            "prompt": self.prompt,
            "source": config.source,
            "model": config.model,
        }


class _Leaving(Exception):
    """The purchase ends early; this image is not asked for again."""


class Purchase:
    """One run of buying.

    Attributes:
        refused: prompts that moderation declined.
        spent: answers that may be charged for.

    An image is written to ``cache`` and handed to the observer before the next result is looked at, so what
    was reported is never bought again, however the process ends.
    """

    def __init__(
        self,
        provider: Provider,
        config: ProposalConfig,
        *,
        cache: Path,
        observer: Observer,
        allowance: int,
        at_least: int,
    ) -> None:
        """
        Args:
            allowance: answers that may be charged for, the unusable ones among them.
            at_least: pixels that each side of an image must have.
        """
        self.refused: set[str] = set()
        self._provider, self._config, self._cache = provider, config, cache
        self._observer, self._at_least = observer, at_least
        self._exactly = (config.size, config.size) if config.source == "openai" and config.size else None
        self._deadline = time.monotonic() + config.deadline_seconds
        self._lock = threading.Lock()
        self._allowance, self.spent, self._reported = allowance, 0, 0
        self._under_way = 0
        self._not_before = 0.0  # of every request: the provider limits the account, not one of its callers
        self._leaving = threading.Event()
        self._failure: BaseException | None = None
        self._jitter = random.Random()

    def run(self, wanted: Iterable[Wanted], done: int) -> None:
        """Buy everything ``wanted``; progress counts on from ``done``.

        Raises:
            ProposalFailure: an image cannot be had, the budget is spent, or the deadline has passed. What was
                bought is stored.
            Stopped: the observer asked to stop.
        """
        todo, pending = iter(wanted), dict[Future[Path | None], Wanted]()
        pool = ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="proposals")
        give_up_at = float("inf")
        try:
            while time.monotonic() < give_up_at:
                while not self._leaving.is_set() and len(pending) < self._config.concurrency:
                    item = next(todo, None)
                    if item is None:
                        break
                    pending[pool.submit(self._buy, item)] = item
                if not pending:
                    break
                finished, _ = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                self._report()  # before the images: a process that dies between has told what they cost
                for future in finished:
                    done += self._take(pending.pop(future), future)
                    self._observer.advance(done)
                if not self._leaving.is_set() and self._observer.should_stop():
                    self._leave(Stopped())
                if self._leaving.is_set():
                    give_up_at = min(give_up_at, time.monotonic() + LEAVE_SECONDS)
        finally:
            self._leaving.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if self._failure is not None:
            raise self._failure

    def _take(self, item: Wanted, future: Future[Path | None]) -> int:
        """Store what came of an image; returns how many images that settles."""
        try:
            path = future.result()
        except _Leaving:
            return 0
        except ProposalFailure as error:
            self._leave(error)
            return 0
        if path is not None:
            self._observer.file("proposal", path.name, path, item.metadata(self._config))
        return 1

    def _leave(self, reason: BaseException) -> None:
        self._failure = self._failure or reason
        self._leaving.set()

    def _report(self) -> None:
        """Tell the cost of what was answered since the last time."""
        with self._lock:
            charged = self.spent - self._under_way
            new, self._reported = charged - self._reported, charged
        if new:
            self._observer.cost(proposal_images=new)

    def _buy(self, item: Wanted) -> Path | None:
        """In a thread of its own: the image in the cache, or None when its prompt is refused."""
        path = self._cache / f"{item.key}.png"
        tries = limits = 0
        while True:
            self._hold(self._not_before - time.monotonic())
            if item.prompt in self.refused:
                return None
            try:
                write_png(read_image(self._ask(item), at_least=self._at_least, exactly=self._exactly), path)
                return path
            except Refused:
                self.refused.add(item.prompt)
                return None
            except UnusableImage as error:
                trouble = Retryable(f"{self._provider.name}: the image {error}", billed=True)
            except Retryable as error:
                trouble = error
            tries, limits = tries + (not trouble.limited), limits + trouble.limited
            if tries >= self._config.attempts:
                if trouble.declined:
                    self.refused.add(item.prompt)
                    return None
                raise ProposalFailure(f"{trouble} (asked {tries} times for one image)")
            self._back_off(trouble, limits if trouble.limited else tries)

    def _ask(self, item: Wanted) -> bytes:
        """One request, within budget and deadline; what it may cost is counted however it ends."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ProposalFailure(self._too_late())
        with self._lock:
            if self.spent >= self._allowance:
                raise ProposalFailure(
                    f"max_images: the budget of {self._config.max_images} images is spent, part of it on "
                    "answers that could not be used; raise it to go on, what was bought is kept"
                )
            self.spent += 1
            self._under_way += 1
        charged = 1
        try:
            return self._provider.ask(item.prompt, min(self._config.request_seconds, left))
        except Retryable as error:
            charged = int(error.billed)
            raise
        except (Refused, ProposalFailure):
            charged = 0
            raise
        finally:
            with self._lock:
                self._under_way -= 1
                self.spent -= 1 - charged

    def _back_off(self, trouble: Retryable, times: int) -> None:
        """Wait after the ``times``-th trouble of its kind: what the provider asks for, else exponentially."""
        if trouble.after is not None:
            seconds = trouble.after * (1 + 0.1 * self._jitter.random())
        else:
            longest = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** min(times - 1, 30))
            seconds = longest * (0.5 + 0.5 * self._jitter.random())
        log.info("%s; waiting %.1f s", trouble, seconds)
        if trouble.limited:
            with self._lock:
                self._not_before = max(self._not_before, time.monotonic() + seconds)
        self._hold(seconds, trouble)

    def _hold(self, seconds: float, trouble: Retryable | None = None) -> None:
        """Wait, unless the purchase is leaving or the deadline would pass meanwhile."""
        if seconds > 0 and time.monotonic() + seconds > self._deadline:
            raise ProposalFailure(self._too_late(trouble))
        if self._leaving.wait(max(0.0, seconds)):
            raise _Leaving

    def _too_late(self, trouble: Retryable | None = None) -> str:
        last = f"; last: {trouble}" if trouble is not None else ""
        within = f"within {self._config.deadline_seconds:g} s"
        return f"deadline_seconds: not all images were there {within}; what was bought is kept{last}"
