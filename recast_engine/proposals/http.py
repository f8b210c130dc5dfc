"""The HTTP client under the SDKs: answers bounded in bytes and in time, nothing secret in logs or errors."""

from __future__ import annotations

import email.utils
import logging
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import httpx

from recast_engine.errors import ProposalFailure
from recast_engine.proposals.images import MAX_IMAGE_BYTES
from recast_engine.proposals.provider import Retryable

MAX_ANSWER_BYTES = 2 * MAX_IMAGE_BYTES
"""An image in base64 takes 4/3 of its bytes."""

_MAX_DETAIL = 200


class AnswerTooLarge(Exception):
    """The answer's body is longer than any image."""


def make_client() -> httpx.Client:
    """A client for an SDK. Proxies come from the environment; redirects are not followed with the key."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses, which may hold a password
    return httpx.Client(event_hooks={"request": [_start], "response": [_bound]}, follow_redirects=False)


def _start(request: httpx.Request) -> None:
    request.extensions["began"] = time.monotonic()


def _bound(response: httpx.Response) -> None:
    """httpx limits the silence between two pieces of an answer; this limits the whole."""
    assert isinstance(response.stream, httpx.SyncByteStream)
    seconds = response.request.extensions.get("timeout", {}).get("read")
    began = response.request.extensions["began"]
    response.stream = _Bounded(response.stream, None if seconds is None else began + seconds)


class _Bounded(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, deadline: float | None):
        self._stream, self._deadline = stream, deadline

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._stream:
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise AnswerTooLarge
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise httpx.ReadTimeout("the answer took too long")
            yield piece

    def close(self) -> None:
        self._stream.close()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait (RFC 9110 10.2.3: seconds or a date), None when it does not say."""
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (email.utils.parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):  # neither form, or a date without a zone
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


def status_error(name: str, status: int, headers: Mapping[str, str], detail: str, key: str) -> Exception:
    """What to raise for an answer with an error status: Retryable or ProposalFailure.

    ``detail`` is the provider's own text; the key is taken out of it, and where the key itself is what is
    wrong (providers then quote parts of it) nothing of it is told.
    """
    if status in (401, 403):
        return ProposalFailure(f"{name}: the API key was refused (status {status}); check it and its rights")
    text = f"{name}: status {status}"
    if told := detail.replace(key, "[key]")[:_MAX_DETAIL].strip():
        text = f"{text}: {told}"
    if status == 429:
        return Retryable(text, limited=True, after=retry_after(headers))
    if status in (408, 409, 425) or status >= 500:
        return Retryable(text, after=retry_after(headers))
    return ProposalFailure(text)
