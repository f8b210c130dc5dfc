"""The job state machine and what its owners see, on both databases."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from store.database import session_factory, transact
from store.errors import InvalidCursor, InvalidTransition, NotFound, StaleAttempt
from store.models import TERMINAL, Job
from store.repositories import attempts, jobs, workspaces
from store.repositories.attempts import Claim
from store.types import utcnow

LEASE = 30.0
ERROR = {"type": "engine-died", "detail": "killed"}


def new_job(session: Session, workspace: str, kind: str = "training") -> Job:
    return jobs.create(session, workspace_id=workspace, kind=kind, request={"a": 1}, config={"b": [1.5]})


def claimed(session: Session, workspace: str, kind: str = "training") -> Claim:
    claim = attempts.claim(session, new_job(session, workspace, kind).id, "w1", LEASE)
    assert claim is not None
    return claim


def statuses(session: Session, job_id: str) -> list[str]:
    return [event.data["status"] for event in jobs.events(session, job_id) if event.type == "status"]


def test_a_new_job_is_queued_and_free_of_cost(session: Session, workspace: str) -> None:
    job = new_job(session, workspace)
    assert job.id.startswith("train_")
    assert (job.status, job.attempt, job.done, job.total) == ("queued", 0, 0, 0)
    assert job.cost == {
        "model_evaluations": 0,
        "reward_calls": 0,
        "proposal_images": 0,
        "device_seconds": 0.0,
    }
    assert (job.request, job.config, job.warnings) == ({"a": 1}, {"b": [1.5]}, [])
    session.commit()
    session.expire_all()
    again = jobs.get(session, job.id, workspace)
    assert again.created_at.tzinfo is not None
    assert abs((utcnow() - again.created_at).total_seconds()) < 60


def test_a_job_of_another_workspace_does_not_exist(session: Session, workspace: str) -> None:
    job = new_job(session, workspace)
    other = workspaces.create(session, "other").id
    with pytest.raises(NotFound, match="no job 'train_"):
        jobs.get(session, job.id, other)
    with pytest.raises(NotFound):
        jobs.request_cancel(session, job.id, other)
    with pytest.raises(NotFound, match="no profile"):
        jobs.get(session, job.id, workspace, kind="profile")
    assert jobs.page(session, other)[0] == []


def test_only_one_of_many_claims_wins(sessions: sessionmaker[Session], workspace: str) -> None:
    with sessions.begin() as session:
        job_id = new_job(session, workspace).id
    barrier, claims = threading.Barrier(6), []

    def race(worker: str) -> None:
        barrier.wait()
        claims.append(transact(sessions, lambda session: attempts.claim(session, job_id, worker, LEASE)))

    threads = [threading.Thread(target=race, args=(f"w{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [claim for claim in claims if claim is not None]
    with sessions() as session:
        job = jobs.get(session, job_id)
        assert (job.status, job.attempt, job.worker) == ("running", 1, winner.worker)
        assert statuses(session, job_id) == ["queued", "running"]


def test_done_never_goes_down_within_an_attempt(session: Session, workspace: str) -> None:
    claim = claimed(session, workspace)
    seen = []
    for step in [("profiling", 4), 1, 3, 2, 4, ("training", 10), 0, 5, 99, ("saving", 1), 1]:
        if isinstance(step, tuple):
            attempts.begin_phase(session, claim, *step)
        else:
            attempts.progress(session, claim, step)
        seen.append(jobs.get(session, claim.job_id).done)
    assert seen == [0, 1, 3, 3, 4, 4, 4, 9, 14, 14, 15]
    job = jobs.get(session, claim.job_id)
    assert (job.phase, job.total, job.phase_offset) == ("saving", 15, 14)


def test_a_phase_that_goes_on_counts_what_is_left(session: Session, workspace: str) -> None:
    claim = claimed(session, workspace)
    attempts.begin_phase(session, claim, "loading", 1)
    attempts.progress(session, claim, 1)
    attempts.begin_phase(session, claim, "training", 20, start=12)
    attempts.progress(session, claim, 12)
    attempts.progress(session, claim, 15)
    job = jobs.get(session, claim.job_id)
    assert (job.done, job.total, job.phase_offset) == (4, 9, 1)
    last = jobs.events(session, claim.job_id)[-1].data
    assert (last["phase_done"], last["phase_total"]) == (15, 20)


def test_progress_and_cost_are_kept_across_attempts_as_promised(session: Session, workspace: str) -> None:
    claim = claimed(session, workspace)
    attempts.begin_phase(session, claim, "training", 5)
    attempts.progress(session, claim, 3)
    attempts.add_cost(session, claim, {"reward_calls": 4, "device_seconds": 1.5})
    attempts.release(session, claim)
    second = attempts.claim(session, claim.job_id, "w2", LEASE)
    assert second is not None
    attempts.add_cost(session, second, {"reward_calls": 1})
    job = jobs.get(session, claim.job_id)
    assert (job.done, job.total, job.attempt) == (0, 0, 2)
    assert (job.cost["reward_calls"], job.cost["device_seconds"]) == (5, 1.5)


def test_a_stale_writer_is_refused_everything(session: Session, workspace: str) -> None:
    old = claimed(session, workspace)
    attempts.release(session, old)
    new = attempts.claim(session, old.job_id, "w2", LEASE)
    assert new is not None
    session.commit()
    before = [(event.seq, event.type) for event in jobs.events(session, old.job_id)]
    writes = [
        lambda: attempts.heartbeat(session, old, LEASE),
        lambda: attempts.begin_phase(session, old, "training", 3),
        lambda: attempts.progress(session, old, 1),
        lambda: attempts.add_event(session, old, "metrics", {}),
        lambda: attempts.add_warning(session, old, "late"),
        lambda: attempts.add_cost(session, old, {"reward_calls": 1}),
        lambda: attempts.finish(session, old, "succeeded", result={}),
        lambda: attempts.release(session, old),
        lambda: attempts.crash(session, old, ERROR, 3),
    ]
    for write in writes:
        with pytest.raises(StaleAttempt, match=r"attempt 1 of train_\w+ is over"):
            write()
    assert [(event.seq, event.type) for event in jobs.events(session, old.job_id)] == before
    assert jobs.get(session, old.job_id).worker == "w2"
    assert attempts.heartbeat(session, new, LEASE) is False


@pytest.mark.parametrize("status", TERMINAL)
def test_terminal_states_never_change(session: Session, workspace: str, status: str) -> None:
    claim = claimed(session, workspace, "profile")
    lease = jobs.leases(session)[claim.job_id]
    job = attempts.finish(session, claim, status, error=ERROR if status == "failed" else None)
    ended = job.finished_at
    for write in (
        lambda: attempts.finish(session, claim, "failed", error=ERROR),
        lambda: attempts.progress(session, claim, 1),
        lambda: attempts.crash(session, claim, ERROR, 3),
    ):
        with pytest.raises(StaleAttempt):
            write()
    assert attempts.claim(session, claim.job_id, "w2", LEASE) is None
    assert attempts.reap(session, claim.job_id, lease, 3) is None
    with pytest.raises(InvalidTransition):
        jobs.requeue(session, claim.job_id)
    if status == "cancelled":
        assert jobs.request_cancel(session, claim.job_id).status == "cancelled"
    else:
        with pytest.raises(InvalidTransition, match=f"has already {status}"):
            jobs.request_cancel(session, claim.job_id)
    job = jobs.get(session, claim.job_id)
    assert (job.status, job.finished_at, job.attempt) == (status, ended, 1)


def test_cancel(session: Session, workspace: str) -> None:
    queued = new_job(session, workspace)
    assert jobs.request_cancel(session, queued.id).status == "cancelled"
    assert attempts.claim(session, queued.id, "w1", LEASE) is None
    claim = claimed(session, workspace)
    assert attempts.heartbeat(session, claim, LEASE) is False
    assert jobs.request_cancel(session, claim.job_id).status == "cancelling"
    jobs.request_cancel(session, claim.job_id)
    assert attempts.heartbeat(session, claim, LEASE) is True
    attempts.finish(session, claim, "cancelled")
    assert statuses(session, claim.job_id) == ["queued", "running", "cancelling", "cancelled"]


def test_a_worker_that_leaves_ends_a_job_being_cancelled(session: Session, workspace: str) -> None:
    claim = claimed(session, workspace)
    jobs.request_cancel(session, claim.job_id)
    assert attempts.release(session, claim).status == "cancelled"


def test_crashes_are_counted_until_the_limit(session: Session, workspace: str) -> None:
    claim: Claim | None = claimed(session, workspace)
    for expected in ("queued", "queued", "failed"):
        assert claim is not None
        job = attempts.crash(session, claim, ERROR, 3)
        assert job.status == expected
        claim = attempts.claim(session, job.id, "w1", LEASE)
    assert (job.error, job.attempt, job.crashes) == (ERROR, 3, 3)


def test_a_resumed_training_starts_with_a_clean_slate(session: Session, workspace: str) -> None:
    claim = claimed(session, workspace)
    attempts.finish(session, claim, "failed", error=ERROR)
    job = jobs.requeue(session, claim.job_id, workspace)
    assert (job.status, job.error, job.finished_at, job.crashes) == ("queued", None, None, 0)
    again = attempts.claim(session, job.id, "w2", LEASE)
    assert again is not None
    assert again.attempt == 2
    with pytest.raises(InvalidTransition, match="is running"):
        jobs.requeue(session, job.id)


def test_dead_leases_are_found_and_reaped(session: Session, workspace: str) -> None:
    alive, dead = claimed(session, workspace), claimed(session, workspace)
    before = jobs.leases(session)[alive.job_id]
    attempts.heartbeat(session, alive, 100.0)
    leases = jobs.leases(session)
    assert list(leases) == [dead.job_id, alive.job_id]
    assert leases[alive.job_id] > before
    assert attempts.reap(session, alive.job_id, before, 5) is None  # it was renewed meanwhile
    job = attempts.reap(session, dead.job_id, leases[dead.job_id], 5)
    assert job is not None
    assert (job.status, job.worker, job.published_at, job.crashes) == ("queued", None, None, 1)
    cancelling = claimed(session, workspace)
    jobs.request_cancel(session, cancelling.job_id)
    job = attempts.reap(session, cancelling.job_id, jobs.leases(session)[cancelling.job_id], 5)
    assert job is not None
    assert job.status == "cancelled"
    last = claimed(session, workspace)
    job = attempts.reap(session, last.job_id, jobs.leases(session)[last.job_id], 1)
    assert job is not None
    assert job.error is not None
    assert (job.status, job.error["type"]) == ("failed", "worker-lost")


def test_overdue_messages_are_taken_once(session: Session, workspace: str) -> None:
    fresh = new_job(session, workspace)
    late = new_job(session, workspace, "profile")
    late.published_at = utcnow() - timedelta(minutes=5)
    never = new_job(session, workspace)
    never.published_at = None
    before = utcnow() - timedelta(minutes=1)
    fresh.published_at = utcnow() + timedelta(days=1)  # by a clock that was put back since
    session.flush()
    assert [job.id for job in jobs.unpublished(session, before)] == [fresh.id, late.id, never.id]
    assert jobs.take_to_publish(session, fresh)
    session.expire_all()
    assert [job.id for job in jobs.unpublished(session, before)] == [late.id, never.id]
    assert [job.id for job in jobs.unpublished(session, before, kind="profile")] == [late.id]
    assert jobs.take_to_publish(session, late)
    assert not jobs.take_to_publish(session, late)
    session.expire_all()
    assert [job.id for job in jobs.unpublished(session, before)] == [never.id]
    assert jobs.count(session, status="queued") == 3
    assert jobs.count(session, status="queued", kind="training") == 2
    assert fresh.status == "queued"


def test_pages_are_newest_first_complete_and_stable(session: Session, workspace: str) -> None:
    ids = [new_job(session, workspace, kind).id for kind in ("profile", "training", "evaluation") * 3]
    same_time = utcnow()
    for job_id in ids[:4]:
        jobs.get(session, job_id).created_at = same_time
    session.flush()
    expected = [job.id for job in jobs.page(session, workspace, limit=100)[0]]
    seen, cursor = [], None
    while True:
        rows, cursor = jobs.page(session, workspace, limit=2, cursor=cursor)
        seen += [job.id for job in rows]
        new_job(session, workspace)  # newer than all pages to come
        if cursor is None:
            break
    assert seen == expected
    assert sorted(seen) == sorted(ids)
    assert {job.kind for job in jobs.page(session, workspace, kind="profile")[0]} == {"profile"}
    assert jobs.page(session, workspace, status="running") == ([], None)


FOREIGN_CURSORS = ("", "x", "not a cursor", "bm90fGF8Y3Vyc29y", "MjAyNi0wMS0wMXxh", "\u2603")


@pytest.mark.parametrize("cursor", FOREIGN_CURSORS)
def test_a_foreign_cursor_is_refused(session: Session, workspace: str, cursor: str) -> None:
    with pytest.raises(InvalidCursor):
        jobs.page(session, workspace, cursor=cursor)


def test_events_resume_without_loss_or_repeat(sessions: sessionmaker[Session], workspace: str) -> None:
    """Several writers at once; a reader that goes on from the last ``seq`` misses and repeats nothing."""
    with sessions.begin() as session:
        claim = claimed(session, workspace)
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while True:
            last = done.is_set()
            with sessions() as session:
                rows = jobs.events(session, claim.job_id, seen[-1] if seen else 0, limit=7)
            seen.extend(row.seq for row in rows)
            if last and not rows:
                return

    def write(name: str) -> None:
        for number in range(15):
            data = {"name": name, "number": number}
            transact(sessions, lambda session, data=data: attempts.add_event(session, claim, "finding", data))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    with sessions() as session:
        stored = [event.seq for event in jobs.events(session, claim.job_id, limit=1000)]
    assert len(stored) == 2 + 45
    assert seen == stored == sorted(set(stored))


def test_the_database_refuses_unknown_states(session: Session, workspace: str) -> None:
    new_job(session, workspace).status = "paused"
    with pytest.raises(IntegrityError, match="ck_jobs_status"):
        session.flush()


def test_json_columns_refuse_nan(session: Session, workspace: str) -> None:
    with pytest.raises(Exception, match="not JSON compliant"):
        jobs.create(session, workspace_id=workspace, kind="profile", request={"x": float("nan")}, config={})


def test_times_are_utc_whatever_zone_they_came_in(session: Session, workspace: str) -> None:
    job = new_job(session, workspace)
    job.started_at = datetime(2026, 7, 1, 2, 0, tzinfo=timezone(timedelta(hours=5)))
    session.commit()
    session.expire_all()
    started = jobs.get(session, job.id).started_at
    assert started is not None
    assert started.isoformat() == "2026-06-30T21:00:00+00:00"
    job.started_at = datetime(2026, 7, 1)
    with pytest.raises(Exception, match="aware of its time zone"):
        session.flush()


ACTIONS = ("claim", "cancel", "progress", "succeed", "fail", "release", "crash", "reap", "requeue")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=14))
def test_any_sequence_of_actions_keeps_the_invariants(
    engine: Engine, workspace: str, actions: list[str]
) -> None:
    """Attempts only rise, only known transitions happen, and terminal rows have an end and no lease."""
    allowed = {
        ("queued", "running"), ("queued", "cancelled"), ("running", "cancelling"), ("running", "succeeded"),
        ("running", "failed"), ("running", "queued"), ("cancelling", "cancelled"),
        ("cancelling", "succeeded"), ("cancelling", "failed"),
        ("failed", "queued"), ("cancelled", "queued"),
    }  # fmt: skip
    with session_factory(engine)() as session:
        job_id = new_job(session, workspace).id
        claims: list[Claim] = []
        for action in actions:
            before = (jobs.get(session, job_id).status, jobs.get(session, job_id).attempt)
            _act(session, job_id, action, claims)
            job = jobs.get(session, job_id)
            assert job.status == before[0] or (before[0], job.status) in allowed
            assert job.attempt - before[1] == (action == "claim" and before[0] == "queued")
            assert (job.finished_at is not None) == (job.status in TERMINAL)
            assert (job.lease_expires_at is not None) == (job.status in ("running", "cancelling"))
        assert [claim.attempt for claim in claims] == list(range(1, len(claims) + 1))


def _act(session: Session, job_id: str, action: str, claims: list[Claim]) -> None:
    """Do ``action`` with the newest claim, if there is one; refusals are part of the game."""
    newest = claims[-1] if claims else Claim(job_id, "training", 0, "nobody")
    doing = {
        "cancel": lambda: jobs.request_cancel(session, job_id),
        "progress": lambda: attempts.progress(session, newest, 1),
        "succeed": lambda: attempts.finish(session, newest, "succeeded", result={}),
        "fail": lambda: attempts.finish(session, newest, "failed", error=ERROR),
        "release": lambda: attempts.release(session, newest),
        "crash": lambda: attempts.crash(session, newest, ERROR, 3),
        "reap": lambda: attempts.reap(session, job_id, jobs.leases(session).get(job_id, utcnow()), 5),
        "requeue": lambda: jobs.requeue(session, job_id),
    }
    if action == "claim":
        claim = attempts.claim(session, job_id, f"w{len(claims)}", LEASE)
        claims += [claim] if claim is not None else []
        return
    try:
        doing[action]()
    except (StaleAttempt, InvalidTransition):
        session.flush()


def test_the_newest_success_else_the_oldest_under_way_is_reusable(session: Session, workspace: str) -> None:
    def profile(status: str, fingerprint: str | None = "f") -> str:
        job = jobs.create(
            session, workspace_id=workspace, kind="profile", request={}, config={}, fingerprint=fingerprint
        )
        if status != "queued":
            held = attempts.claim(session, job.id, "w1", LEASE)
            assert held is not None
            if status == "cancelling":
                jobs.request_cancel(session, job.id)
            elif status != "running":
                attempts.finish(session, held, status)
        return job.id

    def found() -> str | None:
        job = jobs.reusable(session, workspace, "f")
        return job.id if job else None

    for status in ("failed", "cancelled", "cancelling"):
        profile(status)
    profile("succeeded", None)
    profile("succeeded", "other")
    assert found() is None
    running, _ = profile("running"), profile("queued")
    assert found() == running
    first, second = profile("succeeded"), profile("succeeded")
    profile("running")
    assert first != second == found()
    assert jobs.reusable(session, workspaces.create(session, "other").id, "f") is None


def test_equal_requests_at_once_make_one_job(sessions: sessionmaker[Session], workspace: str) -> None:
    barrier, seen = threading.Barrier(5), []

    def request() -> None:
        barrier.wait()
        with sessions.begin() as session:
            workspaces.lock(session, workspace)
            job = jobs.reusable(session, workspace, "f") or jobs.create(
                session, workspace_id=workspace, kind="profile", request={}, config={}, fingerprint="f"
            )
            seen.append(job.id)

    threads = [threading.Thread(target=request) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 5
    assert len(set(seen)) == 1
