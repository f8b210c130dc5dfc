"""Health, metrics, the OpenAPI document, failures of ours."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from api.jobs import service as jobs_service
from store import queue
from store.repositories import workers


def test_health_and_readiness_need_no_key(service, monkeypatch):
    client = service.client
    del client.headers["Authorization"]
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {
        "ready": False,
        "database": True,
        "broker": False,
        "queues": dict.fromkeys(queue.QUEUES.values(), False),
    }


def test_ready_with_a_broker_and_a_live_worker_for_every_queue(service, monkeypatch):
    monkeypatch.setattr(queue, "reachable", lambda url: True)
    monkeypatch.setattr("api.health.service.FRESH_SECONDS", 0.0)
    with service.write() as session, session.begin():
        workers.beat(session, "one", ["recast.profile", "recast.training"])
    assert service.client.get("/readyz").status_code == 503
    with service.write() as session, session.begin():
        workers.beat(session, "two", ["recast.evaluation", "recast.profile_shard"])
    answer = service.client.get("/readyz")
    assert (answer.status_code, answer.json()["ready"]) == (200, True)


def test_readiness_is_looked_up_once_in_a_while(service, monkeypatch):
    looked = []
    monkeypatch.setattr(queue, "reachable", lambda url: bool(looked.append(url)))
    for _ in range(10):
        service.client.get("/readyz")
    assert len(looked) == 1


def test_metrics_count_requests_and_the_workspaces_jobs(service, training):
    client = service.client
    client.post("/v1/trainings", json=training)
    client.get("/v1/jobs/job_nothing")
    client.request("BREW", "/v1/nothing")
    text = client.get("/metrics").text
    assert 'recast_jobs{kind="training",status="queued"} 1.0' in text
    assert 'recast_jobs{kind="training",status="failed"} 0.0' in text
    assert 'recast_http_requests_total{method="GET",route="/v1/jobs/{id}",status="404"} 1.0' in text
    assert 'recast_http_requests_total{method="OTHER",route="unmatched",status="404"} 1.0' in text
    theirs = client.get("/metrics", headers=service.as_role("stranger")).text
    assert 'recast_jobs{kind="training",status="queued"} 0.0' in theirs


def test_the_openapi_document_is_clean(client):
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    ids = [operation["operationId"] for _, _, operation in operations]
    assert len(set(ids)) == len(ids) > 35
    for method, path, operation in operations:
        assert len(operation["tags"]) == 1, path
        assert operation["summary"], path
        assert operation["description"], path
        success = [status for status in operation["responses"] if status.startswith("2")]
        assert success, path
        for status, response in operation["responses"].items():
            if status.startswith("4"):
                assert list(response["content"]) == ["application/problem+json"], (path, status)
        if path not in ("/healthz", "/readyz"):
            assert operation["security"] == [{"HTTPBearer": []}], path
        if method == "post" and not path.endswith(("/cancel", "/resume")):
            media = operation["requestBody"]["content"]["application/json"]
            assert media["examples"], path
    refs = set(_refs(document))
    assert refs == {f"#/components/schemas/{name}" for name in schemas}
    assert schemas["SamplingConfig"]["properties"]["steps"]["maximum"] == 1000
    assert schemas["TrainingConfig"]["additionalProperties"] is False
    assert "HTTPValidationError" not in schemas


def _refs(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _refs(value)


def test_examples_in_the_document_are_accepted(service, adapter, measured_profile):
    document = service.client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        media = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in media.get("examples", {}).values():
            body = _with_real_ids(example["value"], adapter, measured_profile)
            answer = service.client.post(path, json=body, headers=service.as_role("admin"))
            assert answer.status_code in (200, 201, 202), (path, answer.text)


def _with_real_ids(node, adapter, profile):
    if isinstance(node, dict):
        return {key: _with_real_ids(value, adapter, profile) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_real_ids(value, adapter, profile) for value in node]
    if isinstance(node, str):
        return adapter if node.startswith("adapt_") else profile if node.startswith("prof_") else node
    return node


def test_a_failure_of_ours_leaks_nothing_and_is_logged_under_its_incident(service, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("secret path /home/somebody")

    monkeypatch.setattr(jobs_service, "page", fail)
    with caplog.at_level(logging.ERROR):
        answer = service.client.get("/v1/jobs")
    problem = answer.json()
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    assert problem["incident"].startswith("inc_")
    assert problem["incident"] in caplog.text
    assert "secret path" in caplog.text


def test_a_database_that_does_not_answer_is_unavailable(service, monkeypatch):
    def fail(*args, **kwargs):
        raise OperationalError("SELECT secret", {}, Exception("database is locked"))

    monkeypatch.setattr(jobs_service, "page", fail)
    answer = service.client.get("/v1/jobs")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "secret" not in answer.text


def test_a_database_without_room_says_what_to_do_and_stores_nothing(service):
    """SQLite at its page limit fails as on a full disk."""
    engine = service.context.engine
    stored = service.client.get("/v1/prompt-sets").json()

    def limit(pages):
        event.listen(
            engine, "connect", lambda connection, _: connection.execute(f"PRAGMA max_page_count={pages}")
        )
        engine.dispose()

    body = {"name": "many", "content": "".join(f"{number} red circles\n" for number in range(20_000))}
    limit(1)
    answer = service.client.post("/v1/prompt-sets", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["title"] == "The database has no room"
    assert "make room on the disk of the database" in answer.json()["detail"]
    limit(2**30)
    assert service.client.get("/v1/prompt-sets").json() == stored
    assert service.client.post("/v1/prompt-sets", json=body).status_code == 201


def test_every_answer_has_its_own_request_id(client):
    ids = {client.get("/healthz").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


def test_catalogues(client):
    models = {row["id"]: row for row in client.get("/v1/models").json()["data"]}
    assert models["miniature"]["available"] is True
    assert models["miniature"]["reason"] is None
    assert models["miniature"]["repository"] is None
    assert models["qwen-image"]["repository"] == "Qwen/Qwen-Image"
    assert len(models["qwen-image"]["revision"]) == 40
    assert set(models["sd3.5-medium"]) >= {
        "id",
        "family",
        "resolution",
        "default_steps",
        "available",
        "reason",
    }
    rewards = {row["id"]: row for row in client.get("/v1/rewards").json()["data"]}
    assert set(rewards["ocr"]) >= {
        "id", "objective", "summary", "range", "higher_is_better", "needs_metadata", "role", "licence",
        "memory_gib", "weights", "available", "reason",
    }  # fmt: skip
    assert "recast rewards convert imagereward" in rewards["imagereward"]["reason"]
    assert (rewards["ocr"]["objective"], rewards["ocr"]["needs_metadata"]) == ("text_accuracy", ["text"])
    assert rewards["aesthetic"]["role"] == "held_out"
    assert rewards["clipscore"]["available_for"] == ["miniature"]
    assert rewards["clipscore"]["weights"] == "openai/clip-vit-large-patch14"


@pytest.mark.parametrize("path", ["/healthz/", "/v1/jobs/", "/v1//jobs", "/V1/jobs"])
def test_paths_are_exact(client, path):
    assert client.get(path).status_code == 404
