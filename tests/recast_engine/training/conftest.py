"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from recast_engine.backbones.sd3 import SD3Backbone


@pytest.fixture
def backbone(tiny_pipeline: Path) -> SD3Backbone:
    return SD3Backbone.from_pretrained(tiny_pipeline, id="tiny")
