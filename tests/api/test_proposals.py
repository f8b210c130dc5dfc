from __future__ import annotations

import json

import pytest

from recast_engine.config import ProposalConfig
from recast_engine.proposals.keys import prompt_key
from store.repositories import artifacts, jobs, proposals, workers

ALL = ["openai", "google", "folder", "diffusers"]


@pytest.fixture
def request_(prompt_set):
    estimator = {
        "kind": "external_proposal",
        "images_per_prompt": 3,
        "proposals": {"source": "openai", "quality": "low"},
    }
    return {"model": "miniature", "prompt_set": prompt_set, "rewards": ["clipscore"], "estimator": estimator}


def beat(service, worker, sources):
    with service.write() as session, session.begin():
        workers.beat(session, worker, ["recast.profile"], sources)


def test_the_resolved_config_names_model_and_size(service, request_):
    beat(service, "one", ALL)
    answer = service.client.post("/v1/profiles", json=request_)
    assert answer.status_code == 202
    resolved = service.client.get(f"/v1/profiles/{answer.json()['id']}").json()["config"]
    source = resolved["estimator"]["proposals"]
    assert (source["model"], source["size"], source["max_images"]) == ("gpt-image-1.5", 1024, 1000)


def test_a_source_that_the_workers_cannot_use_is_refused_with_the_remedy(service, request_, job_count):
    beat(service, "one", ["folder", "diffusers"])
    answer = service.client.post("/v1/profiles", json=request_)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["loc"] == ["body", "estimator", "proposals", "source"]
    assert "OPENAI_API_KEY" in error["msg"]
    assert "recast[proposals]" in error["msg"]
    assert job_count() == 0
    beat(service, "one", ALL)
    assert service.client.post("/v1/profiles", json=request_).status_code == 202


def test_without_a_worker_to_ask_the_job_is_queued(service, request_):
    assert service.client.post("/v1/profiles", json=request_).status_code == 202


def test_the_catalogue_tells_what_the_workers_told(service):
    def listed():
        data = service.client.get("/v1/proposal-sources", headers=service.as_role("viewer")).json()["data"]
        return {item["id"]: (item["available"], item["reason"]) for item in data}

    assert listed() == dict.fromkeys(ALL, (None, None))
    beat(service, "one", ["google", "folder", "diffusers"])
    shown = listed()
    assert shown["google"] == shown["folder"] == (True, None)
    available, reason = shown["openai"]
    assert available is False
    assert "set OPENAI_API_KEY in their environment" in reason


def test_the_estimate_counts_the_images_that_are_still_to_be_bought(service, request_):
    def estimated(body):
        return service.client.post("/v1/profiles/estimate", json=body).json()["proposal_images"]

    assert estimated(request_) == 4 * 3
    config = ProposalConfig(source="openai", quality="low")
    with service.write() as session, session.begin():
        job = jobs.create(
            session, workspace_id=service.workspace_id, kind="profile", request={}, config={"model": "m"}
        )
        for number in (0, 1, 5):
            artifact = artifacts.create(
                session,
                job_id=job.id,
                attempt=1,
                kind="proposal",
                name=f"{number}.png",
                key=f"jobs/{job.id}/1/proposal/{number}.png",
                bytes=1,
                sha256="0" * 64,
                step=None,
                meta={},
            )
            proposals.remember(
                session,
                workspace_id=service.workspace_id,
                prompt_key=prompt_key(config, "a blue square"),
                number=number,
                artifact=artifact,
            )
    assert estimated(request_) == 4 * 3 - 2
    request_["estimator"]["proposals"] = {"source": "folder", "folder": "mine"}
    assert estimated(request_) == 0


def test_a_training_measures_on_its_own_images(service, training, job_count):
    training["stages"][0]["allocation"] = {
        "method": "recast",
        "estimator": {"kind": "external_proposal", "proposals": {"source": "openai"}},
    }
    answer = service.client.post("/v1/trainings", json=training)
    assert answer.status_code == 422
    assert "measure a profile with external proposals first" in json.dumps(answer.json()["errors"])
    assert job_count() == 0


def test_patience_and_budget_of_buying_do_not_make_another_profile(service, request_):
    first = service.client.post("/v1/profiles", json=request_).json()["id"]
    for fields, same in (
        ({"concurrency": 8}, True),
        ({"max_images": 500, "attempts": 2, "request_seconds": 60, "deadline_seconds": 600}, True),
        ({"quality": "high"}, False),
        ({"seed": 1}, False),
        ({"model": "another"}, False),
        ({"source": "google"}, False),
    ):
        proposals = request_["estimator"]["proposals"] | fields
        if "source" in fields:
            del proposals["quality"]
        body = request_ | {"estimator": request_["estimator"] | {"proposals": proposals}}
        answer = service.client.post("/v1/profiles", json=body)
        assert (answer.status_code, answer.json()["id"] == first) == (
            (200, True) if same else (202, False)
        ), fields


def test_a_folders_images_may_have_changed_so_it_is_measured_again(service, request_):
    proposals = {"source": "folder", "folder": "bought"}
    body = request_ | {"estimator": request_["estimator"] | {"proposals": proposals}}
    answers = [service.client.post("/v1/profiles", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202], answers[0].json()
    assert answers[0].json()["id"] != answers[1].json()["id"]
