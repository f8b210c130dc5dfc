from __future__ import annotations

import numpy as np
import pytest

from api.profiles.estimates import profile_work
from recast_engine.backbones.catalogue import flow_sigmas
from recast_engine.config import EstimatorConfig
from recast_engine.prompts import Prompt


@pytest.fixture
def request_(prompt_set):
    return {"model": "miniature", "prompt_set": prompt_set, "rewards": ["clipscore", "ocr"]}


def test_a_profile_is_a_queued_job_with_a_resolved_config(service, request_):
    answer = service.client.post("/v1/profiles", json=request_)
    job = answer.json()
    assert (answer.status_code, job["kind"], job["status"]) == (202, "profile", "queued")
    assert answer.headers["location"] == f"/v1/profiles/{job['id']}"
    assert service.published.messages == [("profile", job["id"])]
    view = service.client.get(f"/v1/profiles/{job['id']}").json()
    assert (view["levels"], view["curves"], view["warnings"]) == (None, None, [])
    assert view["config"]["rewards"] == ["clipscore", "ocr"]
    assert view["config"]["estimator"]["levels"] == EstimatorConfig().levels
    prompt_set = service.client.get(f"/v1/prompt-sets/{request_['prompt_set']}").json()
    assert view["config"]["prompt_set_sha256"] == prompt_set["sha256"]


def test_a_measured_profile_shows_its_curves(client, measured_profile):
    view = client.get(f"/v1/profiles/{measured_profile}").json()
    assert view["status"] == "succeeded"
    assert view["levels"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    curve = view["curves"]["ocr"]
    assert curve["divergence"] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    assert set(curve) >= {"divergence", "divergence_raw", "ci_low", "ci_high", "total", "max_violation_se"}
    assert view["warnings"] == ["few prompts"]
    assert view["cost"]["model_evaluations"] == 100


def test_gains_resample_to_any_steps_and_shift(client, measured_profile):
    for steps, shift in ((1, None), (4, None), (25, 3.0), (1000, 1.0)):
        params = {"steps": steps} | ({"shift": shift} if shift else {})
        gains = client.get(f"/v1/profiles/{measured_profile}/gains", params=params).json()
        sigmas = flow_sigmas(steps, shift or 1.0)
        assert (gains["steps"], gains["sigmas"]) == (steps, sigmas.tolist())
        np.testing.assert_allclose(gains["gains"]["ocr"], -0.8 * np.diff(sigmas), atol=1e-12)
        assert sum(gains["gains"]["clipscore"]) == pytest.approx(0.4)


def test_gains_of_a_profile_that_is_not_measured(client, request_):
    job = client.post("/v1/profiles", json=request_).json()["id"]
    answer = client.get(f"/v1/profiles/{job}/gains?steps=4")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:recast:problem:not-ready")


def test_an_adapter_of_the_same_base_model(client, request_, adapter):
    answer = client.post("/v1/profiles", json=request_ | {"adapter": adapter})
    assert answer.status_code == 202


def test_the_estimate_is_counted_and_starts_nothing(service, request_, job_count):
    sizes = {"levels": 5, "prompts": 3, "images_per_prompt": 2, "rollouts": 2, "sampling_steps": 8}
    body = request_ | {"estimator": sizes | {"anchor": True}}
    estimate = service.client.post("/v1/profiles/estimate", json=body, headers=service.as_role("viewer"))
    # Levels 1 - (3/4)^1.5, 1 - (1/2)^1.5, 1 - (1/4)^1.5 = 0.350, 0.646, 0.875, and 1: 3 + 6 + 7 + 8 steps.
    # With the anchor, 6 images: 6 * (8 + 2 * 24) evaluations; 6 * (1 + 2 * 4) scored, 5 rewards, 4 prompts.
    assert estimate.json() == {
        "model_evaluations": 336,
        "reward_calls": 68,
        "proposal_images": 0,
        "device_seconds": None,
        "basis": estimate.json()["basis"],
    }
    assert "no past profile" in estimate.json()["basis"]
    estimate = service.client.post("/v1/profiles/estimate", json=request_ | {"estimator": sizes})
    assert estimate.json()["model_evaluations"] == 6 * (8 + 2 * 16)  # nothing from pure noise
    assert job_count() == 0


def test_past_jobs_tell_how_fast_they_are_here(client, request_, measured_profile):
    estimate = client.post("/v1/profiles/estimate", json=request_).json()
    seconds = estimate["model_evaluations"] * 2.0 / 100
    assert estimate["device_seconds"] == {"low": pytest.approx(seconds), "high": pytest.approx(seconds)}
    assert "throughput of 1 past profile job with" in estimate["basis"]


def test_a_profile_takes_no_more_prompts_than_there_are():
    config = EstimatorConfig(levels=3, sampling_steps=2, prompts=100, images_per_prompt=2, rollouts=1)
    work = profile_work(config, ["clipscore"], [Prompt("a")] * 5)
    assert (work.model_evaluations, work.reward_calls) == (10 * (2 + 2), 20)


def test_an_adaptive_profile_is_estimated_by_its_budget():
    fields = {"levels": 3, "sampling_steps": 2, "prompts": 5, "images_per_prompt": 2}
    budget = EstimatorConfig(**fields, adaptive={"max_model_evaluations": 600})
    work = profile_work(budget, ["clipscore"], [Prompt("a")] * 5)
    assert (work.model_evaluations, work.reward_calls) == (600, 300)
    external = EstimatorConfig(**fields, kind="external_proposal", proposals={"source": "openai"})
    assert profile_work(external, ["clipscore"], [Prompt("a")] * 5).reward_calls == 10 * (1 + 1 + 1)
