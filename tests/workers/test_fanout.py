"""Profiles in shards: shared, redone, cancelled, failed, merged; with real brokers, workers and engines."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from recast_engine.profiling import Profile
from recast_engine.profiling.assembly import profile_from_scores
from recast_engine.profiling.plan import Plan, Work
from recast_engine.profiling.scores import ScoreTable
from store.models import Job
from store.repositories import artifacts, attempts, jobs, profiles, prompt_sets
from store.repositories.attempts import Claim
from tests.store.databases import drop_database, fresh_database
from tests.workers.conftest import Service, fast_settings, flush, make_service
from tests.workers.fake_shards import EVALUATIONS, PROMPTS, measured, plan_of
from workers.runtime import Runtime
from workers.tasks import run_job

GROUPS = 6  # of 2 prompts with 16 images each
CONFIG: dict[str, Any] = {
    "model": "miniature",
    "rewards": ["clipscore", "ocr"],
    "prompt_set": "pset_words",
    "estimator": {"levels": 4, "prompts": 12, "images_per_prompt": 16},
    "seed": 3,
    "shards": 3,
}


@dataclass
class Sharded(Service):
    """A service whose engine measures shards."""

    def steer(self, **asked: Any) -> None:
        """Tell engines that start from now on what to do."""
        (self.settings.home / "shards.json").write_text(json.dumps(asked))

    def profile(self, *, publish: bool = True, **changes: Any) -> str:
        """A queued profile; its id."""
        return self.submit_config("profile", {**CONFIG, **changes}, publish=publish)

    def shards(self, parent: str) -> list[Job]:
        """The shards of a profile, by round and index."""
        with self.runtime.sessions() as session:
            return sorted(jobs.children(session, parent, kind="profile_shard"), key=lambda job: job.id)

    def states(self, parent: str) -> list[str]:
        return [shard.status for shard in self.shards(parent)]

    def here(self, job_id: str) -> threading.Thread:
        """A worker of one job in this process."""
        runtime = Runtime.create(self.settings)
        thread = threading.Thread(target=run_job, args=(runtime, job_id))
        thread.start()
        return thread


def sharded(settings: Any) -> Sharded:
    service = make_service(settings)
    with service.runtime.sessions.begin() as session:
        prompt_sets.create(
            session,
            workspace_id=service.workspace,
            name="words",
            sha256="1" * 64,
            count=12,
            tags={},
            content=PROMPTS,
            id="pset_words",
        )
    return Sharded(service.settings, service.runtime, service.workspace)


RUNNER = "tests.workers.fake_shards:run"


@pytest.fixture
def service(tmp_path: Path, broker: str) -> Iterator[Sharded]:
    made = sharded(fast_settings(tmp_path, broker, engine_runner=RUNNER, lease_seconds=3.0))
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_service(request: pytest.FixtureRequest, tmp_path: Path, broker: str) -> Iterator[Sharded]:
    url = fresh_database(request.param, tmp_path)
    made = sharded(fast_settings(tmp_path, broker, database_url=url, engine_runner=RUNNER, lease_seconds=3.0))
    yield made
    made.close()
    made.runtime.sessions.kw["bind"].dispose()
    drop_database(url)


def expected(config: dict[str, Any]) -> Profile:
    """The profile that one worker would measure."""
    plan = plan_of(config)
    table = plan.empty()
    while (work := plan.next(table)) is not None:
        table = ScoreTable.merge([table, measured(plan, work)])
    return profile_from_scores(plan, table)


def check(service: Sharded, parent: str) -> None:
    """The profile is one worker's to the last bit, its cost the sum, its progress never fell."""
    job = service.job(parent)
    assert (job.status, job.error) == ("succeeded", None)
    with service.runtime.sessions() as session:
        stored = profiles.get(session, parent).extra
    wanted = json.loads(json.dumps(expected(job.config).to_dict()))
    assert {**stored, "cost": None} == {**wanted, "cost": None}
    parts = service.shards(parent)
    for name in job.cost:
        assert job.cost[name] == sum(part.cost[name] for part in parts)
    assert job.done == job.total
    for attempt in range(job.attempt):
        done = [event.data["done"] for event in progress_of(service, parent, attempt + 1)]
        assert done == sorted(done)
    ends = [event.data for event in service.events(parent, "finding") if event.data["kind"] == "shard"]
    assert sorted((end["round"], end["shard"]) for end in ends) == [
        (part.request["round"], part.request["shard"]) for part in parts
    ]
    assert {end["status"] for end in ends} == {"succeeded"}


def progress_of(service: Sharded, job_id: str, attempt: int) -> list[Any]:
    """Progress events of one attempt."""
    found, current = [], 0
    for event in service.events(job_id):
        if event.type == "status" and event.data["status"] == "running":
            current = event.data["attempt"]
        elif event.type == "progress" and current == attempt:
            found.append(event)
    return found


def killed(process: Any) -> None:
    """kill -9 a worker; its engines notice and leave."""
    engines = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(engines, timeout=5)
    assert not alive


def owner(service: Sharded, job: Job) -> Any:
    """The process of the worker that holds a job."""
    return next(p for p in service.processes if f"-{p.pid}-" in (job.worker or ""))


def test_two_workers_share_the_shards(any_service: Sharded) -> None:
    service = any_service
    service.steer(pause=0.4)
    service.worker()
    service.worker()
    parent = service.profile()
    job = service.finished(parent, 60)
    check(service, parent)
    parts = service.shards(parent)
    assert [part.attempt for part in parts] == [1, 1, 1]
    assert len({part.worker for part in parts}) == 2
    assert (job.attempt, job.cost["model_evaluations"]) == (1, GROUPS * EVALUATIONS)
    assert job.warnings[0] == "few prompts"
    assert job.result is not None
    assert set(job.result) == {"rewards", "totals", "warnings"}
    last = service.events(parent, "finding")[-2].data  # before the profile itself
    assert (last["kind"], last["ended"], last["total"]) == ("shard", 3, 3)
    with service.runtime.sessions() as session:
        assert [row.id for row in jobs.page(session, service.workspace)[0]] == [parent]

    def scores() -> int:
        with service.runtime.sessions() as session:
            return sum(len(artifacts.of_job(session, part.id, "scores")) for part in parts)

    service.wait(lambda: scores() == 0)
    left = [path for path in (service.settings.home / "artifacts").rglob("*") if path.is_file()]
    assert left == []


def test_one_worker_alone_measures_every_shard(service: Sharded) -> None:
    parent = service.profile(publish=False)
    service.here(parent).join()
    check(service, parent)
    assert [part.attempt for part in service.shards(parent)] == [1] * 3
    assert len({part.worker for part in service.shards(parent)}) == 1


def test_there_are_no_more_shards_than_groups(service: Sharded) -> None:
    parent = service.profile(publish=False, shards=64, estimator={**CONFIG["estimator"], "prompts": 4})
    service.here(parent).join()
    assert len(service.shards(parent)) == 2
    check(service, parent)


def test_a_killed_helper_costs_its_shard_alone(service: Sharded) -> None:
    service.steer(pause=0.5)
    parent = service.profile()
    service.worker()
    service.wait(lambda: service.shards(parent))
    helper = service.worker()

    def held() -> list[Job]:
        return [part for part in service.shards(parent) if f"-{helper.pid}-" in (part.worker or "")]

    service.wait(lambda: held() and held()[0].cost["model_evaluations"])
    (lost,) = held()
    killed(helper)
    job = service.finished(parent, 60)
    assert job.attempt == 1
    assert {part.id: part.attempt for part in service.shards(parent)} == {
        part.id: 1 + (part.id == lost.id) for part in service.shards(parent)
    }
    assert job.cost["model_evaluations"] > GROUPS * EVALUATIONS  # what was lost was spent all the same
    check(service, parent)


@pytest.mark.parametrize("any_service", ["postgresql"], indirect=True)  # SQLite: as both are killed
def test_a_killed_coordinator_is_replaced_and_finished_shards_are_found(any_service: Sharded) -> None:
    service = any_service
    service.steer(pause=0.3)
    first = service.worker()
    parent = service.profile()
    service.wait(lambda: "succeeded" in service.states(parent))
    before = {part.id for part in service.shards(parent) if part.status == "succeeded"}
    assert owner(service, service.job(parent)) is first
    killed(first)
    service.worker()
    job = service.finished(parent, 60)
    assert job.attempt == 2
    for part in service.shards(parent):
        if part.id in before:
            assert part.attempt == 1
    check(service, parent)
    phases = {event.data["phase"] for event in service.events(parent, "progress")}
    assert phases == {"profiling"}


def test_both_killed_and_the_broker_emptied_cost_only_time(service: Sharded) -> None:
    service.steer(pause=0.3)
    workers = [service.worker(), service.worker()]
    parent = service.profile()
    service.wait(lambda: service.states(parent).count("running") == 2)
    for process in workers:
        killed(process)
    flush(service.settings.broker_url)
    service.worker()
    service.finished(parent, 60)
    check(service, parent)


def test_a_flushed_broker_is_not_needed(service: Sharded) -> None:
    service.steer(pause=0.3)
    service.worker()
    parent = service.profile()
    service.wait(lambda: "running" in service.states(parent))
    flush(service.settings.broker_url)
    service.worker()  # hears of shards from the sweepers
    job = service.finished(parent, 60)
    assert [part.attempt for part in service.shards(parent)] == [1] * 3
    assert job.attempt == 1
    check(service, parent)


def test_sigterm_hands_the_profile_over(service: Sharded) -> None:
    service.steer(pause=0.3)
    first = service.worker()
    parent = service.profile()
    service.wait(lambda: "succeeded" in service.states(parent))
    first.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0
    job = service.job(parent)
    assert (job.status, job.crashes, {part.crashes for part in service.shards(parent)}) == ("queued", 0, {0})
    assert "running" not in service.states(parent)
    service.worker()
    assert service.finished(parent, 60).attempt == 2
    check(service, parent)


def test_a_cancelled_profile_stops_its_shards(any_service: Sharded) -> None:
    service = any_service
    service.steer(pause=0.5)
    parent = service.profile(publish=False)
    coordinator = service.here(parent)
    service.wait(lambda: "running" in service.states(parent))
    helper = service.here(next(part.id for part in service.shards(parent) if part.status == "queued"))
    service.wait(lambda: service.states(parent).count("running") == 2)
    service.cancel(parent)
    for thread in (coordinator, helper):
        thread.join(20)
    assert service.statuses(parent) == ["queued", "running", "cancelling", "cancelled"]
    assert set(service.states(parent)) == {"cancelled"}
    job = service.job(parent)
    assert job.cost["model_evaluations"] == sum(
        part.cost["model_evaluations"] for part in service.shards(parent)
    )
    for part in service.shards(parent):
        assert run_job(service.runtime, part.id) is False  # a late message


def test_a_profile_cancelled_while_nobody_holds_it_stops_its_shards(service: Sharded) -> None:
    """A helper's shard outlives its profile for a moment, and is still counted."""
    service.steer(pause=1.0)
    parent = service.profile(publish=False)
    coordinator = service.here(parent)
    service.wait(lambda: service.states(parent).count("queued") == 2)
    helper = service.here(service.shards(parent)[0].id)
    service.wait(lambda: service.shards(parent)[0].cost["model_evaluations"])
    with service.runtime.sessions.begin() as session:  # as a worker that leaves does
        attempts.release(session, Claim(parent, "profile", 1, "w"))
    assert service.cancel(parent).status == "cancelled"
    for thread in (coordinator, helper):
        thread.join(20)
    assert set(service.states(parent)) == {"cancelled"}
    job, parts = service.job(parent), service.shards(parent)
    assert job.status == "cancelled"
    assert job.cost["model_evaluations"] == sum(part.cost["model_evaluations"] for part in parts) > 0


def test_a_failed_shard_fails_the_profile_with_its_error(any_service: Sharded) -> None:
    service = any_service
    service.steer(slow=[0], refuse=[2])
    parent = service.profile(publish=False)
    coordinator = service.here(parent)  # takes shard 2 first
    service.wait(lambda: service.shards(parent))
    helper = service.here(service.shards(parent)[0].id)
    for thread in (coordinator, helper):
        thread.join(20)
    job = service.job(parent)
    assert job.status == "failed"
    assert job.error == {"type": "reward-failure", "detail": "ocr failed on 40% of the images"}
    assert service.states(parent) == ["cancelled"] * 2 + ["failed"]
    assert job.cost == {name: sum(part.cost[name] for part in service.shards(parent)) for name in job.cost}


def test_a_shard_whose_engine_keeps_dying_fails_the_profile(service: Sharded) -> None:
    service.steer(die=[1])
    parent = service.profile(publish=False, shards=2)
    service.here(parent).join()
    job = service.job(parent)
    assert job.error is not None
    assert (job.status, job.error["type"]) == ("failed", "engine-died")
    assert [(part.status, part.attempt) for part in service.shards(parent)][1] == ("failed", 3)


def test_the_profile_waits_for_a_slow_shard_without_holding_it(service: Sharded) -> None:
    service.steer(slow=[0])
    parent = service.profile(publish=False, shards=2)
    slow = Runtime.create(service.settings)
    coordinator = service.here(parent)  # takes shard 1 first
    service.wait(lambda: service.shards(parent))
    helper = threading.Thread(target=run_job, args=(slow, service.shards(parent)[0].id))
    helper.start()
    service.wait(lambda: service.states(parent) == ["running", "succeeded"])
    time.sleep(1.0)
    assert service.shards(parent)[0].worker == slow.worker
    assert service.job(parent).status == "running"
    coordinator.join(30)
    helper.join()
    assert [part.attempt for part in service.shards(parent)] == [1, 1]
    check(service, parent)


def test_coordinators_and_messages_may_come_twice(any_service: Sharded) -> None:
    """A coordinator that was thought dead and its successor, and every shard delivered three times."""
    service = any_service
    service.steer(pause=0.1)
    parent = service.profile(publish=False)
    first = service.here(parent)
    service.wait(lambda: service.shards(parent))
    with service.runtime.sessions.begin() as session:
        jobs.back_to_queue(jobs.lock(session, parent))
    second = service.here(parent)
    ids = [part.id for part in service.shards(parent)] * 3
    extra = [service.here(id) for id in ids]
    for thread in (first, second, *extra):
        thread.join(30)
    assert [part.attempt for part in service.shards(parent)] == [1] * 3
    assert service.job(parent).attempt == 2
    assert service.statuses(parent).count("succeeded") == 1
    check(service, parent)


def test_a_plan_that_cannot_work_fails_the_profile(service: Sharded) -> None:
    parent = service.profile(publish=False, rewards=["geneval"])
    service.here(parent).join()
    job = service.job(parent)
    assert job.error is not None
    assert (job.status, job.error["type"]) == ("failed", "invalid-config")
    assert "geneval" in job.error["detail"]
    assert service.shards(parent) == []


def two_rounds(plan: Plan, table: ScoreTable) -> Work | None:
    """First eight images of every prompt, then eight more of those that scored high: as an adaptive plan."""
    rollouts = (1,) * (len(plan.levels) - 1)
    if table.rounds == 0:
        return Work(0, 0, tuple(range(len(plan.places))), (0, 8), rollouts)
    if table.rounds == 1:
        means = table.clean[0].mean(axis=1)
        return Work(1, 0, tuple(np.flatnonzero(means > np.median(means)).tolist()), (8, 16), rollouts)
    return None


def test_rounds_follow_from_merged_scores_whoever_goes_on(
    service: Sharded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker takes over in the second round, and plans the same one."""
    monkeypatch.setattr(Plan, "next", two_rounds)
    service.steer(pause=0.4)
    parent = service.profile(publish=False, shards=2)
    first = service.here(parent)
    service.wait(lambda: len(service.shards(parent)) == 4)
    with service.runtime.sessions.begin() as session:
        jobs.back_to_queue(jobs.lock(session, parent))
    second = service.here(parent)
    for thread in (first, second):
        thread.join(60)
    parts = service.shards(parent)
    assert [(part.request["round"], part.request["shard"]) for part in parts] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [part.attempt for part in parts] == [1] * 4
    assert {len(part.request["work"]["rows"]) for part in parts[:2]} == {4, 8}
    assert sum(len(part.request["work"]["rows"]) for part in parts[2:]) == 6
    check(service, parent)
    last = service.events(parent, "progress")[-1].data
    assert last["phase"] == "profiling, round 2"
    assert last["phase_done"] == last["phase_total"] == 6 * 8 * 4
