from __future__ import annotations

import json
import threading
import time
from datetime import timedelta

import pytest

from api.jobs import stream as streaming
from store.models import Job
from store.repositories import attempts, jobs


@pytest.fixture
def job(client, training):
    return client.post("/v1/trainings", json=training).json()["id"]


def claim(service, job_id):
    with service.write() as session, session.begin():
        return attempts.claim(session, job_id, "worker", 60)


def finish(service, held, status="succeeded", **more):
    with service.write() as session, session.begin():
        attempts.finish(session, held, status, **more)


def read_stream(text):
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            events.append((int(lines["id"]), lines["event"], json.loads(lines["data"])))
    return events


def test_the_shape_of_a_new_job(client, job):
    view = client.get(f"/v1/jobs/{job}").json()
    assert set(view) >= {
        "id", "kind", "status", "progress", "error", "attempt",
        "created_at", "started_at", "finished_at", "cost",
    }  # fmt: skip
    assert (view["id"], view["kind"], view["status"], view["attempt"]) == (job, "training", "queued", 0)
    assert view["progress"] == {"phase": "queued", "done": 0, "total": 0, "eta_seconds": None}
    assert view["cost"] == {
        "model_evaluations": 0, "reward_calls": 0, "proposal_images": 0, "device_seconds": 0.0,
    }  # fmt: skip
    assert (view["error"], view["started_at"], view["finished_at"]) == (None, None, None)
    assert view["created_at"].endswith("Z")
    assert job.startswith("train_")


def test_eta_follows_the_pace_of_the_phase(service, job):
    held = claim(service, job)
    with service.write() as session, session.begin():
        attempts.begin_phase(session, held, "profiling", 10)
        attempts.progress(session, held, 10)
        attempts.begin_phase(session, held, "training", 20)
        attempts.progress(session, held, 5)
        row = session.get(Job, job)
        row.phase_started_at = row.phase_started_at - timedelta(seconds=50)
    progress = service.client.get(f"/v1/jobs/{job}").json()["progress"]
    assert (progress["phase"], progress["done"], progress["total"]) == ("training", 5, 20)
    assert progress["eta_seconds"] == pytest.approx(50 / 5 * 15, rel=0.1)  # slack: time the test itself takes


def test_a_resumed_training_counts_all_its_epochs(service, job):
    """It goes on at the epoch that it had reached, at the pace since then."""
    held = claim(service, job)
    with service.write() as session, session.begin():
        attempts.begin_phase(session, held, "training", 40, start=30)
        attempts.progress(session, held, 32)
        row = session.get(Job, job)
        row.phase_started_at = row.phase_started_at - timedelta(seconds=10)
    progress = service.client.get(f"/v1/jobs/{job}").json()["progress"]
    assert (progress["phase"], progress["done"], progress["total"]) == ("training", 32, 40)
    assert progress["eta_seconds"] == pytest.approx(10 / 2 * 8, rel=0.2)
    finish(service, held, "succeeded")
    progress = service.client.get(f"/v1/jobs/{job}").json()["progress"]
    assert (progress["done"], progress["total"]) == (40, 40)


def test_a_failed_job_says_why(service, job):
    finish(service, claim(service, job), "failed", error={"type": "non-finite", "detail": "loss at step 3"})
    view = service.client.get(f"/v1/jobs/{job}").json()
    assert view["status"] == "failed"
    assert view["error"] == {"type": "non-finite", "detail": "loss at step 3"}
    assert view["finished_at"] is not None


def test_lists_page_newest_first_and_filter(client, training, prompt_set):
    made = [client.post("/v1/trainings", json=training | {"seed": seed}).json()["id"] for seed in range(5)]
    profile = {"model": "miniature", "prompt_set": prompt_set, "rewards": ["ocr"]}
    made.append(client.post("/v1/profiles", json=profile).json()["id"])
    client.post(f"/v1/jobs/{made[0]}/cancel")
    seen, cursor = [], None
    while True:
        page = client.get("/v1/jobs", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        assert len(page["data"]) <= 2
        seen += [row["id"] for row in page["data"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert seen == made[::-1]
    listed = client.get("/v1/jobs?status=cancelled").json()["data"]
    assert [row["id"] for row in listed] == made[:1]
    assert [row["id"] for row in client.get("/v1/jobs?kind=profile").json()["data"]] == made[-1:]
    assert [row["id"] for row in client.get("/v1/trainings?status=queued").json()["data"]] == made[4:0:-1]
    assert [row["id"] for row in client.get("/v1/profiles").json()["data"]] == made[-1:]


def test_cancelling(service, job):
    client = service.client
    assert client.post(f"/v1/jobs/{job}/cancel").json()["status"] == "cancelled"
    assert client.post(f"/v1/jobs/{job}/cancel").json()["status"] == "cancelled"


def test_cancelling_a_running_job_asks_it_to_stop(service, job):
    held = claim(service, job)
    answer = service.client.post(f"/v1/jobs/{job}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
    finish(service, held, "cancelled")
    assert service.client.get(f"/v1/jobs/{job}").json()["status"] == "cancelled"


def test_a_finished_job_cannot_be_cancelled(service, job):
    finish(service, claim(service, job), result={})
    answer = service.client.post(f"/v1/jobs/{job}/cancel")
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert service.client.get(f"/v1/jobs/{job}").json()["status"] == "succeeded"


def test_resuming_a_failed_training_queues_and_publishes_it(service, job):
    finish(service, claim(service, job), "failed", error={"type": "x", "detail": "y"})
    service.published.messages.clear()
    answer = service.client.post(f"/v1/jobs/{job}/resume")
    assert (answer.status_code, answer.json()["status"], answer.json()["error"]) == (200, "queued", None)
    assert service.published.messages == [("training", job)]


def test_only_a_failed_or_cancelled_training_can_be_resumed(service, job, prompt_set):
    client = service.client
    assert client.post(f"/v1/jobs/{job}/resume").status_code == 409
    profile = {"model": "miniature", "prompt_set": prompt_set, "rewards": ["ocr"]}
    other = client.post("/v1/profiles", json=profile).json()["id"]
    client.post(f"/v1/jobs/{other}/cancel")
    service.published.messages.clear()
    assert client.post(f"/v1/jobs/{other}/resume").status_code == 409
    assert service.published.messages == []


def test_events_as_a_page(service, job):
    held = claim(service, job)
    with service.write() as session, session.begin():
        attempts.begin_phase(session, held, "training", 3)
    accept = {"Accept": "application/json"}
    page = service.client.get(f"/v1/jobs/{job}/events?limit=2", headers=accept).json()
    assert [event["data"].get("status") for event in page["data"]] == ["queued", "running"]
    rest = service.client.get(f"/v1/jobs/{job}/events?after={page['next_after']}", headers=accept).json()
    assert [event["type"] for event in rest["data"]] == ["progress"]
    assert rest["next_after"] == rest["data"][0]["seq"]
    finish(service, held, result={})
    last = service.client.get(f"/v1/jobs/{job}/events?after={rest['next_after']}", headers=accept).json()
    assert [event["data"]["status"] for event in last["data"]] == ["succeeded"]
    assert last["next_after"] is None


def test_a_stream_ends_after_the_terminal_event_and_resumes_without_loss_or_repeats(service, job):
    held = claim(service, job)
    with service.write() as session, session.begin():
        for done in range(3):
            attempts.add_event(session, held, "metrics", {"step": done})
    finish(service, held, result={})
    answer = service.client.get(f"/v1/jobs/{job}/events")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = read_stream(answer.text)
    assert [kind for _, kind, _ in events] == ["status", "status", "metrics", "metrics", "metrics", "status"]
    ids = [seq for seq, _, _ in events]
    assert ids == sorted(set(ids))
    for cut, seq in enumerate(ids):
        resumed = service.client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": str(seq)})
        assert read_stream(resumed.text) == events[cut + 1 :]
    for bad in ("x", "-1", "²", "9" * 25):
        headers = {"Last-Event-ID": bad.encode()}
        assert service.client.get(f"/v1/jobs/{job}/events", headers=headers).status_code == 422


def test_a_stream_of_a_resumed_job_does_not_end_at_the_earlier_failure(service, job):
    finish(service, claim(service, job), "failed", error={"type": "x", "detail": "y"})
    service.client.post(f"/v1/jobs/{job}/resume")
    finish(service, claim(service, job), result={})
    events = read_stream(service.client.get(f"/v1/jobs/{job}/events").text)
    statuses = [data["status"] for _, _, data in events]
    assert statuses == ["queued", "running", "failed", "queued", "running", "succeeded"]


def test_a_stream_is_live_and_holds_no_connection_between_polls(service, job, monkeypatch):
    monkeypatch.setattr(streaming, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(streaming, "HEARTBEAT_SECONDS", 0.1)
    held = claim(service, job)

    def work():
        for done in range(5):
            time.sleep(0.15)
            with service.write() as session, session.begin():
                attempts.add_event(session, held, "metrics", {"step": done})
        finish(service, held, result={})

    worker = threading.Thread(target=work)
    worker.start()
    text = service.client.get(f"/v1/jobs/{job}/events").text
    worker.join()
    assert [data["step"] for _, kind, data in read_stream(text) if kind == "metrics"] == [0, 1, 2, 3, 4]
    assert ": still here\n\n" in text
    assert service.context.engine.pool.checkedout() == 0


def test_a_job_is_accepted_while_the_broker_is_down(settings, service, training):
    from fastapi.testclient import TestClient

    from api.app import create_app

    with TestClient(create_app(settings)) as client:  # publishes for real, to a port that nobody listens on
        started = time.monotonic()
        answer = client.post("/v1/trainings", json=training, headers=service.as_role("editor"))
        assert time.monotonic() - started < 10
    assert answer.status_code == 202
    with service.context.read() as session:
        assert jobs.get(session, answer.json()["id"]).status == "queued"
