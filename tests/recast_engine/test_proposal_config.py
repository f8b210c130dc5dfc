"""Requests for proposals: what is refused, and what is filled in."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from recast_engine.config import ProposalConfig, dump, load


@pytest.mark.parametrize(
    ("request_", "model"),
    [
        ({"source": "openai"}, "gpt-image-1.5"),
        ({"source": "google"}, "gemini-3-pro-image-preview"),
        ({"source": "google", "model": "gemini-2.5-flash-image"}, "gemini-2.5-flash-image"),
        ({"source": "diffusers", "model": "miniature", "steps": 4}, "miniature"),
        ({"source": "folder", "folder": "gpt-image"}, None),
    ],
)
def test_the_stored_config_names_the_model(request_: dict[str, Any], model: str | None) -> None:
    config = load(ProposalConfig, request_)
    assert config.model == model
    assert load(ProposalConfig, dump(config)) == config


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"source": "midjourney"}, "source"),
        ({"source": "diffusers"}, "model"),
        ({"source": "diffusers", "model": "../../etc"}, "model"),
        ({"source": "diffusers", "model": "/etc/passwd"}, "model"),
        ({"source": "diffusers", "model": "a/b/c"}, "model"),
        ({"source": "folder"}, "folder"),
        ({"source": "folder", "folder": ".."}, "folder"),
        ({"source": "folder", "folder": "a/b"}, "folder"),
        ({"source": "folder", "folder": "images", "model": "x"}, "model"),
        ({"source": "openai", "folder": "images"}, "folder"),
        ({"source": "google", "quality": "low"}, "quality"),
        ({"source": "openai", "steps": 3}, "steps"),
        ({"source": "openai", "max_images": 0}, "max_images"),
        ({"source": "openai", "concurrency": 65}, "concurrency"),
        ({"source": "openai", "api_key": "sk-x"}, "api_key"),
        ({"source": "openai", "base_url": "http://169.254.169.254"}, "base_url"),
    ],
)
def test_what_cannot_work_is_refused_by_name(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        load(ProposalConfig, request_)
    assert any(field in f"{error['loc']} {error['msg']}" for error in caught.value.errors())
