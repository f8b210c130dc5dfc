"""What a proposal image is known by, in the cache folder and in the artifact store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from recast_engine.config import ProposalConfig
from recast_engine.prompts import Prompt

_VERSION = 1  # raised when the same config would no longer give the same kind of image


def prompt_key(config: ProposalConfig, prompt: str) -> str:
    """SHA-256 (hex) over everything but the number that determines the images of a prompt."""
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


def image_key(config: ProposalConfig, prompt: str, number: int) -> str:
    """The key of image ``number`` (from 0) of a prompt: a file name without its suffix."""
    return f"{prompt_key(config, prompt)}-{number}"


def proposal_keys(config: ProposalConfig, prompts: Sequence[Prompt], per_prompt: int) -> list[list[str]]:
    """(P, K) keys. Prompts of the same text share their images."""
    return [[image_key(config, prompt.prompt, number) for number in range(per_prompt)] for prompt in prompts]


def image_seed(key: str) -> int:
    """The 32-bit seed that a local pipeline draws the image from."""
    return int(key[:8], 16) ^ int(key.rpartition("-")[2])
