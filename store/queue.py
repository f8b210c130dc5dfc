"""The queue's publish side: a message says "look at job N" and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from celery import Celery, group
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

TASK = "recast.run"
QUEUES = {
    "profile": "recast.profile",
    "training": "recast.training",
    "evaluation": "recast.evaluation",
    "profile_shard": "recast.profile_shard",
}
CONNECT_SECONDS = 3.0


@lru_cache(maxsize=8)
def publisher(broker_url: str) -> Any:
    """A Celery app that only sends; one per broker, safe in threads."""
    app = Celery("recast-publisher", broker=broker_url, backend=None, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        task_ignore_result=True,
        task_publish_retry=False,
        broker_transport_options={
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": CONNECT_SECONDS,
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0,
        },
    )
    return app


def publish(broker_url: str, kind: str, job_id: str) -> bool:
    """Tell the workers about a job; False, and a line in the log, when the broker cannot be reached.

    Never raises for a broker's failure: the job's row is what counts, and the sweeper publishes it again.
    """
    return publish_group(broker_url, kind, [job_id])


def publish_group(broker_url: str, kind: str, job_ids: Sequence[str]) -> bool:
    """:func:`publish` for several jobs, as one Celery group: they run at once on whoever is free."""
    app = publisher(broker_url)
    tasks = group(app.signature(TASK, args=[job_id], queue=QUEUES[kind], app=app) for job_id in job_ids)
    try:
        tasks.apply_async(retry=False)
    except (KombuError, RedisError, OSError) as error:
        log.warning("message about %s was not published, a sweeper will: %s", ", ".join(job_ids), error)
        return False
    return True


def depth(broker_url: str, kind: str) -> int:
    """Messages waiting in a kind's queue. Raises KombuError, RedisError or OSError without a broker."""
    with publisher(broker_url).connection_for_write() as connection:
        return int(connection.default_channel.queue_declare(QUEUES[kind], durable=True).message_count)


def reachable(broker_url: str) -> bool:
    """Whether the broker answers."""
    try:
        with publisher(broker_url).connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=CONNECT_SECONDS)
            connection.default_channel.client.ping()
    except (KombuError, RedisError, OSError):
        return False
    return True
