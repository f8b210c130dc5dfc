"""Engine events become rows and files, each write refused once the attempt is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from store.artifacts import StoredFile, StoredFolder
from store.database import transact
from store.models import Job, no_cost
from store.repositories import (
    adapters,
    allocations,
    artifacts,
    attempts,
    evaluations,
    jobs,
    profiles,
    proposals,
    trainings,
)
from store.repositories.attempts import Claim
from workers.runtime import Runtime

PROGRESS_SECONDS = 0.5

Event = Mapping[str, Any]


class Reporter:
    """Writes what the engine of one attempt reports.

    Progress and cost are gathered and written at most every ``PROGRESS_SECONDS``, all else at once.

    Every method raises StaleAttempt when the attempt is over, StorageError when bytes cannot be stored, and
    OperationalError when the database stays away.
    """

    def __init__(self, runtime: Runtime, claim: Claim):
        self._runtime, self._claim = runtime, claim
        self._phase: Event | None = None  # announced, and waiting to hear where it starts
        self._done: int | None = None
        self._cost = no_cost()
        self._written_at = 0.0
        self._profiles: dict[int | None, str] = {}  # stage -> profile measured in this attempt

    def handle(self, event: Event) -> None:
        """Store one event of the engine."""
        if event["type"] != "advance":
            self._begin_phase()
        if event["type"] not in ("advance", "cost"):  # what went before is told before
            self.flush()
        handler: Callable[[Event], None] = getattr(self, f"_on_{event['type']}")
        handler(event)
        self._flush_due()

    def tick(self) -> None:
        """Nothing happens for a moment: write what is due."""
        self._begin_phase()
        self._flush_due()

    def _flush_due(self) -> None:
        if time.monotonic() - self._written_at >= PROGRESS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write gathered progress and cost now."""
        if self._done is None and not any(self._cost.values()):
            return
        self._write(self._write_gathered)
        self._done, self._cost, self._written_at = None, no_cost(), time.monotonic()

    def _write(self, work: Callable[[Session], None]) -> None:
        transact(self._runtime.sessions, work, patience=self._runtime.settings.lease_seconds)

    def _write_gathered(self, session: Session) -> None:
        attempts.add_cost(session, self._claim, self._cost)
        if self._done is not None:
            attempts.progress(session, self._claim, self._done)

    def _on_phase(self, event: Event) -> None:
        self._phase = event

    def _begin_phase(self, start: int = 0) -> None:
        """Write the phase announced last, if it is not written yet; it counts from ``start``."""
        if self._phase is None:
            return
        name, total = self._phase["name"], self._phase["total"]
        self._phase = None
        self._write(lambda session: attempts.begin_phase(session, self._claim, name, total, start))

    def _on_advance(self, event: Event) -> None:
        if self._phase is not None:  # a phase that advances at once goes on from there
            self._begin_phase(event["done"])
        self._done = max(event["done"], self._done or 0)

    def _on_cost(self, event: Event) -> None:
        self._cost = {name: value + event[name] for name, value in self._cost.items()}

    def _on_metrics(self, event: Event) -> None:
        def work(session: Session) -> None:
            attempts.add_event(
                session, self._claim, "metrics", {"step": event["step"], "values": event["values"]}
            )
            trainings.add_metrics(session, self._claim.job_id, event["step"], event["values"])

        self._write(work)

    def _on_finding(self, event: Event) -> None:
        store: Callable[[Session, Job, Event], dict[str, Any]] = getattr(self, f"_find_{event['kind']}")

        def work(session: Session) -> None:
            job = attempts.hold(session, self._claim)
            data = store(session, job, event["payload"])
            if event["kind"] != "warning":
                jobs.add_event(session, job.id, "finding", {"kind": event["kind"], **data})

        self._write(work)

    def _find_warning(self, session: Session, job: Job, payload: Event) -> dict[str, Any]:
        attempts.add_warning(session, self._claim, payload["text"])
        return {}

    def _find_stage(self, session: Session, job: Job, payload: Event) -> dict[str, Any]:
        return dict(payload)

    def _find_evaluation(self, session: Session, job: Job, payload: Event) -> dict[str, Any]:
        evaluations.create(session, job.id, payload)
        return {"evaluation": job.id}

    def _find_profile(self, session: Session, job: Job, payload: Event) -> dict[str, Any]:
        stage, profile = payload["stage"], payload["profile"]
        request = {"training": job.id, "stage": stage, "epoch": payload.get("epoch")}
        if job.kind == "profile":
            for text in profile["warnings"]:
                attempts.add_warning(session, self._claim, text)
            profiles.create(session, job.id, profile)
            return {"stage": stage, "profile": job.id}
        measured = _measured_before(session, job, request, profile)
        if measured is None:
            measured = jobs.create_measured(
                session,
                job,
                kind="profile",
                request=request,
                config=_profile_config(job.config, stage, profile),
                cost=profile.get("cost", {}),
                warnings=profile["warnings"],
            )
            profiles.create(session, measured.id, profile)
        self._profiles[stage] = measured.id
        return {"stage": stage, "profile": measured.id}

    def _find_allocation(self, session: Session, job: Job, payload: Event) -> dict[str, Any]:
        stage, epoch = payload["stage"], payload["epoch"]
        asked = job.config["stages"][stage]["allocation"]
        data = {"stage": stage, "epoch": epoch, "reason": payload["reason"]}
        if isinstance(asked, str):  # a stored allocation, which the stage uses as it is
            return {**data, "allocation": asked}
        allocation = payload["allocation"]
        row = allocations.find_same(session, job.id, stage, epoch, allocation)
        if row is None:
            row = allocations.create(
                session,
                workspace_id=job.workspace_id,
                allocation=allocation,
                profile_id=self._profile_of(session, payload["profile_stage"]) or asked.get("profile"),
                training_id=job.id,
                stage=stage,
                epoch=epoch,
                reason=payload["reason"],
            )
        return {**data, "allocation": row.id, "profile": row.profile_id}

    def _profile_of(self, session: Session, stage: int | None) -> str | None:
        """The profile measured before ``stage``, in this attempt or an earlier one."""
        if stage is None or stage in self._profiles:
            return self._profiles.get(stage)
        earlier = jobs.children(session, self._claim.job_id, kind="profile")
        return next((job.id for job in reversed(earlier) if job.request["stage"] == stage), None)

    def _on_file(self, event: Event) -> None:
        claim, kind, name, meta = self._claim, event["kind"], event["name"], event["metadata"]
        path = Path(event["path"])
        key = f"jobs/{claim.job_id}/{claim.attempt}/{kind}/{name}"
        stored: StoredFile | StoredFolder
        if path.is_dir():
            folder = self._runtime.artifacts.put_folder(key, path)
            meta = {**meta, "files": [file for file, _ in folder.files]}
            stored = folder
        else:
            stored = self._runtime.artifacts.put_file(key, path)
        self._write(lambda session: self._record(session, kind, name, key, stored, meta))

    def _on_discard(self, event: Event) -> None:
        """Delete a stored file of any attempt: out of the lists first, then its bytes, then its row.

        What a crash leaves between these is deleted with the next.
        """
        job_id = self._claim.job_id

        def hide(session: Session) -> None:
            attempts.hold(session, self._claim)
            artifacts.discard(session, job_id, event["kind"], event["name"])

        self._write(hide)
        with self._runtime.sessions() as session:
            doomed = [(row.id, row.key) for row in artifacts.discarded(session, job_id)]
        for row_id, key in doomed:
            self._runtime.artifacts.delete_prefix(key)
            self._write(partial(artifacts.delete, artifact_id=row_id))

    def store_log(self, data: bytes) -> None:
        """Keep the engine's log beside what it produced."""
        claim, name = self._claim, "engine.log"
        key = f"jobs/{claim.job_id}/{claim.attempt}/log/{name}"
        stored = self._runtime.artifacts.put_bytes(key, data)
        self._write(lambda session: self._record(session, "log", name, key, stored, {}))

    def _record(
        self, session: Session, kind: str, name: str, key: str, stored: StoredFile | StoredFolder, meta: Event
    ) -> None:
        """The row of bytes that are stored, and what they are beside: an adapter, or a proposal image."""
        job = attempts.hold(session, self._claim)
        if kind == "checkpoint" and _is_newest(session, job, meta["epoch"]):
            attempts.came_further(session, self._claim)
        row = artifacts.create(
            session,
            job_id=job.id,
            attempt=job.attempt,
            kind=kind,
            name=name,
            key=key,
            bytes=stored.bytes,
            sha256=stored.sha256,
            step=meta.get("epoch"),
            meta=meta,
        )
        data = {"kind": kind, "name": name, "artifact": row.id, "bytes": row.bytes, "step": row.step}
        if kind == "adapter":
            adapter = adapters.create(
                session,
                workspace_id=job.workspace_id,
                artifact=row,
                step=meta["step"],
                epoch=meta["epoch"],
                base_model=meta["base_model"],
                rank=meta["rank"],
                alpha=meta["alpha"],
                final=meta["final"],
                provenance=_provenance(session, job),
            )
            data["adapter"] = adapter.id
        if kind == "proposal":
            proposals.remember(
                session,
                workspace_id=job.workspace_id,
                prompt_key=meta["prompt_key"],
                number=meta["number"],
                artifact=row,
            )
        jobs.add_event(session, job.id, "file", data)


def _is_newest(session: Session, job: Job, epoch: int) -> bool:
    """Whether no attempt has stored a checkpoint of ``epoch`` or later: to repeat one is no progress."""
    known = trainings.newest_checkpoints(session, job.id)
    return not known or (known[0].step or 0) < epoch


def _provenance(session: Session, job: Job) -> dict[str, Any]:
    """What made the training's adapter: enough to find and repeat all of it."""
    computed = allocations.of_training(session, job.id)
    stages, first_epoch = [], 0
    for number, stage in enumerate(job.config["stages"]):
        asked = stage["allocation"]
        used = [
            {"id": row.id, "epoch": row.epoch, "reason": row.reason, "profile": row.profile_id}
            for row in computed
            if row.stage == number
        ]
        if isinstance(asked, str):
            profile = allocations.get(session, asked, job.workspace_id).profile_id
            used = [{"id": asked, "epoch": first_epoch, "reason": "named", "profile": profile}]
        facts = {"budgets": stage["budgets"], "epochs": stage["epochs"]}
        stages.append({**facts, "allocation": used[-1]["id"] if used else None, "allocations": used})
        first_epoch += stage["epochs"]
    kept = ("model", "prompt_set", "adapter", "seed")
    return {"training": job.id, **{name: job.config.get(name) for name in kept}, "stages": stages}


def _measured_before(session: Session, job: Job, request: Event, profile: Event) -> Job | None:
    """The same profile of the same moment, if an earlier attempt has stored it already."""
    for child in jobs.children(session, job.id, kind="profile"):
        row = profiles.get(session, child.id)
        same = row.levels == list(profile["levels"]) and row.curves == dict(profile["curves"])
        if child.request == request and same:
            return child
    return None


def _profile_config(training: Mapping[str, Any], stage: int, profile: Event) -> dict[str, Any]:
    """The config with which the training measured the profile, in the form of a profile job's."""
    asked = training["stages"][stage]["allocation"]
    return {
        "model": training["model"],
        "rewards": list(profile["rewards"]),
        "prompt_set": training["prompt_set"],
        "adapter": training.get("adapter"),
        "estimator": asked.get("estimator") if isinstance(asked, Mapping) else None,
        "seed": training["seed"],
    }
