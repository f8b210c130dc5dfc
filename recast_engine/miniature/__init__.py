"""The built-in miniature world: a real Stable-Diffusion-3-architecture pipeline of a few megabytes.

Importing this package loads neither torch nor diffusers; it only says where things are.
"""

from __future__ import annotations

from pathlib import Path

RESOLUTION = 48
"""Side of every image of this world, in pixels."""

_HERE = Path(__file__).parent
WEIGHTS = _HERE / "weights"
PIPELINE = WEIGHTS / "pipeline"
"""Folder that `StableDiffusion3Pipeline.from_pretrained` loads (with `text_encoder_3=None`)."""

REWARDS = ("clipscore", "hpsv2", "pickscore", "aesthetic")
SPLITS = ("train", "heldout")


def reward_weights(name: str) -> Path:
    """Folder of a reward checkpoint. Raises KeyError for a name not in `REWARDS`."""
    if name not in REWARDS:
        raise KeyError(f"no miniature reward {name!r}; there are {', '.join(REWARDS)}")
    return WEIGHTS / "rewards" / name


def prompt_file(split: str) -> Path:
    """JSONL file of prompts with GenEval metadata. Raises KeyError for a split not in `SPLITS`."""
    if split not in SPLITS:
        raise KeyError(f"no miniature prompt split {split!r}; there are {', '.join(SPLITS)}")
    return _HERE / "prompts" / f"{split}.jsonl"
