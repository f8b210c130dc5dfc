"""The entry of the ``recast`` command: all its commands, and how errors end it."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console

from recast.cli import (
    allocate,
    download,
    evaluate,
    jobs,
    keys,
    profile,
    profiles,
    prompts,
    quickstart,
    rewards,
    service,
    train,
)
from recast.cli.app import app
from recast.errors import RecastError
from recast_engine.errors import EngineError

COMMANDS = (
    service,
    quickstart,
    profile,
    profiles,
    allocate,
    train,
    evaluate,
    jobs,
    download,
    prompts,
    rewards,
    keys,
)


def main() -> None:
    """Run the command line; a foreseen error becomes one line and its exit code."""
    try:
        app()
    except (RecastError, EngineError) as error:
        _end(str(error), getattr(error, "exit_code", 1))
    except OSError as error:  # a file of the home folder, which anyone may lock away or a full disk refuse
        reason = error.strerror or str(error)
        _end(f"{error.filename}: {reason}" if error.filename else reason, 1)


def _end(message: str, code: int) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"Error: {message}")
    sys.exit(code)
