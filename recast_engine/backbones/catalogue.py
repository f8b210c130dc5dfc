"""The base models this installation knows, without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recast_engine import miniature
from recast_engine.errors import ConfigError

RewardWorld = Literal["miniature", "public"]
Family = Literal["sd3"]

LORA_TARGETS: dict[Family, tuple[str, ...]] = {
    "sd3": (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
}
"""Module-name suffixes that LoRA attaches to unless a request names its own: every attention projection
(METHOD section 6)."""

LORA_LAYERS: dict[Family, tuple[str, ...]] = {
    "sd3": (
        *LORA_TARGETS["sd3"],
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
}
"""Module-name suffixes that a request may name as LoRA targets."""


@dataclass(frozen=True)
class ModelInfo:
    """A catalogue entry; ``source`` is a hub repository id or a local folder for ``from_pretrained``."""

    id: str
    family: Family
    source: str
    revision: str | None
    licence: str
    gated: bool
    resolution: int
    default_steps: int
    shift: float
    memory_gib: float
    reward_world: RewardWorld  # which checkpoints score its images

    def missing(self) -> str | None:
        """Why the weights cannot be loaded, with the remedy; None when they are present."""
        if Path(self.source).is_dir():
            return None
        if self.reward_world == "miniature":
            return "the packaged weights are missing: run python -m recast_engine.miniature.build"
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.source, "model_index.json", revision=self.revision)
        if isinstance(cached, str):
            return None
        gate = "accept its licence on the hub, then " if self.gated else ""
        return f"weights of {self.source} are not in the local cache: {gate}run hf download {self.source}"


MODELS: dict[str, ModelInfo] = {
    info.id: info
    for info in (
        ModelInfo(
            id="miniature",
            family="sd3",
            source=str(miniature.PIPELINE),
            revision=None,
            licence="Apache-2.0",
            gated=False,
            resolution=miniature.RESOLUTION,
            default_steps=10,
            shift=1.0,
            memory_gib=0.5,
            reward_world="miniature",
        ),
        ModelInfo(
            id="sd3.5-medium",
            family="sd3",
            source="stabilityai/stable-diffusion-3.5-medium",
            revision="main",
            licence="Stability AI Community License",
            gated=True,
            resolution=512,
            default_steps=40,
            shift=3.0,
            memory_gib=40.0,
            reward_world="public",
        ),
    )
}


def model_info(model: str) -> ModelInfo:
    """The entry of ``model``. Raises ConfigError naming the known ids."""
    try:
        return MODELS[model]
    except KeyError:
        raise ConfigError(f"unknown model {model!r}; known: {', '.join(sorted(MODELS))}") from None


def flow_sigmas(steps: int, shift: float, train_timesteps: int = 1000) -> NDArray[np.float64]:
    """Noise levels of diffusers' FlowMatchEulerDiscreteScheduler with a static shift.

    Returns:
        (steps + 1,) float64, descending; the first is 1, the last 0.
    """
    smallest = shift * (1 / train_timesteps) / (1 + (shift - 1) * (1 / train_timesteps))
    levels = np.linspace(1.0, smallest, steps)
    levels = shift * levels / (1 + (shift - 1) * levels)
    return np.append(levels, 0.0)
