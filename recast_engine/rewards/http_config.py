"""How an HTTP reward is configured in the operator's file, and its catalogue entry. No network, no torch."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.config import STRICT
from recast_engine.errors import ConfigError
from recast_engine.rewards import plugins
from recast_engine.rewards.base import Reward
from recast_engine.rewards.info import WORLDS, RewardInfo, Role, Setting

ImageFormat = Literal["png", "webp", "safetensors"]


@dataclass(frozen=True, config=STRICT)
class HttpRewardConfig:
    """One ``[http.<id>]`` table. ``url`` is called by workers; no client of the API can name or change it.

    Attributes:
        url: where to POST (docs/rewards.md has the schema).
        reward: name of the reward on the server; the table's own id where it is left out.
        key_env: environment variable that holds the bearer token, if the server wants one.
        format: how images travel: lossless PNG or WebP in JSON, or one safetensors body.
        batch: images in one request.
        concurrency: requests under way at once.
        timeout_seconds: of one request.
        retries: further attempts after a refused connection, a timeout, 429 or 5xx.
    """

    url: str
    objective: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    range: tuple[float, float]
    licence: Annotated[str, Field(min_length=1, max_length=200)]
    summary: Annotated[str, Field(max_length=400)] = "a reward served over HTTP"
    role: Role = "both"
    reward: Annotated[str, Field(max_length=80)] | None = None
    needs_metadata: tuple[Literal["text", "include", "exclude", "tag"], ...] = ()
    worlds: tuple[RewardWorld, ...] = WORLDS
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    format: ImageFormat = "png"
    batch: Annotated[int, Field(ge=1, le=256)] = 16
    concurrency: Annotated[int, Field(ge=1, le=64)] = 4
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    retries: Annotated[int, Field(ge=0, le=10)] = 2

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        parts = urlsplit(value)
        _ = parts.port  # raises ValueError where it is no port
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http or https address")
        if parts.username or parts.password:
            raise ValueError("must hold no password; name an environment variable in key_env")
        return value

    @field_validator("range")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (math.isfinite(value[0]) and math.isfinite(value[1]) and value[0] < value[1]):
            raise ValueError("must be the lowest and the highest score")
        return value

    def key(self) -> str | None:
        """The bearer token, from the environment."""
        return os.environ.get(self.key_env) if self.key_env else None


def info(id: str, table: Mapping[str, Any]) -> RewardInfo:
    """The catalogue entry of the table ``http.<id>``. Raises ConfigError naming the field."""
    plugins.check_id(id)
    try:
        config = TypeAdapter(HttpRewardConfig).validate_python(dict(table))
    except ValidationError as error:
        problems = [
            f"http.{id}.{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()
        ]
        raise ConfigError("; ".join(problems)) from None
    wanted = (Setting(config.key_env, f"the key of reward {id}"),) if config.key_env else ()
    return RewardInfo(
        id,
        config.objective,
        config.summary,
        config.range,
        config.role,
        config.licence,
        partial(_load, id, config),
        needs_metadata=config.needs_metadata,
        worlds=config.worlds,
        requires=dict.fromkeys(config.worlds, wanted),
        version=hashlib.sha256(f"{config.url} {config.reward or id}".encode()).hexdigest()[:16],
    )


def _load(id: str, config: HttpRewardConfig, world: RewardWorld, device: str) -> Reward:
    from recast_engine.rewards.http import HttpReward

    return HttpReward(id, config)
