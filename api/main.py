"""What an ASGI server loads: ``uvicorn api.main:app``, configured by the environment."""

from __future__ import annotations

import logging

from api.app import create_app
from store.settings import Settings

logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
logging.getLogger("api").setLevel(logging.INFO)  # the access log
app = create_app(Settings.from_env())
