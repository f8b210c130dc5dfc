"""Shards of profiles as rows: made once, counted, cancelled with their profile, on both databases."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy.orm import Session, sessionmaker

from store.errors import NotFound, StaleAttempt
from store.models import Artifact, Job
from store.repositories import artifacts, attempts, jobs, shards
from store.repositories.attempts import Claim
from store.repositories.shards import Part

PARTS = [Part({"rows": [index]}, 10 * (index + 1)) for index in range(3)]  # 10, 20 and 30 images
ERROR = {"type": "reward-failure", "detail": "ocr failed"}


def held(session: Session, job_id: str, worker: str = "w1") -> Claim:
    claim = attempts.claim(session, job_id, worker, 30.0)
    assert claim is not None
    return claim


def coordinated(session: Session, workspace: str) -> tuple[Claim, list[str]]:
    """A running profile and the ids of its three shards."""
    job = jobs.create(session, workspace_id=workspace, kind="profile", request={}, config={"shards": 3})
    claim = held(session, job.id)
    made, new = shards.open_round(session, claim, 0, PARTS)
    assert new
    attempts.begin_phase(session, claim, "profiling", 60)
    return claim, [shard.id for shard in made]


def spend(session: Session, claim: Claim, images: int, evaluations: int, total: int = 10) -> None:
    attempts.begin_phase(session, claim, "loading", 1)
    attempts.begin_phase(session, claim, "profiling", total)
    attempts.progress(session, claim, images)
    attempts.add_cost(session, claim, {"model_evaluations": evaluations, "device_seconds": 0.1})


def fresh(session: Session, ids: list[str]) -> list[Job]:
    session.expire_all()
    return [jobs.get(session, id) for id in ids]


def test_a_round_is_made_once(session: Session, workspace: str) -> None:
    claim, ids = coordinated(session, workspace)
    suffix = claim.job_id.removeprefix("prof_")
    assert ids == [f"shard_{suffix}_0000_{index:02d}" for index in range(3)]
    found, new = shards.open_round(session, claim, 0, PARTS[:1])  # another split finds the first one's
    assert ([shard.id for shard in found], new) == (ids, False)
    second, new = shards.open_round(session, claim, 1, PARTS[:2])
    assert new
    assert [shard.id for shard in shards.of_round(session, claim.job_id, 1)] == [s.id for s in second]
    first = jobs.get(session, ids[1])
    assert (first.kind, first.status, first.parent_id) == ("profile_shard", "queued", claim.job_id)
    assert first.request == {"round": 0, "shard": 1, "images": 20, "work": {"rows": [1]}}
    assert first.config == {"shards": 3}


def test_coordinators_at_once_make_one_round(sessions: sessionmaker[Session], workspace: str) -> None:
    with sessions.begin() as session:
        job = jobs.create(session, workspace_id=workspace, kind="profile", request={}, config={})
        claim = held(session, job.id)
    barrier, outcomes = threading.Barrier(4), []

    def open_it() -> None:
        barrier.wait()
        with sessions.begin() as session:
            outcomes.append(shards.open_round(session, claim, 0, PARTS)[1])

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False, False, False, True]
    with sessions() as session:
        assert len(shards.of_round(session, claim.job_id, 0)) == 3


def test_a_stale_coordinator_writes_nothing(session: Session, workspace: str) -> None:
    old, ids = coordinated(session, workspace)
    attempts.release(session, old)
    new = held(session, old.job_id, "w2")
    for write in (
        lambda: shards.open_round(session, old, 1, PARTS),
        lambda: shards.report(session, old, fresh(session, ids)),
        lambda: shards.cancel(session, old),
    ):
        with pytest.raises(StaleAttempt):
            write()
    assert shards.of_round(session, old.job_id, 1) == []
    assert {shard.status for shard in fresh(session, ids)} == {"queued"}
    assert shards.open_round(session, new, 0, PARTS)[1] is False


def test_shards_do_not_exist_for_clients(session: Session, workspace: str) -> None:
    claim, ids = coordinated(session, workspace)
    assert [job.id for job in jobs.page(session, workspace)[0]] == [claim.job_id]
    assert jobs.page(session, workspace, kind="profile_shard")[0] == []
    for call in (
        lambda: jobs.get(session, ids[0], workspace),
        lambda: jobs.request_cancel(session, ids[0], workspace),
        lambda: jobs.requeue(session, ids[0], workspace),
    ):
        with pytest.raises(NotFound):
            call()
    assert jobs.get(session, ids[0]).status == "queued"


def test_progress_and_cost_are_sums_and_a_redone_shard_takes_nothing_back(
    session: Session, workspace: str
) -> None:
    claim, ids = coordinated(session, workspace)
    first, second = held(session, ids[0]), held(session, ids[1], "w2")
    spend(session, first, 10, 100)
    attempts.finish(session, first, "succeeded")
    spend(session, second, 15, 150, 20)
    shards.report(session, claim, fresh(session, ids))
    job = jobs.get(session, claim.job_id)
    assert (job.done, job.total) == (25, 60)
    assert job.cost == {
        "model_evaluations": 250,
        "reward_calls": 0,
        "proposal_images": 0,
        "device_seconds": pytest.approx(0.2),
    }
    attempts.crash(session, second, ERROR, 3)
    again = held(session, ids[1], "w3")
    spend(session, again, 2, 20, 20)
    shards.report(session, claim, fresh(session, ids))
    job = jobs.get(session, claim.job_id)
    assert (job.done, job.cost["model_evaluations"]) == (25, 270)  # the lost attempt was spent, once
    events = [event.data for event in jobs.events(session, claim.job_id) if event.type == "progress"]
    assert events[-1] == {
        "phase": "profiling",
        "done": 25,
        "total": 60,
        "phase_done": 25,
        "phase_total": 60,
    }


def test_ends_and_warnings_are_told_once_whoever_coordinates(session: Session, workspace: str) -> None:
    claim, ids = coordinated(session, workspace)
    shard = held(session, ids[2])
    attempts.add_warning(session, shard, "few prompts")
    attempts.finish(session, shard, "succeeded")
    shards.report(session, claim, fresh(session, ids))
    attempts.release(session, claim)
    successor = held(session, claim.job_id, "w2")
    shards.report(session, successor, fresh(session, ids))
    found = [event.data for event in jobs.events(session, claim.job_id) if event.type == "finding"]
    told = {"kind": "shard", "round": 0, "shard": 2, "status": "succeeded", "attempt": 1}
    assert found == [{**told, "ended": 1, "total": 3}]
    assert jobs.get(session, claim.job_id).warnings == ["few prompts"]


def test_cancelling_a_profile_reaches_its_shards(session: Session, workspace: str) -> None:
    claim, ids = coordinated(session, workspace)
    attempts.finish(session, held(session, ids[0]), "succeeded")
    running = held(session, ids[1])
    jobs.request_cancel(session, claim.job_id, workspace)
    assert [shard.status for shard in fresh(session, ids)] == ["succeeded", "cancelling", "cancelled"]
    assert attempts.heartbeat(session, running, 30.0) is True
    assert shards.open_round(session, claim, 1, PARTS) == ([], False)


@pytest.mark.parametrize("end", ["cancel", "fail", "lose"])
def test_a_shard_that_outlives_its_profile_still_counts(session: Session, workspace: str, end: str) -> None:
    claim, ids = coordinated(session, workspace)
    shard = held(session, ids[0])
    spend(session, shard, 5, 50)
    if end == "cancel":
        attempts.release(session, claim)
        jobs.request_cancel(session, claim.job_id)
    elif end == "fail":
        attempts.finish(session, claim, "failed", error=ERROR)
    else:
        attempts.reap(session, claim.job_id, jobs.leases(session)[claim.job_id], 1)
    job = jobs.get(session, claim.job_id)
    assert job.status == ("cancelled" if end == "cancel" else "failed")
    assert [one.status for one in fresh(session, ids)] == ["cancelling", "cancelled", "cancelled"]
    attempts.add_cost(session, shard, {"model_evaluations": 7})
    attempts.finish(session, shard, "cancelled")
    assert fresh(session, [claim.job_id])[0].cost["model_evaluations"] == 57


def test_scores_are_spent_when_profile_and_shard_have_ended(session: Session, workspace: str) -> None:
    claim, ids = coordinated(session, workspace)
    for id in ids[:2]:
        shard = held(session, id)
        for kind in ("scores", "log"):
            artifacts.create(
                session, job_id=id, attempt=1, kind=kind, name=kind, key=f"jobs/{id}/1/{kind}/{kind}",
                bytes=1, sha256="0" * 64, step=None, meta={},
            )  # fmt: skip
    attempts.finish(session, shard, "succeeded")
    assert shards.spent_scores(session) == []
    attempts.finish(session, claim, "failed", error=ERROR)
    (row,) = shards.spent_scores(session)
    assert (row.job_id, row.kind) == (ids[1], "scores")  # the first shard is still stopping
    shards.forget_scores(session, row.id)
    assert shards.spent_scores(session) == []
    assert session.query(Artifact).count() == 3
