from __future__ import annotations

import pytest

from recast_engine.config import EvaluationConfig, load
from store.repositories import artifacts, attempts, evaluations

HTML = b"<!doctype html><title>Report</title>"


@pytest.fixture
def request_(prompt_set, adapter):
    return {
        "subjects": [{"label": "base", "base_model": "miniature"}, {"label": "tuned", "adapter": adapter}],
        "baseline": "base",
        "rewards": ["clipscore", "ocr", "hpsv2", "pickscore"],
        "prompt_set": prompt_set,
        "images_per_prompt": 2,
        "seeds": [0, 1, 2],
        "steps": 5,
        "objective": {"text_accuracy": 1, "prompt_fidelity": 3},
    }


def test_the_model_and_the_objective_are_filled_in(service, request_):
    answer = service.client.post("/v1/evaluations", json=request_)
    assert answer.status_code == 202, answer.text
    assert service.published.messages == [("evaluation", answer.json()["id"])]
    config = service.client.get(f"/v1/evaluations/{answer.json()['id']}").json()["config"]
    assert (config["model"], config["objective"]) == ("miniature", {"clipscore": 0.75, "ocr": 0.25})
    assert load(EvaluationConfig, config).prompt_set_sha256 is not None


def test_the_report_as_data_and_as_html(service, request_):
    job = service.client.post("/v1/evaluations", json=request_).json()["id"]
    early = service.client.get(f"/v1/evaluations/{job}/report")
    assert (early.status_code, early.json()["type"]) == (409, "urn:recast:problem:not-ready")
    key = f"jobs/{job}/1/report/report.html"
    stored = service.context.artifacts.put_bytes(key, HTML)
    with service.write() as session, session.begin():
        held = attempts.claim(session, job, "worker", 60)
        evaluations.create(session, job, {"verdict": "no difference found", "metrics": {}})
        artifacts.create(
            session, job_id=job, attempt=1, kind="report", name="report.html", key=key,
            bytes=stored.bytes, sha256=stored.sha256, step=None, meta={},
        )  # fmt: skip
        attempts.finish(session, held, "succeeded", result={"verdict": "no difference found"})
    view = service.client.get(f"/v1/evaluations/{job}").json()
    assert view["report"] == {"verdict": "no difference found", "metrics": {}}
    assert view["result"] == {"verdict": "no difference found"}
    page = service.client.get(f"/v1/evaluations/{job}/report")
    assert (page.content, page.headers["content-type"]) == (HTML, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"].startswith("sandbox")
    assert page.headers["x-content-type-options"] == "nosniff"


def test_the_estimate_is_exact(client, request_, job_count):
    before = job_count()
    estimate = client.post("/v1/evaluations/estimate", json=request_).json()
    # 2 subjects, 4 prompts, 2 images of each of 3 seeds: 48 images of 5 steps.
    # ocr applies to 1 prompt of 4, the other three rewards to all: 12 * (4 + 1 + 4 + 4) calls.
    assert (estimate["model_evaluations"], estimate["reward_calls"]) == (240, 156)
    fewer = client.post("/v1/evaluations/estimate", json=request_ | {"max_prompts": 2}).json()
    # Prompts 0 and 2 of the set, evenly taken; the text prompt is number 2.
    assert (fewer["model_evaluations"], fewer["reward_calls"]) == (120, 12 * (2 + 1 + 2 + 2))
    assert job_count() == before
