"""From a catalogue id to a model in memory."""

from __future__ import annotations

import torch

from recast_engine.backbones.base import Backbone
from recast_engine.backbones.catalogue import model_info
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.errors import WeightsUnavailable


def load_backbone(
    model: str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Backbone:
    """Load ``model``; by default on the first CUDA device in bfloat16, else on the CPU in float32.

    Raises:
        ConfigError: an unknown id.
        WeightsUnavailable: the weights are not on this machine.
    """
    info = model_info(model)
    if reason := info.missing():
        raise WeightsUnavailable(f"{model}: {reason}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return SD3Backbone.from_pretrained(
        info.source,
        id=info.id,
        revision=info.revision,
        resolution=info.resolution,
        device=device,
        dtype=dtype,
    )
