"""What a proposal image is known by, in the cache folder and in the artifact store."""

from __future__ import annotations

import hashlib
import json

from recast_engine.config import ProposalConfig

_VERSION = 1  # raised when the same config would no longer give the same kind of image


def prompt_key(config: ProposalConfig, prompt: str) -> str:
    """SHA-256 (hex) over what determines the images of a prompt, in any order and number.

    Prompts of the same text share their images.
    """
    facts = {
        "version": _VERSION,
        "source": config.source,
        "model": config.model,
        "size": config.size,
        "quality": config.quality,
        "steps": config.steps,
        "seed": config.seed,
        "prompt": prompt,
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def image_key(prompt_key: str, number: int) -> str:
    """The key of image ``number`` (from 0) of a prompt: a file name without its suffix."""
    return f"{prompt_key}-{number}"


def image_seed(key: str) -> int:
    """The 32-bit seed that a local pipeline draws the image from."""
    return int(key[:8], 16) ^ int(key.rpartition("-")[2])
