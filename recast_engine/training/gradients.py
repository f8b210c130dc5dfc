"""What a backward pass may cost in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recast_engine.backbones.base import Backbone


@contextmanager
def checkpointed_layers(backbone: Backbone, wanted: bool) -> Iterator[None]:
    """Inside the block, if ``wanted``, the transformer's layers are computed again in the backward pass.

    They must then find the adapter active that they were first computed with.
    """
    transformer: Any = backbone.transformer
    if not wanted:
        yield
        return
    transformer.enable_gradient_checkpointing()
    try:
        yield
    finally:
        transformer.disable_gradient_checkpointing()
