"""The Celery app of a worker: messages carry a job id, JSON only, no results, acknowledged when done."""

from __future__ import annotations

from typing import Any

from celery import Celery

from workers.runtime import Runtime


def make_app(runtime: Runtime) -> Any:
    """A Celery app for ``runtime``'s broker and queues.

    A worker takes no message before a thread is free for it, so that a long job holds up no other. A message
    whose worker dies is handed out again after the visibility timeout; by then the sweeper has long published
    a new one, and the late one finds nothing to claim.
    """
    settings = runtime.settings
    app = Celery("recast", broker=settings.broker_url, backend=None, set_as_current=False)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={"visibility_timeout": settings.visibility_seconds},
    )
    return app
