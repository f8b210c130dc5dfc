"""From a catalogue id to a model in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recast_engine.backbones.base import Backbone
from recast_engine.backbones.catalogue import Family, ModelInfo, model_info
from recast_engine.backbones.flux import FluxBackbone
from recast_engine.backbones.pipeline import PipelineBackbone
from recast_engine.backbones.qwen_image import QwenImageBackbone
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.errors import ConfigError, WeightsUnavailable

BACKBONES: dict[Family, type[PipelineBackbone]] = {
    "sd3": SD3Backbone,
    "flux": FluxBackbone,
    "qwen_image": QwenImageBackbone,
}

_CHECKED_STEPS = 8


def load_backbone(
    model: str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Backbone:
    """Load ``model``; by default on the first CUDA device in bfloat16, else on the CPU in float32.

    Raises:
        ConfigError: an unknown id, or an entry that says other noise levels than the model's scheduler.
        WeightsUnavailable: the weights are not on this machine, or not all of them.
    """
    info = model_info(model)
    if reason := info.missing():
        raise WeightsUnavailable(f"{model}: {reason}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    options: dict[str, Any] = {} if info.guidance is None else {"guidance": info.guidance}
    try:
        backbone: PipelineBackbone = BACKBONES[info.family].from_pretrained(
            info.source,
            id=info.id,
            revision=info.revision,
            resolution=info.resolution,
            device=device,
            dtype=dtype,
            **options,
        )
    except OSError as error:
        remedy = info.remedy if info.repository else "copy the missing files into its folder"
        raise WeightsUnavailable(f"{model}: not all of its files are here: {remedy}") from error
    _check_sigmas(info, backbone)
    return backbone


def _check_sigmas(info: ModelInfo, backbone: PipelineBackbone) -> None:
    """What the API computes from the entry must be what the model samples through."""
    stated, sampled = info.sigmas(_CHECKED_STEPS), backbone.sigmas(_CHECKED_STEPS).numpy()
    if np.allclose(stated, sampled, rtol=0, atol=1e-5):
        return
    scheduler = backbone.pipeline.scheduler.config
    raise ConfigError(
        f"models.{info.id}.shift: {info.shift:g} gives noise levels {stated.round(4).tolist()}, "
        f"but the model samples through {sampled.round(4).tolist()}: "
        f"its scheduler has shift {scheduler.shift:g}, use_dynamic_shifting {scheduler.use_dynamic_shifting}"
    )
