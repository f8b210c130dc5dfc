"""One attempt of a job from claim to end: prepare, launch, listen, stop, conclude."""

from __future__ import annotations

import logging
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from recast_engine.errors import EngineError
from store.database import transact
from store.errors import ArtifactDamaged, ArtifactMissing, NotFound, StaleAttempt, StorageError
from store.models import Job
from store.repositories import attempts, jobs
from store.repositories.attempts import Claim
from workers.engine import describe, storage_error
from workers.lease import Lease
from workers.outcome import Outcome
from workers.preparation import prepare
from workers.process import EngineProcess
from workers.reporter import Reporter
from workers.runtime import Runtime
from workers.tracking.attempt import Tracking
from workers.tracking.base import Run
from workers.workdirs import remove, workdir_of

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1


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


class Supervisor:
    """Sees one claimed attempt through."""

    def __init__(self, runtime: Runtime, claim: Claim):
        self._runtime, self._claim = runtime, claim
        self._settings = runtime.settings
        self._reporter = Reporter(runtime, claim)
        self._workdir = workdir_of(runtime, claim)
        self._status = "running"
        self._tracking = Tracking(runtime.trackers, self._tracked_run)

    def run(self) -> None:
        """Run the attempt; every end but a lost lease is written to the job."""
        with Lease(self._runtime, self._claim) as lease:
            try:
                outcome = self._attempt(lease)
                if outcome.kind != "lost":
                    self._conclude(outcome, lease)
            except StaleAttempt as error:
                log.warning("%s: its engine was stopped and nothing more is written", error)
            except OperationalError as error:  # the lease runs out, and a sweeper queues the job again
                log.error("the end of %s could not be written: %s", self._claim.job_id, error.orig)
            finally:
                remove(self._workdir)
                self._tracking.close(self._status, leaving=self._runtime.stopping.is_set())

    def _attempt(self, lease: Lease) -> Outcome:
        try:
            if self._fans_out():
                return self._coordinate(lease)
            workdir = prepare(self._runtime, self._claim)
            runner, threads = self._settings.engine_runner, self._runtime.engine_threads
            with EngineProcess(workdir, runner, threads, int(self._config().get("devices", 1))) as engine:
                return self._listen(engine, lease)
        except StaleAttempt:
            raise
        except EngineError as error:
            return Outcome("error", describe(error))
        except NotFound as error:
            return Outcome("error", {"type": "invalid-config", "detail": f"{error} (any more)"})
        except ArtifactMissing as error:
            log.error("%s: %s", self._claim.job_id, error)
            state = "damaged" if isinstance(error, ArtifactDamaged) else "no longer"
            detail = f"a file that the job needs is {state} in the artifact store"
            return Outcome("error", {"type": "artifact-missing", "detail": detail})
        except StorageError as error:
            return self._storage_error(str(error))
        except OSError as error:
            return self._storage_error(error.strerror or type(error).__name__)
        except OperationalError as error:
            log.error("%s: the database stays away: %s", self._claim.job_id, error.orig)
            return Outcome("interrupted")
        except Exception:
            log.exception("attempt %d of %s broke", self._claim.attempt, self._claim.job_id)
            detail = "the worker failed unexpectedly; its log has the details"
            return Outcome("error", {"type": "internal", "detail": detail})

    def _fans_out(self) -> bool:
        """Whether the job is a profile to be measured in shards."""
        if self._claim.kind != "profile":
            return False
        return bool(self._config().get("shards", 1) > 1)

    def _tracked_run(self) -> Run:
        job = transact(self._runtime.reads, lambda session: jobs.get(session, self._claim.job_id))
        tags = {"workspace": job.workspace_id, "model": job.config["model"]}
        return Run(job.id, {**tags, "prompt_set": job.config["prompt_set"]}, job.config)

    def _config(self) -> dict[str, Any]:
        return transact(self._runtime.reads, lambda session: jobs.get(session, self._claim.job_id).config)

    def _coordinate(self, lease: Lease) -> Outcome:
        from workers.fanout import FanOut  # loads scipy, which most workers never need

        run = partial(run_job, self._runtime)
        return FanOut(self._runtime, self._claim, lease, self._reporter, run).run()

    def _storage_error(self, reason: str) -> Outcome:
        log.error("%s: storage failed: %s", self._claim.job_id, reason, exc_info=True)
        return Outcome("error", storage_error(reason))

    def _listen(self, engine: EngineProcess, lease: Lease) -> Outcome:
        """Store events until the engine ends or the lease is lost; stop it when asked to."""
        stopping = _Stopping(engine, self._settings.stop_grace_seconds, self._settings.kill_grace_seconds)
        while not lease.lost.is_set():
            if lease.stop_requested.is_set() or self._runtime.stopping.is_set():
                stopping.advance()
            event = engine.next_event(TICK_SECONDS)
            if event is None:
                self._reporter.tick()
                if engine.ended():
                    return _death(engine.exit_code())
            elif event["type"] in ("result", "error", "stopped"):
                self._reporter.flush()
                engine.exit_code()
                return Outcome(event["type"], event.get(event["type"], {}))
            else:
                self._reporter.handle(event)
                if event["type"] == "file":
                    engine.tell(f"taken {event['n']}")
                elif event["type"] == "metrics":
                    self._tracking.metrics(event["step"], event["values"])
        return Outcome("lost")

    def _conclude(self, outcome: Outcome, lease: Lease) -> None:
        """Write how the attempt ended, and tell the queue when the job waits again."""
        log_tail = _tail(self._workdir / "engine.log", self._settings.max_log_bytes)
        remove(self._workdir)  # first: a full disk then has room for the log
        if outcome.kind in ("error", "died") and log_tail:
            self._keep_log(log_tail)
        job = transact(
            self._runtime.sessions,
            lambda session: self._end(session, outcome),
            patience=self._settings.lease_seconds,
        )
        self._status = job.status
        log.info("%s: attempt %d ended, job is %s", job.id, self._claim.attempt, job.status)
        if job.status == "queued":
            self._runtime.publish(job.kind, job.id)

    def _end(self, session: Session, outcome: Outcome) -> Job:
        claim = self._claim
        if outcome.kind == "result":
            return attempts.finish(session, claim, "succeeded", result=outcome.data)
        if attempts.hold(session, claim).status == "cancelling":
            return attempts.finish(session, claim, "cancelled")
        if outcome.kind == "error":
            return attempts.finish(session, claim, "failed", error=outcome.data)
        if outcome.kind == "interrupted" or self._runtime.stopping.is_set():
            return attempts.release(session, claim)
        error = outcome.data or {"type": "engine-stopped", "detail": "the engine was stopped from outside"}
        return attempts.crash(session, claim, error, self._settings.engine_attempts)

    def _keep_log(self, tail: bytes) -> None:
        """Store the end of the engine's log; a job that failed does so with or without it."""
        try:
            self._reporter.store_log(tail)
        except StorageError as error:
            log.warning("log of %s not stored: %s", self._claim.job_id, error)


class _Stopping:
    """Stop flag, then SIGTERM, then SIGKILL, each after its grace."""

    def __init__(self, engine: EngineProcess, stop_grace: float, kill_grace: float):
        self._engine = engine
        self._steps = [
            (0.0, lambda: engine.tell("stop")),
            (stop_grace, lambda: engine.signal(signal.SIGTERM)),
            (stop_grace + kill_grace, lambda: engine.signal(signal.SIGKILL)),
        ]
        self._began: float | None = None

    def advance(self) -> None:
        """Take the next step when its time has come."""
        if self._began is None:
            self._began = time.monotonic()
        while self._steps and time.monotonic() - self._began >= self._steps[0][0]:
            self._steps.pop(0)[1]()


def _death(code: int | None) -> Outcome:
    """The engine ended without a word; ``code`` is its exit code, negative for a signal."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (often because memory ran out)" if name == "SIGKILL" else ""
        detail = f"the engine process was killed by {name}{hint}"
    else:
        detail = f"the engine process ended without a result (exit code {code})"
    return Outcome("died", {"type": "engine-died", "detail": detail})


def _tail(path: Path, limit: int) -> bytes:
    """The last ``limit`` bytes of a file; nothing when there is none."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return file.read()
