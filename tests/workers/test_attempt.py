"""One attempt at a time, in this process: storage failures, lost leases, locked databases, bad requests."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import text

from store import queue
from store.artifacts import ArtifactStore
from store.database import make_engine, session_factory
from store.errors import ArtifactDamaged, StaleAttempt, StorageError
from store.models import Artifact, IdempotencyKey, WorkerHeartbeat
from store.repositories import (
    adapters,
    allocations,
    artifacts,
    attempts,
    idempotency,
    jobs,
    trainings,
    workers,
)
from store.repositories.attempts import Claim
from store.types import utcnow
from tests.workers.conftest import Service
from tests.workers.fake_engine import ALLOCATION, PROFILE
from workers.engine import storage_error
from workers.lease import Lease
from workers.preparation import prepare
from workers.reporter import Reporter
from workers.runtime import Runtime
from workers.sweeper import Sweeper
from workers.tasks import run_job
from workers.workdirs import workdir_of


def claim(service: Service, job_id: str, worker: str = "w1") -> Claim:
    with service.runtime.sessions.begin() as session:
        found = attempts.claim(session, job_id, worker, service.settings.lease_seconds)
    assert found is not None
    return found


def reporter(service: Service, **fake: Any) -> tuple[Reporter, Claim]:
    held = claim(service, service.submit(publish=False, **fake))
    return Reporter(service.runtime, held), held


def event(type: str, **fields: Any) -> dict[str, Any]:
    return {"type": type, **fields}


def file_event(path: Path, kind: str = "samples", **metadata: Any) -> dict[str, Any]:
    return event("file", n=1, kind=kind, name=path.name, path=str(path), metadata={"epoch": 1, **metadata})


def steal(service: Service, job_id: str) -> Claim:
    """Make the job another worker's."""
    with service.runtime.sessions.begin() as session:
        job = jobs.lock(session, job_id)
        jobs.back_to_queue(job)
    return claim(service, job_id, "thief")


def broken_store(folder: Path) -> ArtifactStore:
    """A store whose folder cannot be made, because a file is in its place."""
    folder.mkdir()
    (folder / "jobs").write_bytes(b"")
    return ArtifactStore(str(folder))


def test_a_stored_file_is_listed_and_a_failed_one_is_not(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "epoch-000001.png"
    path.write_bytes(b"png")
    report, held = reporter(service)
    report.handle(file_event(path))
    broken = replace(service.runtime, artifacts=broken_store(tmp_path / "broken"))
    with pytest.raises(StorageError, match="Not a directory"):
        Reporter(broken, held).handle(file_event(path, "report"))
    with service.runtime.sessions() as session:
        assert [row.bytes for row in trainings.samples(session, held.job_id)] == [3]
        assert artifacts.find(session, held.job_id, "report", path.name) is None
        assert session.query(Artifact).count() == 1


def test_a_full_disk_fails_the_job_with_a_clear_error(service: Service, tmp_path: Path) -> None:
    broken = replace(service.runtime, artifacts=broken_store(tmp_path / "broken"))
    job_id = service.submit(publish=False)
    assert run_job(broken, job_id)
    job = service.job(job_id)
    assert job.status == "failed"
    assert job.error == storage_error("Not a directory")
    with service.runtime.sessions() as session:
        assert session.query(Artifact).count() == 0


def test_a_stale_reporter_writes_nothing(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    path.write_bytes(b"adapter")
    report, held = reporter(service)
    steal(service, held.job_id)
    before = [row.seq for row in service.events(held.job_id)]
    meta = {"step": 1, "rank": 4, "alpha": 8.0, "base_model": "miniature", "final": True}
    for late in (
        event("metrics", step=1, values={"objective": 1.0}),
        event("finding", kind="profile", payload={"stage": 0, "profile": PROFILE}),
        event("finding", kind="warning", payload={"text": "late"}),
        file_event(path, "adapter", **meta),
    ):
        with pytest.raises(StaleAttempt):
            report.handle(late)
    with pytest.raises(StaleAttempt):
        report.handle(event("advance", done=1))
    with service.runtime.sessions() as session:
        assert adapters.page(session, service.workspace) == ([], None)
        assert trainings.metrics(session, held.job_id) == []
        assert jobs.children(session, held.job_id) == []
    assert [row.seq for row in service.events(held.job_id)] == before


def test_an_allocation_finds_the_profile_of_an_earlier_attempt(service: Service) -> None:
    first, held = reporter(service)
    first.handle(event("finding", kind="profile", payload={"stage": 0, "profile": PROFILE}))
    second = Reporter(service.runtime, steal(service, held.job_id))
    payload = {"stage": 0, "epoch": 4, "reason": "drift", "profile_stage": 0, "allocation": ALLOCATION}
    second.handle(event("finding", kind="allocation", payload=payload))
    with service.runtime.sessions() as session:
        (profile,) = jobs.children(session, held.job_id)
        (row,) = allocations.of_training(session, held.job_id)
    assert (row.profile_id, row.epoch, row.budgets) == (profile.id, 4, {"geneval": 0.75, "ocr": 0.25})
    assert row.reason == "drift"
    assert profile.config["rewards"] == ["geneval", "ocr"]
    assert profile.status == "succeeded"


def test_an_attempt_that_comes_to_the_same_leaves_nothing_twice(service: Service, tmp_path: Path) -> None:
    """As after a kill before the first checkpoint, or between the adapter and the result."""
    path = tmp_path / "final.safetensors"
    path.write_bytes(b"adapter")
    meta = {"step": 1, "rank": 4, "alpha": 8.0, "base_model": "miniature", "final": True}
    report, held = reporter(service)
    for attempt in range(2):
        if attempt:
            report = Reporter(service.runtime, steal(service, held.job_id))
        report.handle(event("finding", kind="profile", payload={"stage": 0, "profile": PROFILE}))
        facts = {"stage": 0, "epoch": 0, "reason": "start"}
        payload = {**facts, "profile_stage": 0, "allocation": ALLOCATION}
        report.handle(event("finding", kind="allocation", payload=payload))
        report.handle(file_event(path, "adapter", **meta))
    findings = [row.data for row in service.events(held.job_id, "finding")]
    assert findings[:2] == findings[2:]
    first, second = [row.data["adapter"] for row in service.events(held.job_id, "file")]
    assert first == second
    other = ALLOCATION | {"matrix": [[0.8, 0.7], [0.2, 0.3]]}
    report.handle(event("finding", kind="allocation", payload=payload | {"allocation": other}))
    path.write_bytes(b"another")
    report = Reporter(service.runtime, steal(service, held.job_id))
    report.handle(file_event(path, "adapter", **meta))
    with service.runtime.sessions() as session:
        assert len(jobs.children(session, held.job_id)) == 1
        assert [row.matrix for row in allocations.of_training(session, held.job_id)] == [
            ALLOCATION["matrix"],
            other["matrix"],
        ]
        rows, _ = adapters.page(session, service.workspace)
        assert [(row.id == first, row.final) for row in rows] == [(False, True), (True, False)]


def test_a_stored_allocation_is_used_and_not_stored_again(service: Service) -> None:
    with service.runtime.sessions.begin() as session:
        stored = allocations.create(session, workspace_id=service.workspace, allocation=ALLOCATION)
    config = {"prompt_set": "pset_test", "stages": [{"allocation": stored.id}]}
    held = claim(service, service.submit_config("training", config, publish=False))
    assert str(prepare(service.runtime, held)) == str(workdir_of(service.runtime, held))
    request = (workdir_of(service.runtime, held) / "request.json").read_text()
    assert stored.id in request
    assert '"matrix": [[0.7, 0.8], [0.3, 0.2]]' in request
    facts = {"stage": 0, "epoch": 0, "reason": "named"}
    payload = {**facts, "profile_stage": None, "allocation": ALLOCATION}
    Reporter(service.runtime, held).handle(event("finding", kind="allocation", payload=payload))
    with service.runtime.sessions() as session:
        assert allocations.of_training(session, held.job_id) == []
    finding = service.events(held.job_id, "finding")[-1].data
    assert finding == {"kind": "allocation", **facts, "allocation": stored.id}


def test_an_adapters_provenance_lists_named_allocations_too(service: Service, tmp_path: Path) -> None:
    with service.runtime.sessions.begin() as session:
        stored = allocations.create(session, workspace_id=service.workspace, allocation=ALLOCATION)
    stage = {"budgets": {"ocr": 1.0}, "epochs": 2, "allocation": stored.id}
    config = {"prompt_set": "pset_test", "stages": [stage, stage | {"epochs": 3}]}
    held = claim(service, service.submit_config("training", config, publish=False))
    path = tmp_path / "final.safetensors"
    path.write_bytes(b"adapter")
    meta = {"step": 1, "rank": 4, "alpha": 8.0, "base_model": "miniature", "final": True}
    Reporter(service.runtime, held).handle(file_event(path, "adapter", **meta))
    with service.runtime.sessions() as session:
        (row,), _ = adapters.page(session, service.workspace)
    used = {"id": stored.id, "reason": "named", "profile": None}
    assert row.provenance["stages"] == [
        {**stage, "allocations": [{**used, "epoch": 0}]},
        {**stage, "epochs": 3, "allocations": [{**used, "epoch": 2}]},
    ]


def test_refreshed_allocations_are_stored_in_order_and_once(service: Service) -> None:
    """Each with the profile it rests on; epochs that a resumed attempt repeats add nothing."""
    config = {
        "model": "miniature",
        "prompt_set": "pset_test",
        "seed": 0,
        "stages": [{"budgets": {"ocr": 1.0}, "epochs": 9, "allocation": {"profile": None}}],
    }
    held = claim(service, service.submit_config("training", config, publish=False))
    later = {**PROFILE, "curves": {"ocr": {"divergence": [0.0, 0.1]}}}
    moved = {**ALLOCATION, "matrix": [[0.8, 0.7], [0.2, 0.3]]}

    def tell(report: Reporter, epoch: int, reason: str, profile: Any, allocation: Any) -> None:
        payload = {"stage": 0, "epoch": epoch, "profile": profile}
        report.handle(event("finding", kind="profile", payload=payload))
        payload = {"stage": 0, "epoch": epoch, "reason": reason, "profile_stage": 0, "allocation": allocation}
        report.handle(event("finding", kind="allocation", payload=payload))

    first = Reporter(service.runtime, held)
    tell(first, 0, "start of the stage", PROFILE, ALLOCATION)
    tell(first, 4, "drift of ocr (p = 1e-05)", later, moved)
    again = Reporter(service.runtime, steal(service, held.job_id))
    tell(again, 4, "drift of ocr (p = 1e-05)", later, moved)
    tell(again, 8, "drift of ocr (p = 0.001)", later, ALLOCATION)
    with service.runtime.sessions() as session:
        rows = allocations.of_training(session, held.job_id)
        measured = jobs.children(session, held.job_id)
    assert [row.epoch for row in rows] == [0, 4, 8]
    assert [row.profile_id for row in rows] == [job.id for job in measured]
    assert rows[1].reason == "drift of ocr (p = 1e-05)"
    events = [row.data for row in service.events(held.job_id, "finding") if row.data["kind"] == "allocation"]
    assert [data["allocation"] for data in events] == [rows[0].id, rows[1].id, rows[1].id, rows[2].id]
    assert events[-1]["reason"] == "drift of ocr (p = 0.001)"


def test_a_request_for_something_that_is_gone_fails_the_job(service: Service) -> None:
    config = {"prompt_set": "pset_test", "adapter": "adapt_gone"}
    job_id = service.submit_config("profile", config, publish=False)
    assert run_job(service.runtime, job_id)
    job = service.job(job_id)
    assert job.error == {"type": "invalid-config", "detail": "no adapter 'adapt_gone' (any more)"}


def test_a_checkpoint_whose_bytes_are_gone_fails_the_job(service: Service) -> None:
    job_id = service.submit(publish=False, epochs=2, die_at=1)
    assert run_job(service.runtime, job_id)
    assert service.job(job_id).status == "queued"
    service.runtime.artifacts.delete_prefix(f"jobs/{job_id}/1/checkpoint")
    assert run_job(service.runtime, job_id)
    job = service.job(job_id)
    assert job.error is not None
    assert (job.status, job.error["type"]) == ("failed", "artifact-missing")


def test_a_gone_checkpoint_leaves_the_one_before_and_an_empty_folder(service: Service) -> None:
    """The engine then goes on from the older one and says so."""
    job_id = service.submit(publish=False, epochs=3, die_at=3)
    run_job(service.runtime, job_id)
    service.runtime.artifacts.delete_prefix(f"jobs/{job_id}/1/checkpoint/epoch-000003")
    workdir = prepare(service.runtime, claim(service, job_id))
    assert sorted(path.name for path in (workdir / "resume").iterdir()) == ["epoch-000002", "epoch-000003"]
    assert not list((workdir / "resume" / "epoch-000003").iterdir())
    assert (workdir / "resume" / "epoch-000002" / "weights.bin").read_bytes() == bytes([2]) * 100
    assert json.loads((workdir / "request.json").read_text())["resume_from"].endswith("epoch-000003")


def test_damaged_checkpoints_are_passed_over_as_far_back_as_it_takes(service: Service) -> None:
    job_id = service.submit(publish=False, epochs=4, die_at=4)
    run_job(service.runtime, job_id)
    for epoch in (2, 3, 4):
        key = f"jobs/{job_id}/1/checkpoint/epoch-{epoch:06d}/weights.bin"
        service.runtime.artifacts.put_bytes(key, b"flipped")
    workdir = prepare(service.runtime, claim(service, job_id))
    kept = [path.parent.name for path in (workdir / "resume").glob("*/weights.bin")]
    assert kept == ["epoch-000001"]
    service.runtime.artifacts.put_bytes(f"jobs/{job_id}/1/checkpoint/epoch-000001/state.json", b"{}")
    with pytest.raises(ArtifactDamaged):
        prepare(service.runtime, steal(service, job_id))


def test_a_damaged_adapter_is_used_by_nobody(service: Service) -> None:
    """Weights with a flipped bit load like any others, and would be judged like any others."""
    run_job(service.runtime, service.submit(publish=False, epochs=1))
    with service.runtime.sessions() as session:
        (adapter,), _ = adapters.page(session, service.workspace)
        key = adapters.artifact(session, adapter).key
    service.runtime.artifacts.put_bytes(key, b"adaqter")
    config = {"prompt_set": "pset_test", "adapter": adapter.id, "fake": {"do": "profile"}}
    job_id = service.submit_config("profile", config, publish=False)
    assert run_job(service.runtime, job_id)
    assert service.job(job_id).error == {
        "type": "artifact-missing",
        "detail": "a file that the job needs is damaged in the artifact store",
    }


def test_crashes_between_which_a_training_came_further_are_no_row(service: Service) -> None:
    """An engine that is killed after each epoch finishes; one that comes to the same epoch again does not."""
    attempts_needed = 2 * service.settings.engine_attempts
    job_id = service.submit(publish=False, epochs=attempts_needed, die_always=True)
    for epoch in range(1, attempts_needed + 1):
        assert run_job(service.runtime, job_id)
        assert (service.job(job_id).status, service.job(job_id).crashes) == ("queued", 1), epoch
    assert run_job(service.runtime, job_id)
    assert (service.job(job_id).status, service.job(job_id).attempt) == ("succeeded", attempts_needed + 1)


def test_a_checkpoint_that_only_repeats_an_earlier_one_is_no_progress(
    service: Service, tmp_path: Path
) -> None:
    job_id = service.submit(publish=False)
    for name, crashes in (("epoch-000002", 0), ("epoch-000002", 1), ("epoch-000001", 2), ("epoch-000003", 0)):
        held = claim(service, job_id)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "weights.bin").write_bytes(b"w")
        epoch = int(name[-1])
        event_of = file_event(tmp_path / name, "checkpoint", epoch=epoch)
        Reporter(service.runtime, held).handle(event_of)
        assert service.job(job_id).crashes == crashes, name
        with service.runtime.sessions.begin() as session:
            attempts.crash(session, held, {"type": "engine-died", "detail": ""}, 9)


def test_a_discarded_checkpoint_leaves_the_store(service: Service, tmp_path: Path) -> None:
    """Rows and bytes of every attempt go; one whose bytes could not be deleted goes with the next."""
    held = claim(service, service.submit(publish=False))
    job_id = held.job_id
    for name in ("epoch-000001", "epoch-000002", "epoch-000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_bytes(b"w")
        Reporter(service.runtime, held).handle(file_event(tmp_path / name, "checkpoint"))
    held = steal(service, job_id)
    report = Reporter(service.runtime, held)
    report.handle(file_event(tmp_path / "epoch-000002", "checkpoint"))

    def stored() -> list[str]:
        root = Path(service.settings.artifacts_url) / "jobs" / job_id
        return sorted(str(path.relative_to(root).parent) for path in root.rglob("weights.bin"))

    class Unreachable(ArtifactStore):
        """Deletes nothing."""

        def delete_prefix(self, prefix: str) -> None:
            raise StorageError("away")

    away = replace(service.runtime, artifacts=Unreachable(service.settings.artifacts_url))
    with pytest.raises(StorageError):
        Reporter(away, held).handle(event("discard", kind="checkpoint", name="epoch-000001"))
    assert "1/checkpoint/epoch-000001" in stored()
    report.handle(event("discard", kind="checkpoint", name="epoch-000002"))
    assert stored() == ["1/checkpoint/epoch-000003"]
    with service.runtime.sessions() as session:
        assert [row.name for row in trainings.checkpoints(session, job_id)] == ["epoch-000003"]
        assert session.query(Artifact).count() == 1
    report.handle(event("discard", kind="checkpoint", name="epoch-000002"))  # again: nothing to do


def test_two_callers_run_one_job_once(service: Service) -> None:
    job_id = service.submit(publish=False, epochs=1, pause=0.2)
    results: list[bool] = []
    callers = [
        threading.Thread(target=lambda: results.append(run_job(service.runtime, job_id))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == [False, False, False, True]
    assert (service.job(job_id).status, service.job(job_id).attempt) == ("succeeded", 1)
    assert run_job(service.runtime, job_id) is False  # a late message


def test_a_stolen_job_loses_its_engine_and_nothing_is_written(service: Service) -> None:
    job_id = service.submit(publish=False, do="hang")
    worker = threading.Thread(target=run_job, args=(service.runtime, job_id))
    worker.start()
    service.wait(lambda: service.job(job_id).phase == "hanging")
    (engine,) = [child for child in psutil.Process().children() if "workers.engine" in child.cmdline()]
    steal(service, job_id)
    worker.join(10)
    assert not worker.is_alive()
    assert not engine.is_running()
    job = service.job(job_id)
    assert (job.status, job.attempt, job.worker) == ("running", 2, "thief")


def locked(service: Service, seconds: float) -> threading.Thread:
    """Hold the database's write lock for a while, from now on."""
    taken = threading.Event()

    def hold() -> None:
        with make_engine(service.settings.database_url).connect() as connection:
            connection.execute(text("SELECT 1"))
            taken.set()
            time.sleep(seconds)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(5)
    return holder


def impatient(service: Service) -> Runtime:
    """A runtime whose database gives up waiting for a lock almost at once."""
    engine = make_engine(service.settings.database_url, busy_seconds=0.1)
    return replace(service.runtime, sessions=session_factory(engine))


def test_a_briefly_locked_database_costs_only_time(service: Service) -> None:
    runtime = impatient(service)
    job_id = service.submit(publish=False, epochs=4, pause=0.3)
    worker = threading.Thread(target=run_job, args=(runtime, job_id))
    worker.start()
    service.wait(lambda: service.events(job_id, "file"))
    locked(service, 1.2).join()
    worker.join(20)
    job = service.job(job_id)
    assert (job.status, job.attempt) == ("succeeded", 1)


def test_a_database_that_stays_away_does_not_fail_the_job(service: Service) -> None:
    runtime = impatient(service)
    job_id = service.submit(publish=False, epochs=4, pause=0.3)
    worker = threading.Thread(target=run_job, args=(runtime, job_id))
    worker.start()
    service.wait(lambda: service.events(job_id, "file"))
    locked(service, 1.5 * service.settings.lease_seconds).join()
    worker.join(20)
    time.sleep(service.settings.lease_seconds + 0.1)
    Sweeper(runtime).sweep()  # in case the database stayed away so long that the job could not be given back
    job = service.job(job_id)
    assert (job.status, job.error) == ("queued", None)
    assert run_job(runtime, job_id)
    assert service.job(job_id).status == "succeeded"


def test_the_sweeper_drops_old_idempotency_keys_and_dead_workers(service: Service) -> None:
    keep = timedelta(seconds=service.settings.idempotency_seconds)
    with service.runtime.sessions.begin() as session:
        for key, age in (("old", keep + timedelta(minutes=1)), ("fresh", keep - timedelta(minutes=1))):
            row, _ = idempotency.begin(session, service.workspace, key, "hash")
            row.created_at = utcnow() - age
        workers.beat(session, "dead", ["recast.profile"])
        session.get_one(WorkerHeartbeat, "dead").seen_at = utcnow() - timedelta(days=2)
    Sweeper(service.runtime).tidy()
    with service.runtime.sessions() as session:
        assert [row.key for row in session.query(IdempotencyKey)] == ["fresh"]
        assert session.query(WorkerHeartbeat).count() == 0


@pytest.mark.parametrize(
    ("fake", "status", "logged"),
    [({}, "succeeded", False), ({"do": "raise"}, "failed", True), ({"do": "die"}, "queued", True)],
)
def test_no_attempt_leaves_a_work_folder(
    service: Service, fake: dict[str, Any], status: str, logged: bool
) -> None:
    job_id = service.submit(publish=False, **fake)
    assert run_job(service.runtime, job_id)
    assert service.job(job_id).status == status
    assert list((service.settings.home / "work").iterdir()) == []
    with service.runtime.sessions() as session:
        assert (session.query(Artifact).filter_by(job_id=job_id, kind="log").count() > 0) is logged


def test_work_folders_of_killed_workers_are_swept(service: Service) -> None:
    """Those of jobs that ended, wait again or are held by another attempt, and nothing else."""
    ended, waiting, elsewhere, running = (claim(service, service.submit(publish=False)) for _ in range(4))
    folders = [prepare(service.runtime, held) for held in (ended, waiting, elsewhere, running)]
    with service.runtime.sessions.begin() as session:
        attempts.finish(session, ended, "failed", error={"type": "internal", "detail": ""})
        attempts.release(session, waiting)
    steal(service, elsewhere.job_id)
    of_another_database, no_attempt = (folders[0].with_name(name) for name in ("train_0-1", "train-1st"))
    of_another_database.mkdir()
    no_attempt.mkdir()
    half_written = Path(service.settings.artifacts_url) / "jobs" / ended.job_id / f".{'0' * 16}.part"
    half_written.parent.mkdir(parents=True, exist_ok=True)
    half_written.touch()
    os.utime(half_written, (1e9, 1e9))
    Sweeper(service.runtime).tidy()
    assert [folder.exists() for folder in folders] == [False, False, False, True]
    assert of_another_database.exists()
    assert no_attempt.exists()
    assert not half_written.exists()


def test_a_lease_that_cannot_be_renewed_is_lost(service: Service) -> None:
    runtime = impatient(service)
    held = claim(service, service.submit(publish=False))
    with Lease(runtime, held) as lease:
        assert not lease.lost.wait(1.0)
        holder = locked(service, service.settings.lease_seconds + 1.5)
        assert lease.lost.wait(service.settings.lease_seconds + 1.0)
        holder.join()
    assert not lease.stop_requested.is_set()


def test_a_lease_hears_of_a_cancel(service: Service) -> None:
    held = claim(service, service.submit(publish=False))
    with Lease(service.runtime, held) as lease:
        service.cancel(held.job_id)
        assert lease.stop_requested.wait(2.0)
        assert not lease.lost.is_set()


def test_the_sweeper_ends_a_cancelled_job_of_a_dead_worker(service: Service) -> None:
    cancelled, running = (claim(service, service.submit(publish=False)) for _ in range(2))
    service.cancel(cancelled.job_id)
    time.sleep(service.settings.lease_seconds + 0.1)
    Sweeper(service.runtime).sweep()
    assert service.job(cancelled.job_id).status == "cancelled"
    assert service.job(running.job_id).status == "queued"


def test_leases_of_a_clock_put_back_since_die_with_their_worker(service: Service) -> None:
    dead, alive = (claim(service, service.submit(publish=False)) for _ in range(2))
    with service.runtime.sessions.begin() as session:
        for held in (dead, alive):
            jobs.lock(session, held.job_id).lease_expires_at = utcnow() + timedelta(days=365)
    sweeper = Sweeper(service.runtime)
    with Lease(service.runtime, alive):
        sweeper.sweep()
        assert service.job(dead.job_id).status == "running"
        time.sleep(2 * service.settings.lease_seconds + 0.1)
        sweeper.sweep()
        assert service.job(dead.job_id).status == "queued"
        assert (service.job(alive.job_id).status, service.job(alive.job_id).attempt) == ("running", 1)


def test_a_backlog_gathers_no_second_messages(service: Service) -> None:
    broker = service.settings.broker_url
    for _ in range(5):
        service.submit("profile")
    time.sleep(service.settings.republish_seconds + 0.1)
    sweeper = Sweeper(service.runtime)
    sweeper.sweep()
    assert queue.depth(broker, "profile") == 5
    lost = service.submit("profile", publish=False)
    with service.runtime.sessions.begin() as session:
        jobs.lock(session, lost).published_at = None
    sweeper.sweep()  # one of six is without a message, but which one cannot be told
    assert queue.depth(broker, "profile") == 11
    time.sleep(service.settings.republish_seconds + 0.1)
    sweeper.sweep()
    assert queue.depth(broker, "profile") == 11
