"""Runs a command that must not outlive the process that started it, even if that one is killed with -9.

    python -m recast.child PARENT_PID COMMAND [ARGUMENT ...]

On Linux the kernel is asked to kill this process when its parent dies, and the request survives the exec of
COMMAND. Elsewhere this process stays, watches its parent, and passes signals on. COMMAND shares the process
group, so one signal to the group reaches everything it starts. Standard library only: it starts often.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5


def main(arguments: Sequence[str]) -> int:
    """Become COMMAND (Linux) or watch over it (elsewhere); returns its exit status."""
    parent, command = int(arguments[0]), list(arguments[1:])
    if platform.system() == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request was in place
            return 1
        os.execvp(command[0], command)
    return watch(parent, command)


def watch(parent: int, command: Sequence[str]) -> int:
    """Run ``command`` until it ends, killing it as soon as ``parent`` is no longer this process's parent."""
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: process.send_signal(received))
    while os.getppid() == parent:
        status = process.poll()
        if status is not None:
            return status if status >= 0 else 128 - status
        time.sleep(POLL_SECONDS)
    process.kill()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
