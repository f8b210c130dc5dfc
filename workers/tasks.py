"""The one task: look at a job."""

from __future__ import annotations

from typing import Any

from store.queue import TASK
from workers.runtime import Runtime
from workers.supervisor import run_job


def register(app: Any, runtime: Runtime) -> None:
    """Make ``app`` serve the task ``recast.run(job_id)``."""

    @app.task(name=TASK, ignore_result=True)  # type: ignore[untyped-decorator]
    def run(job_id: str) -> None:
        run_job(runtime, job_id)
