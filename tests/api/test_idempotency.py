from __future__ import annotations

import threading

import pytest


def test_a_repeat_returns_the_first_answer_and_another_body_is_refused(service, training, job_count):
    client, headers = service.client, {"Idempotency-Key": "first"}
    first = client.post("/v1/trainings", json=training, headers=headers)
    client.post(f"/v1/jobs/{first.json()['id']}/cancel")
    again = client.post("/v1/trainings", json=training, headers=headers)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert again.headers["location"] == first.headers["location"] == f"/v1/trainings/{first.json()['id']}"
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    other = client.post("/v1/trainings", json=training | {"seed": 1}, headers=headers)
    assert other.status_code == 409
    assert job_count() == 1
    assert service.published.messages == [("training", first.json()["id"])]


def test_the_same_key_for_another_operation_is_refused(service, training):
    headers = {"Idempotency-Key": "first"}
    assert service.client.post("/v1/trainings", json=training, headers=headers).status_code == 202
    profile = {"model": "miniature", "prompt_set": training["prompt_set"], "rewards": ["ocr"]}
    assert service.client.post("/v1/profiles", json=profile, headers=headers).status_code == 409


def test_a_refused_request_does_not_consume_its_key(service, training, job_count):
    headers = {"Idempotency-Key": "first"}
    bad = service.client.post("/v1/trainings", json=training | {"seed": -1}, headers=headers)
    worse = service.client.post("/v1/trainings", json=training | {"model": "nothing"}, headers=headers)
    assert (bad.status_code, worse.status_code) == (422, 422)
    assert service.client.post("/v1/trainings", json=training, headers=headers).status_code == 202
    assert job_count() == 1


def test_keys_of_workspaces_are_apart(service):
    body = {"gains": {"a": [1.0, 2.0]}, "budgets": {"a": 1}}
    headers = {"Idempotency-Key": "first"}
    mine = service.client.post("/v1/allocations", json=body, headers=headers)
    theirs = service.client.post("/v1/allocations", json=body, headers=headers | service.as_role("stranger"))
    assert (mine.status_code, theirs.status_code) == (201, 201)
    assert mine.json()["id"] != theirs.json()["id"]


def test_repeats_of_every_creating_call(service, prompt_set):
    evaluation = {
        "subjects": [{"label": "base", "base_model": "miniature"}],
        "baseline": "base",
        "rewards": ["clipscore"],
        "prompt_set": prompt_set,
    }
    calls = {
        "/v1/prompt-sets": {"name": "one", "content": "a red circle\n"},
        "/v1/profiles": {"model": "miniature", "prompt_set": prompt_set, "rewards": ["ocr"]},
        "/v1/allocations": {"gains": {"a": [1.0, 2.0]}, "budgets": {"a": 1}},
        "/v1/evaluations": evaluation,
    }
    for path, body in calls.items():
        headers = {"Idempotency-Key": f"key-of-{path}"}
        first = service.client.post(path, json=body, headers=headers)
        again = service.client.post(path, json=body, headers=headers)
        assert first.status_code in (201, 202), first.text
        assert (again.status_code, again.json()) == (first.status_code, first.json())


def test_duplicates_at_the_same_time_create_one_row(service, training, job_count):
    answers = []

    def send():
        answers.append(
            service.client.post("/v1/trainings", json=training, headers={"Idempotency-Key": "one"})
        )

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert job_count() == 1
    assert len(service.published.messages) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "two words"])
def test_a_malformed_key_is_refused(service, training, job_count, key):
    answer = service.client.post("/v1/trainings", json=training, headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["header", "Idempotency-Key"]
    assert job_count() == 0
