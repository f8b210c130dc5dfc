"""Gemini's image models ("Nano Banana") over generateContent; ``GOOGLE_GEMINI_BASE_URL`` leads elsewhere."""

from __future__ import annotations

from typing import Any

import httpx
from google import genai
from google.genai import errors, types
from pydantic import ValidationError

from recast_engine.config import ProposalConfig
from recast_engine.proposals.environment import api_key
from recast_engine.proposals.http import AnswerTooLarge, make_client, status_error
from recast_engine.proposals.provider import Refused, Retryable

_REFUSALS = {
    types.FinishReason.SAFETY,
    types.FinishReason.RECITATION,
    types.FinishReason.BLOCKLIST,
    types.FinishReason.PROHIBITED_CONTENT,
    types.FinishReason.SPII,
    types.FinishReason.IMAGE_SAFETY,
    types.FinishReason.IMAGE_PROHIBITED_CONTENT,
    types.FinishReason.IMAGE_RECITATION,
}
IMAGE_SIZES = {1024: "1K", 2048: "2K", 4096: "4K"}


class GoogleProvider:
    """One square image per request, inline."""

    name = "google"

    def __init__(self, config: ProposalConfig) -> None:
        """Raises ProposalFailure without a usable GEMINI_API_KEY or GOOGLE_API_KEY."""
        self._key = api_key("google")
        self._http = make_client()
        options = types.HttpOptions(httpx_client=self._http, retry_options=types.HttpRetryOptions(attempts=1))
        self._client = genai.Client(api_key=self._key, vertexai=False, http_options=options)
        self._model = str(config.model)
        image: dict[str, Any] = {"aspect_ratio": "1:1"}
        if config.size is not None:
            image["image_size"] = IMAGE_SIZES[config.size]
        self._image_config = types.ImageConfig(**image)

    def ask(self, prompt: str, seconds: float) -> bytes:
        """See :class:`~recast_engine.proposals.provider.Provider`."""
        config = types.GenerateContentConfig(
            response_modalities=["IMAGE"],
            image_config=self._image_config,
            http_options=types.HttpOptions(timeout=max(1, round(seconds * 1000))),
        )
        try:
            answer = self._client.models.generate_content(model=self._model, contents=prompt, config=config)
        except errors.APIError as error:
            raise self._status_error(error) from None
        except httpx.TimeoutException:
            raise Retryable(f"google: no answer within {seconds:.0f} s", billed=True) from None
        except httpx.ConnectError:
            raise Retryable("google: no connection") from None
        except AnswerTooLarge:
            raise Retryable("google: the answer is too large", billed=True) from None
        except (httpx.HTTPError, errors.UnknownApiResponseError, ValidationError, ValueError):
            raise Retryable("google: the answer was cut off or is not JSON", billed=True) from None
        return _image(answer)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._http.close()

    def _status_error(self, error: errors.APIError) -> Exception:
        headers = getattr(error.response, "headers", {})
        detail = error.message if isinstance(error.message, str) else ""
        status = error.code if isinstance(error.code, int) else 0
        if status == 400 and "API_KEY_INVALID" in str(error.details):
            status = 401  # what other providers say
        return status_error("google", status, headers, detail, self._key)


def _image(answer: types.GenerateContentResponse) -> bytes:
    if answer.prompt_feedback is not None and answer.prompt_feedback.block_reason is not None:
        raise Refused
    for candidate in answer.candidates or ():
        if candidate.finish_reason in _REFUSALS:
            raise Refused
        for part in (candidate.content.parts if candidate.content else None) or ():
            if part.inline_data is not None and part.inline_data.data is not None and not part.thought:
                return part.inline_data.data
    raise Retryable("google: the answer holds no image", billed=True, declined=True)
