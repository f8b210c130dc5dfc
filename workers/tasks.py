"""The one task: look at a job."""

from __future__ import annotations

import logging
from typing import Any

from store.database import transact
from store.queue import TASK
from store.repositories import attempts
from workers.runtime import Runtime
from workers.supervisor import Supervisor

log = logging.getLogger(__name__)


def register(app: Any, runtime: Runtime) -> None:
    """Make ``app`` serve the task ``recast.run(job_id)``."""

    @app.task(name=TASK, ignore_result=True)  # type: ignore[untyped-decorator]
    def run(job_id: str) -> None:
        run_job(runtime, job_id)


def run_job(runtime: Runtime, job_id: str) -> bool:
    """Claim the job and see it through; False when there is nothing to claim.

    Safe to run twice or late: only a queued job is claimed, by one caller.
    """
    if runtime.stopping.is_set():
        return False
    lease_seconds = runtime.settings.lease_seconds
    claim = transact(
        runtime.sessions,
        lambda session: attempts.claim(session, job_id, runtime.worker, lease_seconds),
        patience=lease_seconds / 2,
    )
    if claim is None:
        log.info("%s is not queued: nothing to do", job_id)
        return False
    log.info("%s claimed, attempt %d", job_id, claim.attempt)
    Supervisor(runtime, claim).run()
    return True
