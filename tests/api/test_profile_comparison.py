from __future__ import annotations

import numpy as np
import pytest

from recast_engine.profiling import Profile
from store.repositories import attempts, jobs, profiles
from tests.api.conftest import LEVELS, curve


def store_profile(service, curves, seed, prompt_set="pset_x"):
    """Id of a succeeded profile of the miniature."""
    profile = Profile(tuple(curves), LEVELS, curves, (), {}, {"seed": seed, "alpha": 2.0})
    with service.write() as session, session.begin():
        config = {"model": "miniature", "prompt_set": prompt_set, "rewards": list(curves)}
        job = jobs.create(
            session, workspace_id=service.workspace_id, kind="profile", request={}, config=config
        )
        claim = attempts.claim(session, job.id, "worker", 60)
        profiles.create(session, job.id, profile.to_dict())
        attempts.finish(session, claim, "succeeded", result={})
    return job.id


def test_two_profiles_compared_by_a_viewer(service, measured_profile):
    other = store_profile(service, {"ocr": curve(0.2), "hpsv2": curve(0.3), "clipscore": curve(0.4)}, 1)
    answer = service.client.post(
        "/v1/profiles/compare",
        json={"profiles": [measured_profile, other]},
        headers=service.as_role("viewer"),
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["profiles"] == [measured_profile, other]
    assert (found["steps"], found["shift"], found["temperature"]) == (10, 1.0, 1.0)
    assert (found["left_out"], found["budgets"]) == (["hpsv2"], {"clipscore": 0.5, "ocr": 0.5})
    # both are linear in sigma, so shapes agree although ocr's total fell from 0.8 to 0.2
    assert found["rewards"]["ocr"]["change"]["value"] == pytest.approx(-0.6)
    assert "fell from 0.8000 to 0.2000" in found["rewards"]["ocr"]["verdict"]
    assert found["largest_weight_change"] == pytest.approx(0.0, abs=1e-9)
    assert {entry["setting"]: (entry["a"], entry["b"]) for entry in found["differences"]} == {
        "seed": (None, 1)
    }


def test_budgets_steps_and_temperature_reach_the_allocations(client, service):
    even, bent = curve(0.4), curve(0.4)
    bent = type(bent)(**{**vars(bent), "divergence": (0.4, 0.4, 0.4, 0.0, 0.0)})
    a = store_profile(service, {"ocr": even, "clipscore": even}, 0)
    b = store_profile(service, {"ocr": bent, "clipscore": even}, 0)
    body = {"profiles": [a, b], "budgets": {"text_accuracy": 1, "prompt_fidelity": 3}, "steps": 4}
    found = client.post("/v1/profiles/compare", json=body).json()
    assert found["budgets"] == {"ocr": 0.25, "clipscore": 0.75}
    matrices = [
        np.array(
            client.post(
                "/v1/allocations/preview",
                json={"profile": name, "budgets": body["budgets"], "steps": 4},
            ).json()["matrix"]
        )
        for name in (a, b)
    ]
    change = np.abs(matrices[1] - matrices[0])
    assert found["largest_weight_change"] == pytest.approx(change.max())
    assert found["mean_weight_change"] == pytest.approx(change.mean())
    assert found["rewards"]["ocr"]["at_step"] == change[0].argmax() + 1
    hot = client.post("/v1/profiles/compare", json=body | {"temperature": 1e6}).json()
    assert hot["largest_weight_change"] < 1e-5


def test_what_cannot_be_compared(client, service, prompt_set, measured_profile):
    other = store_profile(service, {"hpsv2": curve(0.2)}, 0)
    answer = client.post("/v1/profiles/compare", json={"profiles": [measured_profile, other]})
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, ["body", "profiles"])
    assert "no common reward" in answer.json()["errors"][0]["msg"]
    same = {"profiles": [measured_profile, measured_profile]}
    answer = client.post("/v1/profiles/compare", json=same | {"budgets": {"hpsv2": 1}})
    assert answer.json()["errors"][0]["loc"] == ["body", "budgets"]
    answer = client.post("/v1/profiles/compare", json={"profiles": [measured_profile]})
    assert answer.status_code == 422
    body = {"model": "miniature", "prompt_set": prompt_set, "rewards": ["ocr"]}
    unfinished = client.post("/v1/profiles", json=body).json()["id"]
    answer = client.post("/v1/profiles/compare", json={"profiles": [measured_profile, unfinished]})
    assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, ["body", "profiles", 1])
    for headers, profiles_ in ((service.as_role("stranger"), same["profiles"]), ({}, ["prof_0", "prof_1"])):
        answer = client.post("/v1/profiles/compare", json={"profiles": profiles_}, headers=headers)
        assert answer.status_code == 422
        places = [error["loc"] for error in answer.json()["errors"]]
        assert places == [["body", "profiles", 0], ["body", "profiles", 1]]
