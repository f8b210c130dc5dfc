"""A vision-language model as judge: UnifiedReward (Wang et al., arXiv 2503.05236), behind an endpoint.

Any server that speaks OpenAI's chat completions will do (vLLM, SGLang). The operator names it:

| variable | for |
| --- | --- |
| RECAST_UNIFIEDREWARD_URL | the API's base, for example http://127.0.0.1:8080/v1 |
| RECAST_UNIFIEDREWARD_KEY | bearer token, if the server wants one |
| RECAST_UNIFIEDREWARD_MODEL | served model name; "UnifiedReward" unless set |

The score is the number after the answer's last "Final Score:", 1 to 5. An answer without one is a failed
score, not a low one. The question below asks for the published checkpoint's form of answer in our words;
``[options.unifiedreward] question = "..."`` (with ``{prompt}``) puts another in its place.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError, RewardFailure, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.remote import FIRST_PAUSE, Endpoint, score_parts
from recast_engine.rewards.wire import JSON, encode_image

URL = "RECAST_UNIFIEDREWARD_URL"
KEY = "RECAST_UNIFIEDREWARD_KEY"
MODEL = "RECAST_UNIFIEDREWARD_MODEL"
LOWEST, HIGHEST = 1.0, 5.0
MAX_TOKENS = 1024

QUESTION = (
    "This image was generated from a text caption. Judge it by two things: how well it shows what the "
    "caption asks for (objects, their attributes and relations), and how good it looks (clarity, detail, "
    "colour, appeal). First list the caption's key elements, each as 'element (type): 1' if the image "
    "shows it or 'element (type): 0' if not. Then give one overall score from 1 to 5 after 'Final Score:'.\n"
    "Text Caption: [{prompt}]"
)
_SCORE = re.compile(r"final\s+score\W{0,6}(\d+(?:\.\d+)?)", re.IGNORECASE)


def parse_score(answer: str) -> float:
    """The number after the last "Final Score:".

    Raises:
        RewardFailure: there is none, or it is not between 1 and 5.
    """
    found = _SCORE.findall(answer)
    if not found:
        raise RewardFailure("reward 'unifiedreward': the answer has no 'Final Score:'")
    score = float(found[-1])
    if not LOWEST <= score <= HIGHEST:
        raise RewardFailure(f"reward 'unifiedreward': the score {score} is not between 1 and 5")
    return score


class UnifiedReward:
    """Scores from 1 to 5, one request an image, greedy decoding."""

    id = "unifiedreward"
    lane = "remote"

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        *,
        question: str = QUESTION,
        concurrency: int = 8,
    ):
        if "{prompt}" not in question:
            raise ConfigError("options.unifiedreward.question must hold {prompt}")
        self._endpoint, self._model = endpoint, model
        self._question, self._concurrency = question, concurrency

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,) of ``images`` (N, H, W, 3).

        Raises:
            PartialFailure, RewardFailure: some or all images got no usable answer.
        """
        pairs = list(zip(images, prompts, strict=True))
        return score_parts(pairs, self._ask, [1] * len(pairs), self._concurrency)

    def _ask(self, pair: tuple[NDArray[np.uint8], Prompt]) -> NDArray[np.float64]:
        image, prompt = pair
        picture = {"url": f"data:image/png;base64,{encode_image(image, 'png')}"}
        question = self._question.replace("{prompt}", prompt.prompt)
        content = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": question}]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        answer = self._endpoint.post(json.dumps(body).encode(), JSON)
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise RewardFailure("reward 'unifiedreward': the answer is no chat completion") from None
        if not isinstance(text, str):
            raise RewardFailure("reward 'unifiedreward': the answer holds no text")
        return np.array([parse_score(text)])


def load(
    world: RewardWorld,
    device: str,
    *,
    question: str = QUESTION,
    concurrency: int = 8,
    timeout_seconds: float = 120.0,
    retries: int = 3,
    first_pause: float = FIRST_PAUSE,
) -> UnifiedReward:
    """The judge at RECAST_UNIFIEDREWARD_URL. Raises WeightsUnavailable, ConfigError."""
    if concurrency < 1 or retries < 0 or not 0 < timeout_seconds < math.inf:
        raise ConfigError(
            "options.unifiedreward: concurrency must be at least 1, retries at least 0, and timeout_seconds "
            f"positive, got {concurrency}, {retries} and {timeout_seconds}"
        )
    base = os.environ.get(URL)
    if not base:
        raise WeightsUnavailable(f"reward 'unifiedreward' is not available: set {URL}")
    endpoint = Endpoint(
        "unifiedreward",
        base.rstrip("/") + "/chat/completions",
        key=os.environ.get(KEY),
        timeout=timeout_seconds,
        retries=retries,
        first_pause=first_pause,
    )
    model = os.environ.get(MODEL) or "UnifiedReward"
    return UnifiedReward(endpoint, model, question=question, concurrency=concurrency)
