from __future__ import annotations

import logging

import pytest

from api.app import create_app
from store.models import ApiKey
from store.repositories import keys

POSTS = (
    "/v1/prompt-sets",
    "/v1/profiles",
    "/v1/allocations",
    "/v1/trainings",
    "/v1/evaluations",
    "/v1/jobs/job_x/cancel",
    "/v1/jobs/job_x/resume",
)


def test_every_operation_but_health_needs_a_key(service):
    client = service.client
    del client.headers["Authorization"]
    paths = create_app(service.context.settings).openapi()["paths"]
    for path, operations in paths.items():
        for method in operations:
            answer = client.request(method.upper(), path.replace("{id}", "x").replace("{sample_id}", "y"))
            if path in ("/healthz", "/readyz"):
                assert answer.status_code in (200, 503)
                continue
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == 'Bearer realm="recast"'
            assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer ",
        "Bearer nobody",
        "Basic cms6cms=",
        "Bearer " + "x" * 5000,
        "Bearer é",
        "bearer\t x",
    ],
)
def test_anything_but_a_known_key_is_unauthenticated(service, header):
    answer = service.client.get("/v1/jobs", headers={"Authorization": header.encode()})
    assert answer.status_code == 401


def test_roles_open_what_they_should(service):
    client = service.client
    for path in POSTS:
        answer = client.post(path, json={}, headers=service.as_role("viewer"))
        assert answer.status_code == 403, path
        assert "'editor'" in answer.json()["detail"]
        assert client.post(path, json={}, headers=service.as_role("editor")).status_code in (404, 422)
    for role in ("viewer", "editor"):
        assert client.get("/v1/jobs", headers=service.as_role(role)).status_code == 200
        answer = client.get("/v1/keys", headers=service.as_role(role))
        assert answer.status_code == 403
        assert "'admin'" in answer.json()["detail"]
    assert client.get("/v1/keys", headers=service.as_role("admin")).status_code == 200


def test_a_key_is_shown_once_works_and_can_be_revoked(service):
    client, admin = service.client, service.as_role("admin")
    made = client.post("/v1/keys", json={"name": "studio", "role": "editor"}, headers=admin)
    assert made.status_code == 201
    secret = made.json()["key"]
    assert len(secret) > 40
    listed = client.get("/v1/keys", headers=admin).json()["data"]
    assert listed[0] == {key: value for key, value in made.json().items() if key != "key"}
    assert secret not in client.get("/v1/keys", headers=admin).text
    with service.context.read() as session:
        row = session.get(ApiKey, made.json()["id"])
        assert row.key_hash == keys.hash_secret(secret) != secret
    own = {"Authorization": f"Bearer {secret}"}
    assert client.get("/v1/jobs", headers=own).status_code == 200
    assert client.delete(f"/v1/keys/{made.json()['id']}", headers=admin).json()["revoked_at"] is not None
    assert client.get("/v1/jobs", headers=own).status_code == 401


def test_the_last_use_of_a_key_is_recorded(service):
    service.client.get("/v1/jobs", headers=service.as_role("viewer"))
    listed = service.client.get("/v1/keys", headers=service.as_role("admin")).json()["data"]
    used = {key["name"]: key["last_used_at"] is not None for key in listed}
    assert used == {"viewer": True, "editor": False, "admin": True}


def test_a_repeated_key_request_makes_no_second_key_and_stores_no_secret(service):
    headers = service.as_role("admin") | {"Idempotency-Key": "k1"}
    body = {"name": "studio", "role": "viewer"}
    first = service.client.post("/v1/keys", json=body, headers=headers)
    again = service.client.post("/v1/keys", json=body, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json() | {"key": None}
    database = (service.context.settings.home / "recast.db").read_bytes()
    journal = (service.context.settings.home / "recast.db-wal").read_bytes()
    assert first.json()["key"].encode() not in database + journal


def test_another_workspace_sees_nothing(service, training, measured_profile, adapter):
    client, stranger = service.client, service.as_role("stranger")
    job = client.post("/v1/trainings", json=training).json()["id"]
    allocation = client.post(
        "/v1/allocations", json={"profile": measured_profile, "budgets": {"ocr": 1}, "steps": 3}
    ).json()["id"]
    paths = [
        f"/v1/jobs/{job}",
        f"/v1/jobs/{job}/events",
        f"/v1/trainings/{job}",
        f"/v1/trainings/{job}/metrics",
        f"/v1/trainings/{job}/samples",
        f"/v1/trainings/{job}/checkpoints",
        f"/v1/trainings/{job}/adapters",
        f"/v1/profiles/{measured_profile}",
        f"/v1/profiles/{measured_profile}/gains?steps=3",
        f"/v1/allocations/{allocation}",
        f"/v1/allocations/{allocation}.csv",
        f"/v1/adapters/{adapter}",
        f"/v1/adapters/{adapter}/download",
        f"/v1/prompt-sets/{training['prompt_set']}",
    ]
    page = {"Accept": "application/json"}  # not the stream of a job that never ends
    for path in paths:
        assert client.get(path, headers=service.as_role("viewer") | page).status_code == 200, path
        theirs = client.get(path, headers=stranger | page)
        nobodys = client.get(path.replace("_", "_0"), headers=stranger | page)
        assert theirs.status_code == nobodys.status_code == 404, path
    for path in (f"/v1/jobs/{job}/cancel", f"/v1/jobs/{job}/resume"):
        assert client.post(path, headers=stranger).status_code == 404
    answer = client.post("/v1/trainings", json=training, headers=stranger)
    assert answer.json()["errors"][0]["loc"] == ["body", "prompt_set"]
    request = {"profile": measured_profile, "budgets": {"ocr": 1}, "steps": 3}
    answer = client.post("/v1/allocations/preview", json=request, headers=stranger)
    assert answer.json()["errors"][0]["loc"] == ["body", "profile"]
    for kind in ("jobs", "trainings", "profiles", "allocations", "adapters"):
        assert client.get(f"/v1/{kind}", headers=stranger).json()["data"] == []


def test_the_access_log_names_the_request_and_no_secret(service, caplog):
    with caplog.at_level(logging.INFO):
        answer = service.client.get("/v1/jobs?limit=5&cursor=c2VjcmV0", headers=service.as_role("viewer"))
    lines = [record.getMessage() for record in caplog.records if record.name == "api.access"]
    assert len(lines) == 1
    assert lines[0].startswith(f"{answer.headers['x-request-id']} GET /v1/jobs ")
    ours = " ".join(
        record.getMessage() for record in caplog.records if record.name.startswith(("api", "store"))
    )
    assert "viewer_secret_for_tests" not in ours
    assert "c2VjcmV0" not in ours
