"""The ``recast`` command."""

from recast.cli.main import main

__all__ = ["main"]
