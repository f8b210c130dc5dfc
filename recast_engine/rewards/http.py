"""A reward behind an HTTP endpoint that the operator has configured (docs/rewards.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine.prompts import Prompt
from recast_engine.rewards.http_config import HttpRewardConfig
from recast_engine.rewards.remote import FIRST_PAUSE, Endpoint, score_parts
from recast_engine.rewards.wire import ScoreRequest, decode_scores, encode_request


class HttpReward:
    """Sends images in batches and reads scores; a batch that fails costs its own scores and no others."""

    lane = "remote"

    def __init__(self, id: str, config: HttpRewardConfig, *, first_pause: float = FIRST_PAUSE):
        self.id, self._config = id, config
        self._endpoint = Endpoint(
            id,
            config.url,
            key=config.key(),
            timeout=config.timeout_seconds,
            retries=config.retries,
            first_pause=first_pause,
        )

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,) of ``images`` (N, H, W, 3).

        Raises:
            PartialFailure, RewardFailure: some or all batches got no usable answer, or the server says why it
                has no score for some images.
        """
        size = self._config.batch
        parts = [range(start, min(start + size, len(images))) for start in range(0, len(images), size)]

        def one(part: range) -> NDArray[np.float64]:
            rows = slice(part.start, part.stop)
            request = ScoreRequest(self._config.reward or self.id, images[rows], tuple(prompts[rows]))
            answer = self._endpoint.post(*encode_request(request, self._config.format))
            return decode_scores(answer, len(part))

        return score_parts(parts, one, [len(part) for part in parts], self._config.concurrency)
