"""The base models this installation knows, without loading torch.

Built-in entries stand here; ``RECAST_MODELS`` names a file of further ones (``operator``).
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic.dataclasses
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator

from recast_engine import miniature
from recast_engine.config import STRICT, Shift, Steps
from recast_engine.errors import ConfigError

RewardWorld = Literal["miniature", "public"]
Family = Literal["sd3", "flux", "qwen_image"]

_JOINT_ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


@dataclass(frozen=True)
class FamilyInfo:
    """What all models of a family have in common.

    Attributes:
        lora_targets: module-name suffixes that LoRA attaches to unless a request names its own: every
            attention projection (METHOD section 6).
        lora_layers: module-name suffixes that a request may name as LoRA targets.
        even_levels: whether the pipeline spaces its levels evenly, 1 ... 1/steps, before they are shifted;
            else evenly between the ends of the scheduler's own shifted range.
        shift_terminal: last level before 0, to which the shifted levels are stretched; None: not stretched.
        shift: of every resolution; or the logarithm of the shift at two numbers of image tokens, through
            which it grows linearly with the tokens.
    """

    lora_targets: tuple[str, ...]
    lora_layers: tuple[str, ...]
    even_levels: bool
    shift: float | tuple[tuple[int, float], tuple[int, float]]
    shift_terminal: float | None = None

    def default_shift(self, resolution: int) -> float:
        """The shift that the family's published scheduler uses for images of ``resolution`` pixels a side."""
        if isinstance(self.shift, float):
            return self.shift
        tokens = (resolution // PIXELS_PER_TOKEN) ** 2
        (fewest, low), (most, high) = self.shift
        return math.exp(low + (tokens - fewest) * (high - low) / (most - fewest))


PIXELS_PER_TOKEN = 16
"""Side of the square of pixels behind one image token: 8 in the autoencoder, 2 in the transformer."""

MAX_RESOLUTION = 4096

FAMILIES: dict[Family, FamilyInfo] = {
    "sd3": FamilyInfo(
        lora_targets=_JOINT_ATTENTION,
        lora_layers=(*_JOINT_ATTENTION, *_FEED_FORWARD),
        even_levels=False,
        shift=3.0,
    ),
    # its single-stream blocks have to_q, to_k, to_v too; their output is fused with the feed-forward's
    "flux": FamilyInfo(
        lora_targets=_JOINT_ATTENTION,
        lora_layers=(*_JOINT_ATTENTION, *_FEED_FORWARD, "proj_mlp"),
        even_levels=True,
        shift=((256, 0.5), (4096, 1.15)),
    ),
    "qwen_image": FamilyInfo(
        lora_targets=_JOINT_ATTENTION,
        lora_layers=(
            *_JOINT_ATTENTION,
            "img_mlp.net.0.proj",
            "img_mlp.net.2",
            "txt_mlp.net.0.proj",
            "txt_mlp.net.2",
        ),
        even_levels=True,
        shift=((256, 0.5), (8192, 0.9)),
        shift_terminal=0.02,
    ),
}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ModelInfo:
    """A catalogue entry.

    Attributes:
        source: a hub repository id, or the absolute path of a local folder, for ``from_pretrained``.
        revision: of the repository: a commit hash, so that a catalogue entry always means the same weights.
        resolution: side of its images, pixels.
        default_steps: of sample grids; training and evaluation say their own.
        shift: s of the sampler's noise levels: an evenly spaced level u becomes s u / (1 + (s - 1) u), so
            s > 1 spends more steps at high noise. For families whose shift grows with the resolution, its
            value at this entry's.
        guidance: value of the guidance embedding of a guidance-distilled model; None: the family's own.
        memory_gib: device memory that training takes, estimated.
        reward_world: which checkpoints score its images.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]
    family: Family
    source: Annotated[str, Field(pattern=r"^(/.+|[A-Za-z0-9][\w.-]*/[\w.-]+)$")]
    licence: Annotated[str, Field(min_length=1)]
    resolution: Annotated[int, Field(ge=PIXELS_PER_TOKEN, le=MAX_RESOLUTION, multiple_of=PIXELS_PER_TOKEN)]
    default_steps: Steps
    shift: Shift
    memory_gib: Annotated[float, Field(gt=0.0)]
    revision: str | None = None
    gated: bool = False
    guidance: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    reward_world: RewardWorld = "public"

    @field_validator("guidance")
    @classmethod
    def _taken_by_the_family(cls, guidance: float | None, others: ValidationInfo) -> float | None:
        if guidance is not None and others.data.get("family") != "flux":
            raise ValueError("only models of the family flux take it")
        return guidance

    @property
    def repository(self) -> str | None:
        """The hub repository id; None for a local folder."""
        return None if Path(self.source).is_absolute() else self.source

    def sigmas(self, steps: int, shift: float | None = None) -> NDArray[np.float64]:
        """What the model's backbone samples through: (steps + 1,) float64, descending, last 0."""
        return flow_sigmas(steps, self.shift if shift is None else shift, family=self.family)

    def missing(self) -> str | None:
        """Why the weights cannot be loaded, with the remedy; None when they are present."""
        if self.repository is None:
            if (Path(self.source) / "model_index.json").is_file():
                return None
            if self.id == "miniature":
                return "the packaged weights are missing: run python -m recast_engine.miniature.build"
            folder = Path(self.source).name
            return f"its folder {folder!r} holds no model_index.json: mend the entry in {VARIABLE}"
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.repository, "model_index.json", revision=self.revision)
        if isinstance(cached, str):
            return None
        return f"weights of {self.repository} are not in the local cache: {self.remedy}"

    @property
    def remedy(self) -> str:
        """How to get the weights of a hub repository."""
        gate = "accept its licence on the hub, sign in with hf auth login, then " if self.gated else ""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"{gate}run hf download {self.repository}{revision}"


BUILT_IN = (
    ModelInfo(
        id="miniature",
        family="sd3",
        source=str(miniature.PIPELINE),
        licence="Apache-2.0",
        resolution=miniature.RESOLUTION,
        default_steps=10,
        shift=1.0,
        memory_gib=0.5,
        reward_world="miniature",
    ),
    ModelInfo(
        id="sd3-medium",
        family="sd3",
        source="stabilityai/stable-diffusion-3-medium-diffusers",
        revision="ea42f8cef0f178587cf766dc8129abd379c90671",
        licence="Stability AI Community License",
        gated=True,
        resolution=512,
        default_steps=40,
        shift=3.0,
        memory_gib=40.0,
    ),
    ModelInfo(
        id="sd3.5-medium",
        family="sd3",
        source="stabilityai/stable-diffusion-3.5-medium",
        revision="b940f670f0eda2d07fbb75229e779da1ad11eb80",
        licence="Stability AI Community License",
        gated=True,
        resolution=512,
        default_steps=40,
        shift=3.0,
        memory_gib=40.0,
    ),
    ModelInfo(
        id="sd3.5-large",
        family="sd3",
        source="stabilityai/stable-diffusion-3.5-large",
        revision="ceddf0a7fdf2064ea28e2213e3b84e4afa170a0f",
        licence="Stability AI Community License",
        gated=True,
        resolution=512,
        default_steps=40,
        shift=3.0,
        memory_gib=80.0,
    ),
    ModelInfo(
        id="flux.1-dev",
        family="flux",
        source="black-forest-labs/FLUX.1-dev",
        revision="3de623fc3c33e44ffbe2bad470d0f45bccf2eb21",
        licence="FLUX.1 [dev] Non-Commercial License",
        gated=True,
        resolution=512,
        default_steps=28,
        shift=FAMILIES["flux"].default_shift(512),
        guidance=3.5,
        memory_gib=80.0,
    ),
    ModelInfo(
        id="qwen-image",
        family="qwen_image",
        source="Qwen/Qwen-Image",
        revision="75e0b4be04f60ec59a75f475837eced720f823b6",
        licence="Apache-2.0",
        resolution=512,
        default_steps=40,
        shift=FAMILIES["qwen_image"].default_shift(512),
        memory_gib=120.0,
    ),
)

VARIABLE = "RECAST_MODELS"
"""Environment variable naming a TOML or JSON file of further models."""


@functools.cache
def models() -> dict[str, ModelInfo]:
    """Every model by id; read once per process.

    Raises ConfigError when the file that ``RECAST_MODELS`` names is not usable.
    """
    from recast_engine.backbones.operator import read_models

    file = os.environ.get(VARIABLE)
    return {info.id: info for info in (*BUILT_IN, *(read_models(Path(file)) if file else ()))}


def model_info(model: str) -> ModelInfo:
    """The entry of ``model``. Raises ConfigError naming the known ids."""
    known = models()
    try:
        return known[model]
    except KeyError:
        raise ConfigError(f"unknown model {model!r}; known: {', '.join(sorted(known))}") from None


def flow_sigmas(
    steps: int, shift: float, *, family: Family = "sd3", train_timesteps: int = 1000
) -> NDArray[np.float64]:
    """Noise levels of diffusers' FlowMatchEulerDiscreteScheduler as the family's pipeline drives it.

    Args:
        shift: s, an evenly spaced level u becomes s u / (1 + (s - 1) u).

    Returns:
        (steps + 1,) float64, descending; the first is 1, the last 0.
    """
    info = FAMILIES[family]
    levels = np.linspace(1.0, 1 / steps, steps)
    if not info.even_levels:
        levels = np.linspace(1.0, shift / train_timesteps / (1 + (shift - 1) / train_timesteps), steps)
    levels = shift * levels / (1 + (shift - 1) * levels)
    if info.shift_terminal is not None and steps > 1:
        levels = 1 - (1 - levels) * (1 - info.shift_terminal) / (1 - levels[-1])
    return np.append(levels, 0.0)
