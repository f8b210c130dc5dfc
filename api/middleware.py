"""Around every request: an id, an access-log line without secrets, counters, the body limit."""

from __future__ import annotations

import logging
import re
import time

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors
from api.metrics import RequestMetrics
from api.refusals import TooLarge
from store.ids import new_id

ACCESS = logging.getLogger("api.access")
_SAFE_PATH = re.compile(r"[^\x21-\x7e]")


class Observed:
    """Gives each request an id, logs and counts it, and answers unexpected errors."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_id("req")
        started = time.perf_counter()
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except ClientDisconnect:
            ACCESS.info("%s: the client left before the answer was complete", request_id)
        except Exception as error:
            if status:
                raise
            response = errors.unexpected(scope["path"], error)
            await response(scope, receive, observed)
        finally:
            self._record(scope, request_id, status, time.perf_counter() - started)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self.metrics.observe(scope["method"], route, status, seconds)
        path = _SAFE_PATH.sub("?", scope["path"])[:300]
        ACCESS.info("%s %s %s %d %.1fms", request_id, scope["method"], path, status, seconds * 1e3)


class BodyLimit:
    """Refuses bodies over ``limit`` bytes (``uploads`` for the paths that take files), chunked ones too."""

    def __init__(self, app: ASGIApp, limit: int, uploads: dict[str, int]):
        self.app = app
        self.limit = limit
        self.uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.uploads.get(scope["path"], self.limit)
        refusal = TooLarge(f"the body is over the limit of {limit} bytes")
        declared = Request(scope).headers.get("content-length", "0")
        if declared.isdecimal() and len(declared) < 20 and int(declared) <= limit:
            await self.app(scope, _counted(receive, limit, refusal), send)
            return
        await errors.refused(scope["path"], refusal)(scope, receive, send)


def _counted(receive: Receive, limit: int, refusal: TooLarge) -> Receive:
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise refusal
        return message

    return counted
