"""A job's events as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import anyio
from anyio import to_thread

from api.context import Context
from api.jobs import service
from store.models import JobEvent

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0
BATCH = 200


async def stream(context: Context, job_id: str, after: int) -> AsyncIterator[str]:
    """Every event of a visible job after ``after``, live, until the job is over.

    Each poll borrows a thread and a database connection for one short read and holds neither in between.
    """
    said = time.monotonic()
    while True:
        rows, last = await to_thread.run_sync(service.events, context, job_id, after, BATCH)
        for row in rows:
            yield _event(row)
            after = row.seq
        if rows:
            said = time.monotonic()
        if last:
            return
        if time.monotonic() - said >= HEARTBEAT_SECONDS:
            yield ": still here\n\n"
            said = time.monotonic()
        if len(rows) < BATCH:
            await anyio.sleep(POLL_SECONDS)


def _event(row: JobEvent) -> str:
    data = json.dumps({**row.data, "created_at": row.created_at.isoformat()}, ensure_ascii=True)
    return f"id: {row.seq}\nevent: {row.type}\ndata: {data}\n\n"
