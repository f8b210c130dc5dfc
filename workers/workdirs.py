"""The folders that attempts work in: disposable, what outlives an attempt is in the artifact store."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path

from store.database import transact
from store.repositories import attempts
from store.repositories.attempts import Claim
from workers.runtime import Runtime

log = logging.getLogger(__name__)


def workdir_of(runtime: Runtime, claim: Claim) -> Path:
    """The folder of one attempt."""
    return _root(runtime) / f"{claim.job_id}-{claim.attempt}"


def remove(workdir: Path) -> None:
    """Delete a folder, there or not; what cannot be deleted now is swept later."""
    shutil.rmtree(workdir, ignore_errors=True)


def sweep(runtime: Runtime) -> None:
    """Delete what is on this machine of attempts that do not run any more: their workers were killed.

    Folders of jobs that the database does not know stay: workers of another one may share the home.
    """
    for workdir in list(_root(runtime).glob("*-*")):
        job_id, _, attempt = workdir.name.rpartition("-")
        if not attempt.isdecimal():
            continue
        if transact(runtime.reads, partial(attempts.is_over, job_id=job_id, attempt=int(attempt))):
            log.info("%s: deleting what attempt %s left", job_id, attempt)
            remove(workdir)


def _root(runtime: Runtime) -> Path:
    return runtime.settings.home / "work"
