"""Rows of everything but jobs, on both databases."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session, sessionmaker

from store.errors import Conflict, NotFound
from store.models import Artifact
from store.repositories import (
    adapters,
    allocations,
    artifacts,
    evaluations,
    idempotency,
    jobs,
    keys,
    profiles,
    prompt_sets,
    trainings,
    workers,
    workspaces,
)
from store.types import utcnow

ALLOCATION = {
    "rewards": ["ocr"],
    "steps": 2,
    "budgets": {"ocr": 1.0},
    "method": "static",
    "temperature": 1.0,
    "matrix": [[0.1 + 0.2, 1.0]],
    "diagnostics": {"iterations": 0},
}


def make_job(session: Session, workspace: str, kind: str) -> str:
    return jobs.create(session, workspace_id=workspace, kind=kind, request={}, config={}).id


def make_artifact(
    session: Session, job_id: str, attempt: int, name: str, step: int = 1, kind: str = "samples"
) -> Artifact:
    return artifacts.create(
        session,
        job_id=job_id,
        attempt=attempt,
        kind=kind,
        name=name,
        key=f"jobs/{job_id}/{attempt}/{kind}/{name}",
        bytes=10 * attempt,
        sha256=str(attempt) * 64,
        step=step,
        meta={},
    )


def test_keys_are_found_by_secret_until_revoked(session: Session, workspace: str) -> None:
    key = keys.create(session, workspace_id=workspace, name="ci", role="editor", secret="rk_secret_value")
    assert "secret_value" not in repr(vars(key))
    assert keys.by_secret(session, "rk_secret_value") is key
    assert keys.by_secret(session, "rk_secret_valuE") is None
    assert keys.needs_touch(key)
    keys.touch(session, key.id)
    assert not keys.needs_touch(key)
    other = workspaces.create(session, "other").id
    with pytest.raises(NotFound):
        keys.revoke(session, key.id, other)
    first = keys.revoke(session, key.id, workspace).revoked_at
    assert keys.revoke(session, key.id, workspace).revoked_at == first
    assert keys.by_secret(session, "rk_secret_value") is None
    assert [row.id for row in keys.page(session, workspace)[0]] == [key.id]


def test_built_in_prompt_sets_are_everybodys(session: Session, workspace: str) -> None:
    other = workspaces.create(session, "other").id
    fields = {"sha256": "0" * 64, "count": 1, "tags": {"colors": 1}, "content": '{"prompt": "é\u2603"}\n'}
    built_in = prompt_sets.create(session, workspace_id=None, name="all", id="pset_fixed", **fields)
    own = prompt_sets.create(session, workspace_id=workspace, name="own", **fields)
    session.commit()
    session.expunge_all()
    assert prompt_sets.get(session, built_in.id, other).content == fields["content"]
    with pytest.raises(NotFound):
        prompt_sets.get(session, own.id, other)
    assert {row.id for row in prompt_sets.page(session, workspace)[0]} == {own.id, "pset_fixed"}
    assert [row.id for row in prompt_sets.page(session, other)[0]] == ["pset_fixed"]


def test_allocations_come_back_exactly(session: Session, workspace: str) -> None:
    training = make_job(session, workspace, "training")
    plain = allocations.create(session, workspace_id=workspace, allocation=ALLOCATION)
    ours = [
        allocations.create(
            session, workspace_id=workspace, allocation=ALLOCATION, training_id=training, stage=s, epoch=e
        )
        for s, e in ((0, 0), (1, 5))
    ]
    session.commit()
    session.expunge_all()
    row = allocations.get(session, plain.id, workspace)
    assert row.matrix == [[0.1 + 0.2, 1.0]]  # to the last bit
    assert allocations.to_dict(row) == {"id": plain.id, **ALLOCATION, "gains": None, "sigmas": None}
    assert [row.id for row in allocations.of_training(session, training)] == [row.id for row in ours]
    assert [row.id for row in allocations.page(session, workspace, limit=2)[0]] == [ours[1].id, ours[0].id]
    with pytest.raises(NotFound):
        allocations.get(session, plain.id, "ws_other")


def test_metrics_are_overwritten_by_step_and_read_by_name(session: Session, workspace: str) -> None:
    job_id = make_job(session, workspace, "training")
    for step in (1, 2, 3):
        trainings.add_metrics(session, job_id, step, {"objective": step / 10, "loss/kl": 1e-9 * step})
    trainings.add_metrics(session, job_id, 2, {"objective": 0.7})
    rows = trainings.metrics(session, job_id, names=["objective"])
    assert [(row.step, row.value) for row in rows] == [(1, 0.1), (2, 0.7), (3, 0.3)]
    rows = trainings.metrics(session, job_id, after=1)
    assert [(row.step, row.name) for row in rows] == [
        (2, "loss/kl"),
        (2, "objective"),
        (3, "loss/kl"),
        (3, "objective"),
    ]
    assert [row.step for row in trainings.metrics(session, job_id, limit=1)] == [1]


def test_a_file_reported_again_is_listed_once(session: Session, workspace: str) -> None:
    job_id = make_job(session, workspace, "training")
    first = make_artifact(session, job_id, 1, "epoch-000005.png", 5)
    same = make_artifact(session, job_id, 1, "epoch-000005.png", 5)
    make_artifact(session, job_id, 1, "epoch-000010.png", 10)
    again = make_artifact(session, job_id, 2, "epoch-000010.png", 10)
    assert first.id == same.id
    assert [row.id for row in trainings.samples(session, job_id)] == [first.id, again.id]
    assert artifacts.find(session, job_id, "samples", "epoch-000010.png") is again
    assert artifacts.find(session, job_id, "report", "report.html") is None
    other = workspaces.create(session, "other").id
    assert artifacts.get(session, first.id, workspace) is first
    with pytest.raises(NotFound):
        artifacts.get(session, first.id, other)


def test_the_newest_checkpoint_is_the_one_of_the_highest_epoch(session: Session, workspace: str) -> None:
    job_id = make_job(session, workspace, "training")
    assert trainings.newest_checkpoints(session, job_id) == []
    for attempt, epoch in ((1, 5), (1, 10), (2, 10), (2, 9)):
        make_artifact(session, job_id, attempt, f"epoch-{epoch:06d}", epoch, "checkpoint")
    newest = trainings.newest_checkpoints(session, job_id)
    assert [(row.step, row.attempt) for row in newest] == [(10, 2), (9, 2), (5, 1)]
    assert [row.step for row in trainings.checkpoints(session, job_id)] == [5, 9, 10]
    artifacts.discard(session, job_id, "checkpoint", "epoch-000010")
    assert [row.step for row in trainings.checkpoints(session, job_id)] == [5, 9]
    doomed = artifacts.discarded(session, job_id)
    assert {(row.step, row.attempt) for row in doomed} == {(10, 1), (10, 2)}  # of every attempt
    artifacts.delete(session, doomed[0].id)
    artifacts.delete(session, newest[1].id)  # not discarded, so it stays
    assert artifacts.discarded(session, job_id) == doomed[1:]
    assert [row.step for row in trainings.checkpoints(session, job_id)] == [5, 9]


def test_adapters_profiles_and_reports_belong_to_their_workspace(session: Session, workspace: str) -> None:
    training = make_job(session, workspace, "training")
    artifact = make_artifact(session, training, 1, "final.safetensors", 3, "adapter")
    fields = {"step": 30, "epoch": 3, "base_model": "miniature", "rank": 4, "alpha": 8.0, "final": True}
    adapter = adapters.create(
        session, workspace_id=workspace, artifact=artifact, provenance={"seed": 1}, **fields
    )
    assert (
        adapters.create(session, workspace_id=workspace, artifact=artifact, provenance={}, **fields).id
        == adapter.id
    )
    assert (adapter.bytes, adapter.sha256) == (10, "1" * 64)
    assert adapters.artifact(session, adapter) is artifact
    assert [row.id for row in adapters.page(session, workspace, training_id=training)[0]] == [adapter.id]
    assert adapters.page(session, workspace, training_id="train_none") == ([], None)
    profile, evaluation = make_job(session, workspace, "profile"), make_job(session, workspace, "evaluation")
    with pytest.raises(NotFound):
        profiles.get(session, profile, workspace)
    measured = {"levels": [1.0, 0.0], "curves": {"ocr": {"total": 0.25}}, "warnings": [], "alpha": 2.0}
    profiles.create(session, profile, measured)
    profiles.create(session, profile, {**measured, "warnings": ["noisy"]})
    assert profiles.get(session, profile, workspace).extra == {**measured, "warnings": ["noisy"]}
    assert evaluations.find(session, evaluation) is None
    evaluations.create(session, evaluation, {"verdict": "no difference found"})
    assert evaluations.get(session, evaluation, workspace).report["verdict"] == "no difference found"
    for get, id in ((adapters.get, adapter.id), (profiles.get, profile), (evaluations.get, evaluation)):
        with pytest.raises(NotFound):
            get(session, id, "ws_other")


def test_an_idempotency_key_answers_once(session: Session, workspace: str) -> None:
    row, repeat = idempotency.begin(session, workspace, "k1", "hash-a")
    assert not repeat
    idempotency.complete(session, row, 202, {"id": "prof_1"})
    session.commit()
    again, repeat = idempotency.begin(session, workspace, "k1", "hash-a")
    assert repeat
    assert (again.status_code, again.response) == (202, {"id": "prof_1"})
    with pytest.raises(Conflict, match="another request"):
        idempotency.begin(session, workspace, "k1", "hash-b")
    other = workspaces.create(session, "other").id
    assert idempotency.begin(session, other, "k1", "hash-b")[1] is False


def test_a_failed_request_frees_its_idempotency_key(session: Session, workspace: str) -> None:
    idempotency.begin(session, workspace, "k1", "hash-a")
    session.rollback()
    assert idempotency.begin(session, workspace, "k1", "hash-b")[1] is False


def test_requests_with_one_key_at_once_create_one_job(
    sessions: sessionmaker[Session], workspace: str
) -> None:
    barrier, answers = threading.Barrier(5), []

    def post() -> None:
        barrier.wait()
        with sessions.begin() as session:
            row, repeat = idempotency.begin(session, workspace, "k1", "hash-a")
            if not repeat:
                job_id = make_job(session, workspace, "profile")
                idempotency.complete(session, row, 202, {"id": job_id})
            answers.append(row.response)

    threads = [threading.Thread(target=post) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sessions() as session:
        (job,), _ = jobs.page(session, workspace)
    assert answers == [{"id": job.id}] * 5


def test_live_workers_serve_their_queues(session: Session) -> None:
    workers.beat(session, "a", ["recast.profile", "recast.training"])
    workers.beat(session, "b", ["recast.evaluation"])
    workers.beat(session, "a", ["recast.profile"])
    recently = utcnow() - timedelta(minutes=1)
    assert workers.served_queues(session, recently) == {"recast.profile", "recast.evaluation"}
    workers.leave(session, "b")
    assert workers.served_queues(session, recently) == {"recast.profile"}
    assert workers.served_queues(session, utcnow() + timedelta(seconds=1)) == set()
    workers.forget(session, utcnow() + timedelta(seconds=1))
    assert workers.served_queues(session, recently) == set()
