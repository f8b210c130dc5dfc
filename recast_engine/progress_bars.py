"""Loading weights without the libraries' progress bars, which fill a log and say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def hidden() -> Iterator[None]:
    """No progress bars of diffusers and transformers inside the block; afterwards as before."""
    from diffusers.utils import logging as diffusers
    from transformers.utils import logging as transformers

    libraries: list[Any] = [
        library for library in (diffusers, transformers) if library.is_progress_bar_enabled()
    ]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()
