"""Asking for the same profile again answers with it; whatever could change its numbers starts a new one."""

from __future__ import annotations

import pytest

from store.repositories import attempts, jobs, profiles
from tests.api.conftest import PROMPTS, curve


@pytest.fixture
def request_(prompt_set):
    return {"model": "miniature", "prompt_set": prompt_set, "rewards": ["clipscore", "ocr"]}


def post(service, body, **headers):
    return service.client.post("/v1/profiles", json=body, headers=headers)


def claimed(service, job_id):
    with service.write() as session, session.begin():
        return attempts.claim(session, job_id, "worker", 60)


def ended(service, job_id, status="succeeded"):
    """Bring a queued profile to its end; a succeeded one has curves."""
    claim = claimed(service, job_id)
    measured = {"rewards": ["ocr"], "levels": [0.0, 1.0], "curves": {}, "warnings": ["few prompts"]}
    with service.write() as session, session.begin():
        if status == "succeeded":
            profiles.create(session, job_id, measured)
        attempts.finish(session, claim, status)


def test_a_stored_profile_is_the_answer(service, request_, job_count):
    first = post(service, request_)
    assert (first.status_code, first.json()["reused"]) == (202, False)
    ended(service, first.json()["id"])
    again = post(service, request_)
    assert again.status_code == 200
    assert again.headers["location"] == first.headers["location"]
    view = again.json()
    assert (view["id"], view["reused"], view["status"]) == (first.json()["id"], True, "succeeded")
    assert (view["levels"], view["warnings"]) == ([0.0, 1.0], ["few prompts"])
    assert job_count() == 1
    assert service.published.messages == [("profile", first.json()["id"])]


def test_a_profile_under_way_is_the_answer(service, request_, job_count):
    first = post(service, request_).json()["id"]
    assert (post(service, request_).status_code, post(service, request_).json()["id"]) == (200, first)
    claimed(service, first)
    running = post(service, request_)
    assert (running.status_code, running.json()["status"], running.json()["id"]) == (200, "running", first)
    assert job_count() == 1


def test_reuse_can_be_refused_and_the_newest_is_then_the_answer(service, request_):
    first = post(service, request_).json()["id"]
    ended(service, first)
    second = post(service, request_ | {"reuse": False})
    assert (second.status_code, second.json()["reused"]) == (202, False)
    assert second.json()["id"] != first
    assert post(service, request_).json()["id"] == first  # the stored one comes before the one under way
    ended(service, second.json()["id"])
    assert post(service, request_).json()["id"] == second.json()["id"]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_what_did_not_succeed_is_never_the_answer(service, request_, status):
    first = post(service, request_).json()["id"]
    ended(service, first, status)
    again = post(service, request_)
    assert (again.status_code, again.json()["id"] != first) == (202, True)


def test_a_profile_being_cancelled_is_not_the_answer(service, request_):
    first = post(service, request_).json()["id"]
    claimed(service, first)
    assert service.client.post(f"/v1/jobs/{first}/cancel").json()["status"] == "cancelling"
    assert post(service, request_).json()["id"] != first


def test_what_changes_the_numbers_starts_a_new_profile(service, request_, adapter):
    other_set = service.client.post("/v1/prompt-sets", json={"name": "x", "content": "one\ntwo\n"}).json()
    ids = {post(service, request_).json()["id"]}
    changes = [
        {"seed": 1},
        {"rewards": ["clipscore"]},
        {"adapter": adapter},
        {"estimator": {"levels": 5}},
        {"estimator": {"alpha": 1.0}},
        {"estimator": {"prompts": 47}},
        {"estimator": {"advantage_clip": 4.0}},
        {"estimator": {"cleanup": "isotonic"}},
        {"estimator": {"anchor": True}},
        {"prompt_set": other_set["id"], "rewards": ["clipscore"]},
    ]
    for change in changes:
        answer = post(service, request_ | change)
        assert (answer.status_code, answer.json()["id"] not in ids) == (202, True), change
        ids.add(answer.json()["id"])


def test_other_weights_start_a_new_profile(service, request_):
    first = post(service, request_).json()["id"]
    (service.context.settings.home / "weights" / "model.safetensors").write_bytes(b"trained again")
    assert post(service, request_).json()["id"] != first


def test_names_spellings_and_the_number_of_workers_change_nothing(service, request_):
    first = post(service, request_).json()["id"]
    same_set = service.client.post("/v1/prompt-sets", json={"name": "again", "content": PROMPTS}).json()
    same = [
        {"rewards": ["ocr", "clipscore"]},
        {"prompt_set": same_set["id"]},
        {"estimator": {"alpha": 2, "kind": "self_tilted"}},
        {"shards": 4},
        {"prompt_set_sha256": same_set["sha256"]},
    ]
    for change in same:
        answer = post(service, request_ | change)
        assert (answer.status_code, answer.json()["id"]) == (200, first), change


def test_another_workspaces_profile_is_not_the_answer(service, request_):
    body = request_ | {"prompt_set": "pset_miniature_train"}
    first = post(service, body).json()["id"]
    ended(service, first)
    theirs = post(service, body, **service.as_role("stranger"))
    assert (theirs.status_code, theirs.json()["id"] != first) == (202, True)


def test_a_profile_that_a_training_measured_is_not_the_answer(service, request_, training):
    """Its model was the training's, with an adapter that no request can name."""
    parent = service.client.post("/v1/trainings", json=training).json()["id"]
    with service.write() as session, session.begin():
        job = jobs.get(session, parent)
        jobs.create_measured(session, job, kind="profile", request={}, config=request_, cost={}, warnings=[])
    assert post(service, request_).status_code == 202


def test_an_idempotency_key_keeps_its_first_answer(service, request_):
    key = {"Idempotency-Key": "one"}
    first = post(service, request_, **key)
    ended(service, first.json()["id"])
    repeat = post(service, request_, **key)
    assert (repeat.status_code, repeat.json()) == (202, first.json())
    assert repeat.headers["idempotency-replayed"] == "true"
    other = {"Idempotency-Key": "two"}
    reused = post(service, request_, **other)
    assert (reused.status_code, reused.json()["reused"]) == (200, True)
    replayed = post(service, request_, **other)
    assert (replayed.status_code, replayed.json()) == (200, reused.json())
    assert post(service, request_ | {"reuse": False}, **other).status_code == 409


def test_the_estimate_of_a_reused_profile_is_zero(service, request_):
    def estimate(**change):
        return service.client.post("/v1/profiles/estimate", json=request_ | change).json()

    assert estimate()["model_evaluations"] > 0
    job_id = post(service, request_).json()["id"]
    assert estimate()["basis"] == f"profile {job_id} is being measured already"
    ended(service, job_id)
    assert estimate() == {
        "model_evaluations": 0,
        "reward_calls": 0,
        "proposal_images": 0,
        "device_seconds": {"low": 0.0, "high": 0.0},
        "basis": f"stored profile {job_id}",
    }
    assert estimate(reuse=False)["model_evaluations"] > 0


@pytest.mark.parametrize("shards", [0, 65, 1.5, "2"])
def test_shards_are_bounded(service, request_, shards, job_count):
    answer = post(service, request_ | {"shards": shards})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["body", "shards"]
    assert job_count() == 0


def test_curves_of_a_reused_profile_come_along(service, request_, measured_profile):
    """The answer is the whole profile, as GET gives it."""
    job_id = post(service, request_).json()["id"]
    claim = claimed(service, job_id)
    with service.write() as session, session.begin():
        stored = profiles.get(session, measured_profile).extra
        profiles.create(session, job_id, stored)
        attempts.finish(session, claim, "succeeded")
    answer = post(service, request_).json()
    assert answer.pop("reused") is True
    assert answer == service.client.get(f"/v1/profiles/{job_id}").json()
    assert answer["curves"]["ocr"]["total"] == curve(0.8).total
