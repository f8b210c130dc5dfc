"""Where things are kept and how patient the service is, read once from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

PREFIX = "RECAST_"


@dataclass(frozen=True)
class Settings:
    """All settings; every field ``name`` is read from ``RECAST_NAME``.

    Attributes:
        home: folder of everything local (database, artifacts, work folders, keys).
        database_url: SQLAlchemy URL; empty: SQLite in ``home``.
        broker_url: Redis-protocol URL.
        artifacts_url: local folder or ``s3://bucket/prefix``; empty: a folder in ``home``.
        lease_seconds: a running job whose lease is older than its expiry belongs to nobody.
        heartbeat_seconds: how often a lease is renewed.
        sweep_seconds: how often each worker looks for lost messages and dead leases.
        republish_seconds: how long a queued job waits before its message counts as lost.
        visibility_seconds: after how long the broker hands out an unacknowledged message again.
        idempotency_seconds: how long a repeat with an Idempotency-Key surely gets the first answer.
        stop_grace_seconds: from the stop flag to SIGTERM, when a job is cancelled.
        kill_grace_seconds: from SIGTERM to SIGKILL.
        engine_attempts: how many crashed engine processes a job may have before it fails.
        worker_attempts: how many lost workers a job may have before it fails.
        engine_threads: CPU threads of an engine process; 0: cores divided by the worker's concurrency.
        engine_runner: ``module:function(workdir, observer)`` that an engine process runs.
        proposals: folder of the folders of images that profiles may take as proposals; empty: in ``home``.
        trackers: of training metrics beside the store, with commas: tensorboard, mlflow, wandb.
        tensorboard: folder of TensorBoard's event files; empty: in ``home``.
        max_log_bytes: how much of a failed engine's log is kept (its end).
        max_body_bytes: limit of a JSON request body.
        max_upload_bytes: limit of an uploaded prompt set.
    """

    home: Path = field(default_factory=lambda: Path.home() / ".recast")
    database_url: str = ""
    broker_url: str = "redis://127.0.0.1:6379/0"
    artifacts_url: str = ""
    lease_seconds: float = 30.0
    heartbeat_seconds: float = 2.0
    sweep_seconds: float = 10.0
    republish_seconds: float = 30.0
    visibility_seconds: float = 3600.0
    idempotency_seconds: float = 7 * 24 * 3600.0
    stop_grace_seconds: float = 60.0
    kill_grace_seconds: float = 15.0
    engine_attempts: int = 3
    worker_attempts: int = 5
    engine_threads: int = 0
    engine_runner: str = "workers.engine:run_request"
    proposals: str = ""
    trackers: str = ""
    tensorboard: str = ""
    max_log_bytes: int = 1024 * 1024
    max_body_bytes: int = 1024 * 1024
    max_upload_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        """Fills in what follows from ``home``. Raises ValueError for a setting that cannot work."""
        object.__setattr__(self, "home", self.home.expanduser().absolute())
        if not self.database_url:
            object.__setattr__(self, "database_url", f"sqlite:///{self.home / 'recast.db'}")
        if not self.artifacts_url:
            object.__setattr__(self, "artifacts_url", str(self.home / "artifacts"))
        if not self.proposals:
            object.__setattr__(self, "proposals", str(self.home / "proposals"))
        if not self.tensorboard:
            object.__setattr__(self, "tensorboard", str(self.home / "tensorboard"))
        if not 0 < self.heartbeat_seconds < self.lease_seconds:
            raise ValueError("RECAST_HEARTBEAT_SECONDS must be positive and less than RECAST_LEASE_SECONDS")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Settings from ``environ``; unset or empty variables keep their defaults.

        Raises:
            ValueError: a variable is not of its field's type; the text names it.
        """
        settings = cls()
        values: dict[str, Any] = {
            name.name: _parse(PREFIX + name.name.upper(), text, type(getattr(settings, name.name)))
            for name in fields(cls)
            if (text := environ.get(PREFIX + name.name.upper(), ""))
        }
        if "home" in values:  # what follows from home must follow from the new one
            values.setdefault("database_url", "")
            values.setdefault("artifacts_url", "")
            values.setdefault("proposals", "")
            values.setdefault("tensorboard", "")
        return replace(settings, **values)

    def to_env(self) -> dict[str, str]:
        """The variables that make ``from_env`` return these settings, for a child process."""
        return {PREFIX + name.name.upper(): str(getattr(self, name.name)) for name in fields(self)}


def _parse(variable: str, text: str, kind: type) -> Any:
    parse: Callable[[str], Any] = Path if issubclass(kind, Path) else kind
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{variable}: {text!r} is not a {kind.__name__}") from None
