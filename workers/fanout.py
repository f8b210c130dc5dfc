"""A profile measured by many workers: split into shards, watched, merged (docs/adr/0009).

The worker that holds the profile coordinates: it opens the rounds of the plan, measures shards itself that
nobody has claimed, waits for the others, and merges. It holds no shard that another worker measures, and
keeps nothing in memory that a successor could not find again in the database and the artifact store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from sqlalchemy.orm import Session

from recast_engine import config as configs
from recast_engine.config import ProfileConfig
from recast_engine.profiling.assembly import profile_from_scores
from recast_engine.profiling.plan import Plan, Work
from recast_engine.profiling.scores import ScoreTable
from recast_engine.prompts import checked_prompts
from store.database import transact
from store.errors import ArtifactMissing
from store.models import Job
from store.repositories import artifacts, attempts, jobs, prompt_sets, shards
from store.repositories.attempts import Claim
from store.repositories.shards import Part
from workers.engine import plain
from workers.lease import Lease
from workers.outcome import Outcome
from workers.reporter import PROGRESS_SECONDS, Reporter
from workers.runtime import Runtime
from workers.workdirs import workdir_of

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25


class FanOut:
    """Sees one attempt at a sharded profile through."""

    def __init__(
        self,
        runtime: Runtime,
        claim: Claim,
        lease: Lease,
        reporter: Reporter,
        run_job: Callable[[str], object],
    ):
        """``run_job`` claims a job and sees it through in the calling thread."""
        self._runtime, self._claim, self._lease, self._reporter = runtime, claim, lease, reporter
        self._run_job = run_job

    def run(self) -> Outcome:
        """Measure every round of the plan and store the profile.

        Raises:
            EngineError: the plan or the scores do not allow a profile.
            StaleAttempt: the attempt is over.
        """
        config, plan = self._plan()
        table = plan.empty()
        with _Hand(self._run_job) as hand:
            while (work := plan.next(table)) is not None:
                parts = plan.split(work, config.shards)
                opened = self._open(work, [Part(p.to_dict(), p.images) for p in parts])
                if (ended := self._finish(opened, hand)) is not None:
                    return ended
                table = ScoreTable.merge([table, *self._tables(opened)])
        profile = profile_from_scores(plan, table)
        payload = plain({"stage": None, "profile": profile.to_dict()})
        self._reporter.handle({"type": "finding", "kind": "profile", "payload": payload})
        return Outcome("result", plain(profile.summary()))

    def _plan(self) -> tuple[ProfileConfig, Plan]:
        def look(session: Session) -> tuple[ProfileConfig, str]:
            job = jobs.get(session, self._claim.job_id)
            config = configs.load(ProfileConfig, job.config)
            return config, prompt_sets.get(session, config.prompt_set, job.workspace_id).content

        config, content = transact(self._runtime.sessions, look)
        prompts = checked_prompts(content, config.prompt_set_sha256)
        return config, Plan.of(config.estimator, config.rewards, prompts, config.seed)

    def _open(self, work: Work, parts: Sequence[Part]) -> Sequence[Job]:
        """The shards of a round, made or found, with the profile's progress set to expect them."""

        def begin(session: Session) -> tuple[Sequence[Job], bool]:
            found, new = shards.open_round(session, self._claim, work.round, parts)
            total, done = sum(part.images for part in parts), sum(map(shards.scored, found))
            name = "profiling" if work.round == 0 else f"profiling, round {work.round + 1}"
            attempts.begin_phase(session, self._claim, name, total, done)
            return found, new

        found, new = transact(self._runtime.sessions, begin, patience=self._runtime.settings.lease_seconds)
        if new:
            self._runtime.publish_group(shards.KIND, [shard.id for shard in found])
        return found

    def _finish(self, opened: Sequence[Job], hand: _Hand) -> Outcome | None:
        """Wait until every shard of a round has succeeded, measuring what nobody has claimed.

        Returns:
            None, or how the attempt ends instead. A failed or cancelled profile waits for its shards to
            stop, so that it is over when it says so and its cost is whole.
        """
        watch = _Watch(self._runtime, self._claim, [shard.id for shard in opened])
        while not self._lease.lost.is_set():
            found = watch.look()
            if self._runtime.stopping.is_set():
                return Outcome("stopped")
            failed = next((shard for shard in found if shard.status == "failed"), None)
            if failed is not None:
                watch.cancel_the_rest()
            if all(jobs.is_terminal(shard) for shard in found):
                watch.report()
                if failed is not None:
                    return Outcome("error", failed.error or {})
                succeeded = bool(found) and all(shard.status == "succeeded" for shard in found)
                return None if succeeded else Outcome("stopped")
            hand.offer([shard.id for shard in found if shard.status == "queued"])
            self._lease.lost.wait(POLL_SECONDS)
        return Outcome("lost")

    def _tables(self, opened: Sequence[Job]) -> list[ScoreTable]:
        """The scores of a round's shards. Raises ArtifactMissing, StorageError."""
        rows = transact(
            self._runtime.reads,
            lambda session: [artifacts.of_job(session, shard.id, shards.SCORES) for shard in opened],
        )
        tables = []
        for shard, found in zip(opened, rows, strict=True):
            if not found:
                raise ArtifactMissing(f"scores of {shard.id}")
            path = workdir_of(self._runtime, self._claim) / "shards" / f"{shard.id}.safetensors"
            self._runtime.artifacts.fetch(found[-1].key, path, found[-1].sha256)
            tables.append(ScoreTable.load(path))
        return tables


class _Watch:
    """A round's shards as they are now, and what of them the profile has been told."""

    def __init__(self, runtime: Runtime, claim: Claim, ids: Sequence[str]):
        self._runtime, self._claim, self._ids = runtime, claim, ids
        self._shards: Sequence[Job] = ()
        self._told: object = None
        self._told_at = -PROGRESS_SECONDS
        self._cancelled = False

    def look(self) -> Sequence[Job]:
        """The shards, fresh; the profile is told what changed, but not all the time."""
        self._shards = transact(
            self._runtime.reads,
            lambda session: [jobs.get(session, id) for id in self._ids],
            patience=self._runtime.settings.lease_seconds,
        )
        if time.monotonic() - self._told_at >= PROGRESS_SECONDS:
            self.report()
        return self._shards

    def report(self) -> None:
        """Tell the profile how its shards stand, unless it knows. Raises StaleAttempt."""
        now = [(shard.status, shard.done, shard.cost, shard.warnings) for shard in self._shards]
        if now != self._told:
            self._write(lambda session: shards.report(session, self._claim, self._shards))
            self._told, self._told_at = now, time.monotonic()

    def cancel_the_rest(self) -> None:
        """One has failed: stop the others. Raises StaleAttempt."""
        if not self._cancelled:
            self._write(lambda session: shards.cancel(session, self._claim))
            self._cancelled = True

    def _write(self, work: Callable[[Session], None]) -> None:
        transact(self._runtime.sessions, work, patience=self._runtime.settings.lease_seconds)


class _Hand:
    """A context that runs one job at a time beside the caller; leaving it waits for the one under way."""

    def __init__(self, run_job: Callable[[str], object]):
        self._run_job = run_job
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard")
        self._running: Future[object] | None = None

    def __enter__(self) -> _Hand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)

    def offer(self, ids: Sequence[str]) -> None:
        """Take one of the queued ``ids``, if the hand is free: the last, as messages go out from the first.

        A job that broke is left to its lease, as in any worker that breaks.
        """
        if self._running is not None:
            if not self._running.done():
                return
            if error := self._running.exception():
                log.error("a shard's run broke", exc_info=error)
        self._running = self._pool.submit(self._run_job, ids[-1]) if ids else None
