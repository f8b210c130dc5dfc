"""The API process of the embedded service: ``python -m recast.api_process FD`` serves on a listening socket.

The socket belongs to the supervisor, so that a restarted API finds its port and waiting callers still there.
"""

from __future__ import annotations

import socket
import sys

import uvicorn

GRACE_SECONDS = 3


def main(descriptor: int) -> None:
    """Serve until SIGTERM; open event streams get a few seconds to end."""
    config = uvicorn.Config(
        "api.main:app", timeout_graceful_shutdown=GRACE_SECONDS, server_header=False, access_log=False
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
