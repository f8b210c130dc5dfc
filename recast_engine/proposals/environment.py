"""What the operator's environment lets this process use: API keys and installed SDKs. Loads neither."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Literal

from recast_engine.errors import ProposalFailure

ProposalSource = Literal["openai", "google", "folder", "diffusers"]
SOURCES: dict[ProposalSource, str] = {
    "openai": "OpenAI's Images API, or an endpoint that speaks it (OPENAI_BASE_URL)",
    "google": "Google's Gemini image models (Nano Banana)",
    "folder": "PNG, JPEG and WebP files of the operator, matched to prompts by name or manifest",
    "diffusers": "a base model of the catalogue, or any text-to-image pipeline in the workers' local cache",
}
KEY_VARIABLES: dict[str, tuple[str, ...]] = {
    "openai": ("OPENAI_API_KEY",),
    "google": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
}
BASE_URL_VARIABLES = {"openai": "OPENAI_BASE_URL", "google": "GOOGLE_GEMINI_BASE_URL"}
_PACKAGES = {"openai": "openai", "google": "google.genai"}


def missing(source: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this process cannot use ``source``, with the remedy; None when it can."""
    if source not in KEY_VARIABLES:
        return None
    if not _installed(_PACKAGES[source]) or _key(source, environ) is None:
        return remedy(source)
    return None


def remedy(source: str) -> str:
    """What makes a paid source usable."""
    names = " or ".join(KEY_VARIABLES[source])
    return (
        f"source {source!r} needs its SDK and an API key where the workers run: pip install "
        f"'recast[proposals]', set {names} in their environment, and restart them"
    )


def usable_sources(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The sources that this process can use."""
    return [source for source in SOURCES if missing(source, environ) is None]


def api_key(source: str, environ: Mapping[str, str] = os.environ) -> str:
    """The key of a paid source.

    Raises:
        ProposalFailure: there is none, or it cannot be one; the text never holds any of it.
    """
    if reason := missing(source, environ):
        raise ProposalFailure(reason)
    name, key = _key(source, environ) or ("", "")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ProposalFailure(f"{name}: not an API key (it has blanks or characters that no key has)")
    return key


def _key(source: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    found = ((name, environ.get(name, "").strip()) for name in KEY_VARIABLES[source])
    return next(((name, key) for name, key in found if key), None)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent package
        return False
