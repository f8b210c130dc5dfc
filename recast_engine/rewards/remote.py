"""Calls an endpoint that the operator has configured: retries, timeouts, and a cap on concurrent requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
import numpy as np
from numpy.typing import NDArray

from recast_engine.errors import RewardFailure
from recast_engine.rewards.base import PartialFailure

logger = logging.getLogger(__name__)

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
MAX_ANSWER = 4 * 1024 * 1024
"""Bytes of an answer, unpacked, beyond which it is not read."""
Item = TypeVar("Item")


class Endpoint:
    """One address. Errors name the reward, never the address or the key.

    Redirects are not followed: the operator named this address and no other.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: str | None,
        timeout: float,
        retries: int,
        first_pause: float = FIRST_PAUSE,
    ):
        self.name, self._url, self._retries, self._pause = name, url, retries, first_pause
        self._timeout = timeout
        loopback = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        self._client = partial(
            httpx.AsyncClient,
            timeout=timeout,
            verify=httpx.create_ssl_context(trust_env=not loopback),
            follow_redirects=False,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=not loopback,
        )

    def post(self, content: bytes, content_type: str) -> bytes:
        """The body of the answer to a POST.

        Raises:
            RewardFailure: no answer with status 200, after all retries, or one larger than ``MAX_ANSWER``.
        """
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(self._pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                status, body = asyncio.run(self._exchange(content, content_type))
            except (httpx.TimeoutException, TimeoutError):
                problem = "the server did not answer in time"
            except httpx.HTTPError as error:
                problem = f"the server cannot be reached ({type(error).__name__})"
            else:
                if status == httpx.codes.OK:
                    return body
                problem = f"the server answered {status}"
                if status not in RETRIED:
                    break
            logger.warning("reward %s: %s (attempt %d)", self.name, problem, attempt + 1)
        raise RewardFailure(f"reward {self.name!r}: {problem}")

    async def _exchange(self, content: bytes, content_type: str) -> tuple[int, bytes]:
        """Status and, with status 200, body. The client's time-out is for each read, ours for all."""
        headers = {"Content-Type": content_type}
        body = bytearray()
        async with (
            asyncio.timeout(self._timeout),
            self._client() as client,
            client.stream("POST", self._url, content=content, headers=headers) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                return answer.status_code, b""
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER:
                    raise RewardFailure(
                        f"reward {self.name!r}: the server's answer is larger than {MAX_ANSWER} bytes"
                    )
        return answer.status_code, bytes(body)


def score_parts(
    parts: Sequence[Item],
    score: Callable[[Item], NDArray[np.float64]],
    sizes: Sequence[int],
    concurrency: int,
) -> NDArray[np.float64]:
    """Scores of all ``parts`` in order, at most ``concurrency`` at once.

    Raises:
        PartialFailure: some parts failed, or parts of them; it carries all scores, NaN for what failed.
        RewardFailure: every part failed outright; the first one's error.
    """

    def attempt(part: Item) -> NDArray[np.float64] | RewardFailure:
        try:
            return score(part)
        except RewardFailure as error:
            return error

    with ThreadPoolExecutor(max_workers=min(concurrency, max(1, len(parts)))) as pool:
        results = list(pool.map(attempt, parts))
    errors = [result for result in results if isinstance(result, RewardFailure)]
    if errors and len(errors) == len(results) and not any(isinstance(e, PartialFailure) for e in errors):
        raise errors[0]
    values = [_values(result, size) for result, size in zip(results, sizes, strict=True)]
    scores = np.concatenate(values) if values else np.zeros(0)
    if errors:
        raise PartialFailure(scores, str(errors[0]))
    return scores


def _values(result: NDArray[np.float64] | RewardFailure, size: int) -> NDArray[np.float64]:
    """Scores (size,) of a part, NaN for what failed."""
    if isinstance(result, PartialFailure):
        return result.values
    return np.full(size, np.nan) if isinstance(result, RewardFailure) else result
