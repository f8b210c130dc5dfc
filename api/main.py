"""What an ASGI server loads: ``uvicorn api.main:app``, configured by the environment."""

from __future__ import annotations

from api.app import create_app
from store.settings import Settings

app = create_app(Settings.from_env())
