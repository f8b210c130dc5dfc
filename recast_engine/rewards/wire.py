"""How images and prompts travel to a reward on another machine, and scores back (docs/rewards.md). No pickle.

A request is JSON with every image as base64 PNG or WebP (both lossless), or one safetensors body with a
tensor ``images`` (N, H, W, 3) uint8 whose header holds the rest. The answer is JSON.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from recast_engine.errors import InvalidArgument, RewardFailure
from recast_engine.prompts import Prompt, prompt_from_json
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.http_config import ImageFormat

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
MAX_IMAGES = 256
MAX_SIDE = 4096
MAX_TOLD = 200
"""Characters kept of what a server says about a failure."""


@dataclass(frozen=True)
class ScoreRequest:
    """What a reward server is asked: ``images`` (N, H, W, 3) uint8 for ``prompts`` (N) by ``reward``."""

    reward: str
    images: NDArray[np.uint8]
    prompts: tuple[Prompt, ...]


def encode_request(request: ScoreRequest, format: ImageFormat) -> tuple[bytes, str]:
    """Body and content type of ``request``."""
    prompts = [prompt.to_json() for prompt in request.prompts]
    if format == "safetensors":
        header = {"reward": request.reward, "prompts": json.dumps(prompts)}
        return save_tensors({"images": np.ascontiguousarray(request.images)}, header), SAFETENSORS
    images = [{"format": format, "data": encode_image(image, format)} for image in request.images]
    return json.dumps({"reward": request.reward, "images": images, "prompts": prompts}).encode(), JSON


def encode_image(image: NDArray[np.uint8], format: str) -> str:
    """An RGB image (H, W, 3) as base64 of a lossless PNG or WebP."""
    buffer = io.BytesIO()
    lossless = {"lossless": True} if format == "webp" else {"compress_level": 1}
    Image.fromarray(image).save(buffer, format=format.upper(), **lossless)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def decode_request(content: bytes, content_type: str) -> ScoreRequest:
    """What ``encode_request`` wrote. Raises InvalidArgument naming the field that is wrong."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == SAFETENSORS:
        reward, images, prompts = _from_safetensors(content)
    elif kind == JSON:
        reward, images, prompts = _from_json(content)
    else:
        raise InvalidArgument(f"Content-Type must be {JSON} or {SAFETENSORS}, got {content_type[:80]!r}")
    if not isinstance(reward, str):
        raise InvalidArgument("reward: name the reward")
    if not isinstance(prompts, list) or len(prompts) != len(images):
        raise InvalidArgument(f"prompts: {len(images)} images need a list of as many prompts")
    return ScoreRequest(reward, images, tuple(_prompt(place, one) for place, one in enumerate(prompts)))


def _prompt(place: int, data: Any) -> Prompt:
    try:
        return prompt_from_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("prompts", place, *first["loc"]))
        raise InvalidArgument(f"{where}: {first['msg']}") from None


def _from_json(content: bytes) -> tuple[Any, NDArray[np.uint8], Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidArgument("the body is not JSON") from None
    if not isinstance(data, dict) or not isinstance(data.get("images"), list):
        raise InvalidArgument("images: a list of {format, data} is needed")
    if not 0 < len(data["images"]) <= MAX_IMAGES:
        raise InvalidArgument(f"images: between 1 and {MAX_IMAGES} at once, got {len(data['images'])}")
    images = [_image(place, one) for place, one in enumerate(data["images"])]
    if len({image.shape for image in images}) != 1:
        raise InvalidArgument("images: all must be of one size")
    return data.get("reward"), np.stack(images), data.get("prompts")


def _image(place: int, data: Any) -> NDArray[np.uint8]:
    if not isinstance(data, dict) or data.get("format") not in ("png", "webp"):
        raise InvalidArgument(f"images.{place}.format: png or webp")
    try:
        raw = base64.b64decode(data.get("data", ""), validate=True)
        with Image.open(io.BytesIO(raw), formats=[data["format"].upper()]) as picture:
            if max(picture.size) > MAX_SIDE:  # before anything is decoded
                raise InvalidArgument(f"images.{place}: at most {MAX_SIDE} pixels a side")
            return np.asarray(picture.convert("RGB"))
    except (InvalidArgument, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise InvalidArgument(f"images.{place}: at most {MAX_SIDE} pixels a side") from None
    except Exception:  # noqa: BLE001 - Pillow lets through whatever its parsers trip over
        raise InvalidArgument(f"images.{place}.data: not base64 of a {data['format']} image") from None


def _from_safetensors(content: bytes) -> tuple[Any, NDArray[np.uint8], Any]:
    try:
        tensors = load_tensors(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
        prompts = json.loads(header.get("prompts", "null"))
    except (SafetensorError, ValueError, RecursionError):
        raise InvalidArgument("the body is not safetensors with reward and prompts in its header") from None
    images = tensors.get("images")
    if images is None or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise InvalidArgument("images: a uint8 tensor (N, H, W, 3) is needed")
    if (
        not 0 < len(images) <= MAX_IMAGES
        or not 0 < min(images.shape[1:3]) <= max(images.shape[1:3]) <= MAX_SIDE
    ):
        raise InvalidArgument(f"images: 1 to {MAX_IMAGES} at once, at most {MAX_SIDE} pixels a side")
    return header.get("reward"), images, prompts


def encode_scores(scores: NDArray[np.float64]) -> dict[str, Any]:
    """The answer's data: null stands for a score that failed."""
    return {"scores": [float(score) if np.isfinite(score) else None for score in scores]}


def decode_scores(content: bytes, count: int) -> NDArray[np.float64]:
    """Scores (count,), NaN where the server has none.

    Raises:
        RewardFailure: the answer is not ``{"scores": [...]}`` with ``count`` numbers or nulls.
        PartialFailure: some scores are missing, and the answer's ``error`` says why.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise RewardFailure("the reward server's answer is not JSON") from None
    scores = data.get("scores") if isinstance(data, dict) else None
    if not isinstance(scores, list):
        raise RewardFailure("the reward server's answer has no list of scores")
    if len(scores) != count:
        raise RewardFailure(f"the reward server gave {len(scores)} scores for {count} images")
    if not all(one is None or (isinstance(one, int | float) and not isinstance(one, bool)) for one in scores):
        raise RewardFailure("the reward server gave scores that are neither numbers nor null")
    try:
        values = np.array([np.nan if one is None else float(one) for one in scores])
    except OverflowError:
        raise RewardFailure("the reward server gave a score that is too large for a number") from None
    error = data.get("error")
    if isinstance(error, str) and error.strip() and not np.isfinite(values).all():
        told = "".join(character if character.isprintable() else " " for character in error)
        raise PartialFailure(values, f"the reward server says: {' '.join(told.split())[:MAX_TOLD]}")
    return values
