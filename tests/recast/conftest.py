"""Fixtures of the command line's and the client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recast.scripted_server import Scripted, serve


@pytest.fixture
def server() -> Iterator[Scripted]:
    with serve() as scripted:
        yield scripted
