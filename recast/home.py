"""RECAST_HOME: the folder of an embedded service, and what lies where in it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from recast.errors import RecastError

DEFAULT = Path("~/.recast")
_UNFIT = frozenset("?#%")


@dataclass(frozen=True)
class ServiceRecord:
    """What ``service.json`` says while a service runs.

    Attributes:
        url: address of the REST API.
        pid: the supervising process.
        broker_url: address of the private broker.
    """

    url: str
    pid: int
    broker_url: str


@dataclass(frozen=True)
class Home:
    """Paths below ``root``; nothing is created by looking."""

    root: Path

    @classmethod
    def find(cls, given: Path | None = None) -> Home:
        """The given folder, else ``RECAST_HOME``, else ``~/.recast``."""
        root = given or Path(os.environ.get("RECAST_HOME") or DEFAULT)
        return cls(root.expanduser().resolve())

    @property
    def record(self) -> Path:
        return self.root / "service.json"

    @property
    def key(self) -> Path:
        return self.root / "admin.key"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def create(self) -> None:
        """Make the folder (0700: it holds keys) and its log folder.

        Raises:
            RecastError: it cannot be created or written to, or its path cannot be part of an address.
        """
        if unfit := [
            character for character in str(self.root) if character in _UNFIT or not character.isprintable()
        ]:
            raise RecastError(
                f"the home folder's path must not contain {unfit[0]!r}, which the addresses of broker and "
                f"database cannot carry: {str(self.root)!r}; choose another with --home"
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise RecastError(
                f"cannot use {self.root} as the home folder: {error.strerror}; choose another with --home"
            ) from None

    def read_record(self) -> ServiceRecord | None:
        """The record of the last service started here, or None."""
        try:
            return ServiceRecord(**json.loads(self.record.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise RecastError(
                f"{self.record} is damaged ({error}); delete it and run `recast up` again"
            ) from None

    def write_record(self, record: ServiceRecord) -> None:
        """Replace ``service.json`` in one step."""
        write_private(self.record, json.dumps(asdict(record)) + "\n")

    def read_key(self) -> str | None:
        """The local admin key, or None."""
        return self.key.read_text(encoding="utf-8").strip() if self.key.is_file() else None


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, replacing an old one in one step."""
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)
