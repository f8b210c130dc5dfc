"""``recast serve-rewards``: rewards of this machine's catalogue over HTTP, for workers elsewhere.

A reward with an environment of its own (other packages, another device) runs here alone; the operator of the
service names this address in an ``[http.<id>]`` table (docs/rewards.md has the schema).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import InvalidArgument
from recast_engine.rewards.catalogue import reward_info
from recast_engine.rewards.scoring import Scorer
from recast_engine.rewards.wire import ScoreRequest, decode_request, encode_scores

KEY = "RECAST_REWARD_SERVER_KEY"
MAX_BODY = 256 * 1024 * 1024


class Refused(Exception):
    """A request that is not answered with scores."""

    def __init__(self, status: int, title: str, detail: str):
        self.status, self.title, self.detail = status, title, detail
        super().__init__(detail)


def create_app(scorer: Scorer, *, key: str | None = None, max_body: int = MAX_BODY) -> FastAPI:
    """The server of ``scorer``'s rewards; with ``key``, only for who sends it as a bearer token.

    Requests are scored one after another: a reward is never asked twice at the same time.
    """
    app = FastAPI(title="ReCAST rewards", docs_url=None, redoc_url=None, openapi_url=None)
    turns = anyio.CapacityLimiter(1)

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> JSONResponse:
        body = {"type": "about:blank", "title": error.title, "status": error.status, "detail": error.detail}
        return JSONResponse(body, error.status, media_type="application/problem+json")

    def admit(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise Refused(401, "Unauthorized", "send the server's key as a bearer token")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/rewards")
    async def rewards(request: Request) -> dict[str, list[dict[str, object]]]:
        admit(request)
        return {"data": [_described(reward) for reward in scorer.rewards]}

    @app.post("/v1/score")
    async def score(request: Request) -> JSONResponse:
        admit(request)
        body = await _body(request, max_body)
        content_type = request.headers.get("content-type", "")
        answer = await anyio.to_thread.run_sync(_score, scorer, body, content_type, limiter=turns)
        return JSONResponse(answer)

    return app


async def _body(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refused(413, "Too large", f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _score(scorer: Scorer, body: bytes, content_type: str) -> dict[str, object]:
    try:
        asked = decode_request(body, content_type)
    except InvalidArgument as error:
        raise Refused(422, "Unprocessable", str(error)) from None
    if asked.reward not in scorer.rewards:
        known = ", ".join(scorer.rewards)
        raise Refused(
            404, "Not found", f"reward: {asked.reward[:80]!r} is not served here; there are {known}"
        )
    return _answer(scorer, asked)


def _answer(scorer: Scorer, asked: ScoreRequest) -> dict[str, object]:
    """Scores, null where the reward failed or the prompt lacks what it needs, and the last error if any."""
    scores = scorer.select([asked.reward])(asked.images, asked.prompts)
    error = next(filter(None, scores.errors), None)
    if error is None and not scores.applicable.all():
        needs = " and ".join(repr(name) for name in reward_info(asked.reward).needs_metadata)
        error = f"some prompts lack {needs}"
    return encode_scores(scores.values[0]) | ({"error": error} if error else {})


def _described(reward: str) -> dict[str, object]:
    info = reward_info(reward)
    return {
        "id": info.id,
        "objective": info.objective,
        "summary": info.summary,
        "range": info.range,
        "licence": info.licence,
        "needs_metadata": info.needs_metadata,
    }


def load_app(rewards: Sequence[str], world: RewardWorld, device: str, key: str | None) -> FastAPI:
    """The server of ``rewards``, loaded. Raises ConfigError, WeightsUnavailable."""
    from recast_engine.rewards.scoring import load_scorer

    return create_app(load_scorer(rewards, world, device=device), key=key)
