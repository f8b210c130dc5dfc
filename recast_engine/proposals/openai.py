"""The Images API of OpenAI, or of an endpoint that speaks it (``OPENAI_BASE_URL``)."""

from __future__ import annotations

import base64
import binascii
from typing import Any, cast

import httpx
import openai
from openai.types import ImagesResponse

from recast_engine.config import ProposalConfig
from recast_engine.errors import ProposalFailure
from recast_engine.proposals.environment import api_key
from recast_engine.proposals.http import AnswerTooLarge, make_client, status_error
from recast_engine.proposals.provider import Refused, Retryable

_REFUSALS = {"moderation_blocked", "content_policy_violation"}
_SPENT = {"insufficient_quota", "billing_hard_limit_reached"}


class OpenAIProvider:
    """One image per request, as base64: an answer with an address in it is not followed."""

    name = "openai"

    def __init__(self, config: ProposalConfig) -> None:
        """Raises ProposalFailure without a usable OPENAI_API_KEY."""
        self._key = api_key("openai")
        self._http = make_client()
        self._client = openai.OpenAI(api_key=self._key, http_client=self._http, max_retries=0)
        self._request: dict[str, Any] = {
            "model": config.model,
            "n": 1,
            "size": f"{config.size}x{config.size}",
        }
        if config.quality is not None:
            self._request["quality"] = config.quality
        if str(config.model).startswith("dall-e"):  # the others answer in base64 and know no such setting
            self._request["response_format"] = "b64_json"

    def ask(self, prompt: str, seconds: float) -> bytes:
        """See :class:`~recast_engine.proposals.provider.Provider`."""
        try:
            answer = self._client.images.generate(prompt=prompt, timeout=seconds, **self._request)
        except openai.APIStatusError as error:
            raise self._status_error(error) from None
        except openai.APITimeoutError:
            raise Retryable(f"openai: no answer within {seconds:.0f} s", billed=True) from None
        except openai.APIConnectionError as error:
            raise _broken(error.__cause__) from None
        except (openai.OpenAIError, httpx.HTTPError, AnswerTooLarge, ValueError) as error:
            raise _broken(error) from None
        return _image(cast(ImagesResponse, answer))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _status_error(self, error: openai.APIStatusError) -> Exception:
        if error.code in _REFUSALS:
            return Refused()
        if error.code in _SPENT:
            return ProposalFailure("openai: the account's quota or billing limit is reached; raise it there")
        body = error.body if isinstance(error.body, dict) else {}
        detail = body.get("message")
        return status_error(
            "openai",
            error.status_code,
            error.response.headers,
            detail if isinstance(detail, str) else "",
            self._key,
        )


def _broken(cause: BaseException | None) -> Retryable:
    """An answer that began and is not whole or not JSON may have been charged for."""
    if isinstance(cause, AnswerTooLarge):
        return Retryable("openai: the answer is too large", billed=True)
    if isinstance(cause, httpx.ConnectError):
        return Retryable("openai: no connection")
    return Retryable("openai: the answer was cut off or is not JSON", billed=True)


def _image(answer: ImagesResponse) -> bytes:
    images = getattr(answer, "data", None)  # the SDK hands on whatever JSON or text it was given
    encoded = getattr(images[0], "b64_json", None) if isinstance(images, list) and images else None
    if not isinstance(encoded, str):
        raise Retryable("openai: the answer holds no image (b64_json)", billed=True)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise Retryable("openai: the image's base64 is broken", billed=True) from None
