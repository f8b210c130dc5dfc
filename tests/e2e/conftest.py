"""A real embedded service per module: `recast up` in a home of its own, with short leases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from recast import service
from recast.client import Client
from recast.home import Home

ENVIRONMENT = {
    "RECAST_LEASE_SECONDS": "6",
    "RECAST_HEARTBEAT_SECONDS": "1",
    "RECAST_SWEEP_SECONDS": "1",
    "RECAST_ENGINE_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


@contextmanager
def running_service(folder: Path, environment: Mapping[str, str]) -> Iterator[Home]:
    """A service in ``folder``, which is stopped at the end, whatever happened to it meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RECAST_DATABASE_URL", "RECAST_BROKER_URL", "RECAST_ARTIFACTS_URL"):
            patch.delenv(name, raising=False)
        for name, value in {**ENVIRONMENT, **environment}.items():
            patch.setenv(name, value)
        home = Home(folder)
        service.start_in_background(home, 0, bound=True)
        try:
            yield home
        finally:
            service.stop_running(home)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """The home of a running service."""
    with running_service(tmp_path_factory.mktemp("home"), {}) as started:
        yield started


@pytest.fixture
def client(home: Home) -> Iterator[Client]:
    with Client(home=home.root) as made:
        yield made


@pytest.fixture(scope="session")
def reproduce_script() -> Path:
    """A program that knows diffusers and nothing of this project."""
    return Path(__file__).with_name("plain_diffusers.py")
