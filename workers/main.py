"""The worker process: ``python -m workers.main --concurrency 1 --queues profile,training,evaluation``.

SIGTERM makes it leave in good order: no more jobs are taken, running engines checkpoint and end, their jobs
go back to the queue, and the process exits.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from celery import signals
from celery.platforms import SecurityWarning

from store import queue
from store.settings import Settings
from workers.celery_app import make_app
from workers.runtime import Runtime
from workers.sweeper import Sweeper
from workers.tasks import register
from workers.tracking.catalogue import TrackerUnavailable

log = logging.getLogger(__name__)


def serve(runtime: Runtime, log_level: str = "INFO") -> None:
    """Serve ``runtime``'s queues until SIGTERM."""
    warnings.filterwarnings("ignore", category=SecurityWarning)  # of root: no message carries code, only JSON
    app = make_app(runtime)
    register(app, runtime)

    def leave(**_: Any) -> None:
        runtime.stopping.set()

    signals.worker_shutting_down.connect(leave, weak=False)
    sweeper = Sweeper(runtime)
    sweeper.start()
    arguments = ["--quiet", "worker", "--pool", "threads", "--concurrency", str(runtime.concurrency)]
    arguments += ["--queues", ",".join(runtime.queues), "--hostname", f"{runtime.worker}@recast"]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", log_level]
    try:
        app.worker_main(arguments)
    finally:
        runtime.stopping.set()
        sweeper.close()
        signals.worker_shutting_down.disconnect(leave)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="Run jobs of ReCAST.")
    parser.add_argument("--concurrency", type=int, default=1, help="jobs run at once")
    parser.add_argument("--queues", default=",".join(queue.QUEUES), help="kinds of jobs to run, with commas")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args(argv)
    kinds = tuple(name.strip().removeprefix("recast.") for name in arguments.queues.split(","))
    if "profile" in kinds and "profile_shard" not in kinds:
        kinds += ("profile_shard",)
    if unknown := set(kinds) - set(queue.QUEUES):
        parser.error(f"unknown queues: {', '.join(sorted(unknown))}; known: {', '.join(queue.QUEUES)}")
    if arguments.concurrency < 1:
        parser.error("--concurrency must be at least 1")
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        runtime = Runtime.create(Settings.from_env(), concurrency=arguments.concurrency, kinds=kinds)
    except TrackerUnavailable as error:
        parser.error(str(error))
    serve(runtime, arguments.log_level)


if __name__ == "__main__":
    main()
