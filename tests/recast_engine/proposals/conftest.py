"""A server that stands in for both providers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recast_engine.proposals import purchase
from tests.recast_engine.proposals.heard import Heard
from tests.recast_engine.proposals.image_server import ImageServer, serving

VARIABLES = (
    "OPENAI_API_KEY", "OPENAI_BASE_URL", "GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL",
    "GOOGLE_GENAI_USE_VERTEXAI",
)  # fmt: skip


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageServer]:
    """Both SDKs lead here; backing off takes no time."""
    with serving() as state:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in state.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(purchase, "BACKOFF_SECONDS", 0.01)
        monkeypatch.setattr(purchase, "POLL_SECONDS", 0.05)
        yield state
