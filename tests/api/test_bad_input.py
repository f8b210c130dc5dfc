"""What API.md lists as bad input: 4xx problem+json naming the field, and nothing started."""

from __future__ import annotations

import base64
import copy
import json

import pytest

from tests.api.conftest import SECRETS

GAINS = {"gains": {"ocr": [1.0, 2.0], "hpsv2": [2.0, 1.0]}, "budgets": {"ocr": 1.0, "hpsv2": 1.0}}


ADMIN = {"Authorization": f"Bearer {SECRETS['admin']}"}


def merged(body, change):
    body = copy.deepcopy(body)
    for path, value in change.items():
        target = body
        *parents, last = path.split("/")
        for part in parents:
            target = target[int(part)] if part.isdecimal() else target.setdefault(part, {})
        target[int(last) if last.isdecimal() else last] = value
    return body


def refused(answer, status=422):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["type"].startswith("urn:recast:problem:")
    assert problem["instance"] == answer.request.url.path
    return problem


def fields(problem):
    return {".".join(str(part) for part in item["loc"]) for item in problem["errors"]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nonsense": 1}, "body.nonsense"),
        ({"sampling/nonsense": 1}, "body.sampling.nonsense"),
        ({"model": "nothing"}, "body.model"),
        ({"model": "sd3.5-medium"}, "body.model"),
        ({"prompt_set": "pset_nothing"}, "body.prompt_set"),
        ({"adapter": "adapt_nothing"}, "body.adapter"),
        ({"stages": []}, "body.stages"),
        ({"stages/0/epochs": 0}, "body.stages.0.epochs"),
        ({"stages/0/epochs": "2"}, "body.stages.0.epochs"),
        ({"stages/0/epochs": 1.5}, "body.stages.0.epochs"),
        ({"stages/0/budgets": {}}, "body.stages.0.budgets"),
        ({"stages/0/budgets": {"ocr": -1}}, "body.stages.0.budgets.ocr"),
        ({"stages/0/budgets": {"ocr": float("nan")}}, "body.stages.0.budgets.ocr"),
        ({"stages/0/budgets": {"ocr": float("inf")}}, "body.stages.0.budgets.ocr"),
        ({"stages/0/budgets": {"ocr": 0, "clipscore": 0}}, "body.stages.0.budgets"),
        ({"stages/0/budgets": {"beauty": 1}}, "body.stages.0.budgets.beauty"),
        ({"stages/0/budgets": {"aesthetic": 1}}, "body.stages.0.budgets.aesthetic"),
        ({"stages/0/budgets": {"ocr": True}}, "body.stages.0.budgets.ocr"),
        ({"stages/0/allocation": "alloc_nothing"}, "body.stages.0.allocation"),
        ({"stages/0/allocation": {"method": "magic"}}, "body.stages.0.allocation.method"),
        ({"stages/0/allocation": {"profile": "prof_nothing"}}, "body.stages.0.allocation.profile"),
        ({"stages/0/allocation": {"temperature": 0}}, "body.stages.0.allocation.temperature"),
        ({"sampling/steps": 0}, "body.sampling.steps"),
        ({"sampling/steps": 1001}, "body.sampling.steps"),
        ({"sampling/shift": float("nan")}, "body.sampling.shift"),
        ({"lora": {"targets": ["to_q", "nowhere"]}}, "body.lora.targets.1"),
        ({"lora": {"targets": []}}, "body.lora.targets"),
        ({"collapse": {"held_out": "nothing"}}, "body.collapse.held_out"),
        ({"collapse": {"held_out": "ocr"}}, "body.collapse.held_out"),
        ({"retention": {"last": 0}}, "body.retention.last"),
        ({"devices": 0}, "body.devices"),
        ({"devices": -2}, "body.devices"),
        ({"devices": 65}, "body.devices"),
        ({"devices": 2.5}, "body.devices"),
        ({"devices": "2"}, "body.devices"),
        ({"devices": True}, "body.devices"),
        ({"devices": None}, "body.devices"),
        ({"devices": 3, "optimizer": {"batch_size": 2}}, "body.devices"),
        ({"devices": 3, "sampling/prompts_per_epoch": 2}, "body.devices"),
        ({"lora": {"rank": 0}}, "body.lora.rank"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "body.optimizer.betas.1"),
        ({"seed": -1}, "body.seed"),
        ({"prompt_set_sha256": "0" * 64}, "body.prompt_set_sha256"),
    ],
)
def test_a_training_that_cannot_work_names_the_field(client, training, job_count, change, field):
    content = json.dumps(merged(training, change))
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/trainings", "/v1/trainings/estimate"):
        problem = refused(client.post(path, content=content, headers=headers))
        assert field in fields(problem), problem
    assert job_count() == 0


def test_devices_without_work_are_refused_with_the_remedy(client, training):
    """Whatever else the training asks for: a running profile is kept on any number of devices."""
    refreshed = {"stages/0/allocation": {"refresh": "on_drift"}, "devices": 4}
    work = {"sampling/prompts_per_epoch": 4, "optimizer": {"batch_size": 4}}
    assert client.post("/v1/trainings/estimate", json=merged(training, refreshed | work)).status_code == 200
    few = merged(training, refreshed | work | {"sampling/prompts_per_epoch": 3})
    (error,) = refused(client.post("/v1/trainings", json=few))["errors"]
    assert error["loc"] == ["body", "devices"]
    assert "ask for at most 3, or raise sampling.prompts_per_epoch to 4" in error["msg"]
    problem = refused(
        client.post("/v1/trainings", json=merged(training, {"devices": 4, "sampling/steps": 0}))
    )
    assert fields(problem) == {"body.sampling.steps"}


def test_all_offending_fields_are_named_at_once(client, training, job_count):
    change = {"seed": -1, "sampling/steps": 0, "stages/0/budgets/ocr": -2, "nonsense": 1}
    problem = refused(client.post("/v1/trainings", json=merged(training, change)))
    assert fields(problem) == {
        "body.seed",
        "body.sampling.steps",
        "body.stages.0.budgets.ocr",
        "body.nonsense",
    }
    change = {
        "prompt_set": "pset_nothing",
        "adapter": "adapt_nothing",
        "stages/0/budgets": {"beauty": 1, "fame": 1},
        "lora": {"targets": ["nowhere"]},
    }
    problem = refused(client.post("/v1/trainings", json=merged(training, change)))
    assert fields(problem) == {
        "body.prompt_set",
        "body.adapter",
        "body.stages.0.budgets.beauty",
        "body.stages.0.budgets.fame",
        "body.lora.targets.0",
    }
    assert job_count() == 0


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ([{"class": "circel", "count": 1}], "(prompt 2, include[0].class); it knows circle, ...: upload"),
        ([{"class": "circle", "count": 1, "color": "mauve"}], "(prompt 2, include[0].color)"),
        (
            [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}],
            "'dog' in this model's images (prompt 2, include[0].class, and 1 more like it); "
            "it knows circle, square, triangle: upload",
        ),
    ],
)
def test_objects_that_no_detector_of_the_model_knows_are_refused(
    client, training, job_count, include, message
):
    """They would score 0 whatever is drawn; a typo must not cost a reward."""
    known = {"prompt": "a red circle", "include": [{"class": "circle", "count": 1, "color": "red"}]}
    lines = "".join(json.dumps(line) + "\n" for line in (known, {"prompt": "another", "include": include}))
    upload = {"name": "typo", "content": lines}
    prompt_set = {"prompt_set": client.post("/v1/prompt-sets", json=upload).json()["id"]}
    profile = {"model": "miniature", "rewards": ["geneval"], **prompt_set}
    problem = refused(client.post("/v1/profiles", json=profile))
    assert fields(problem) == {"body.rewards.0"}
    assert message in problem["errors"][0]["msg"]
    changes = {**prompt_set, "stages/0/budgets": {"geneval": 1.0}, "stages/0/allocation": {}}
    problem = refused(client.post("/v1/trainings", json=merged(training, changes)))
    assert fields(problem) == {"body.stages.0.budgets"}
    subjects = [{"label": label, "base_model": "miniature"} for label in "ab"]
    evaluation = {"subjects": subjects, "baseline": "a", "rewards": ["clipscore", "geneval"], **prompt_set}
    assert fields(refused(client.post("/v1/evaluations", json=evaluation))) == {"body.rewards.1"}
    assert job_count() == 0


def test_a_reward_without_its_metadata_is_refused(client, training, job_count):
    plain = client.post("/v1/prompt-sets", json={"name": "plain", "content": "a red circle\n"}).json()["id"]
    problem = refused(client.post("/v1/trainings", json=training | {"prompt_set": plain}))
    assert fields(problem) == {"body.stages.0.budgets"}
    message = problem["errors"][0]["msg"]
    assert "'ocr' needs prompts with 'text' (or a quoted span)" in message
    assert "put the words to spell in quotes" in message  # the remedy
    profile = {"model": "miniature", "prompt_set": plain, "rewards": ["clipscore", "geneval"]}
    problem = refused(client.post("/v1/profiles", json=profile))
    assert fields(problem) == {"body.rewards.1"}
    assert "use a prompt set whose JSON lines have 'include'" in problem["errors"][0]["msg"]
    silenced = merged(training, {"prompt_set": plain, "stages/0/budgets/ocr": 0})
    assert client.post("/v1/trainings/estimate", json=silenced).status_code == 200
    assert job_count() == 0


def external(**proposals):
    """Four prompts of eight images each."""
    return {"estimator": {"kind": "external_proposal", "proposals": proposals}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rewards": []}, "body.rewards"),
        ({"rewards": "ocr"}, "body.rewards"),
        ({"rewards": ["beauty"]}, "body.rewards.0"),
        ({"rewards": ["ocr", "ocr"]}, "body.rewards.1"),
        ({"estimator": {"kind": "external"}}, "body.estimator.kind"),
        ({"estimator": {"kind": "external_proposal"}}, "body.estimator"),
        ({"estimator": {"proposals": {"source": "openai"}}}, "body.estimator"),
        (external(source="midjourney"), "body.estimator.proposals.source"),
        (external(source="openai", api_key="sk-x"), "body.estimator.proposals.api_key"),
        (external(source="openai", base_url="http://10.0.0.1"), "body.estimator.proposals.base_url"),
        (external(source="folder", folder="../x"), "body.estimator.proposals.folder"),
        (external(source="diffusers", model="/etc"), "body.estimator.proposals.model"),
        (external(source="openai", size=32), "body.estimator.proposals.size"),
        (external(source="openai", max_images=31), "body.estimator.proposals.max_images"),
        ({"estimator": {"levels": 2}}, "body.estimator.levels"),
        ({"estimator": {"alpha": float("-inf")}}, "body.estimator.alpha"),
        ({"estimator": {"sampling_steps": 1001}}, "body.estimator.sampling_steps"),
        ({"webhook_url": "http://localhost"}, "body.webhook_url"),
    ],
)
def test_a_profile_that_cannot_work_names_the_field(client, prompt_set, job_count, change, field):
    body = {"model": "miniature", "prompt_set": prompt_set, "rewards": ["ocr"]} | change
    headers = {"Content-Type": "application/json"}
    problem = refused(client.post("/v1/profiles", content=json.dumps(body), headers=headers))
    assert field in fields(problem)
    assert job_count() == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"baseline": "other"}, "body"),
        ({"subjects": []}, "body.subjects"),
        ({"subjects/0": {"label": "base"}}, "body.subjects.0"),
        ({"subjects/0/base_model": "nothing"}, "body.subjects.0.base_model"),
        ({"subjects/0/base_model": "sd3.5-medium"}, "body.subjects.1"),
        ({"subjects/1": {"label": "tuned", "adapter": "adapt_nothing"}}, "body.subjects.1.adapter"),
        ({"subjects/1": {"label": "base", "base_model": "miniature"}}, "body"),
        ({"model": "sd3.5-medium"}, "body.subjects.0"),
        ({"rewards": ["beauty"]}, "body.rewards.0"),
        ({"objective": {"ocr": 1}}, "body.objective"),
        ({"objective": {"beauty": 1}}, "body.objective.beauty"),
        ({"steps": 0}, "body.steps"),
        ({"images_per_prompt": 0}, "body.images_per_prompt"),
        ({"judge": {"kind": "pairwise"}}, "body.judge"),
    ],
)
def test_an_evaluation_that_cannot_work_names_the_field(client, prompt_set, job_count, change, field):
    body = {
        "subjects": [
            {"label": "base", "base_model": "miniature"},
            {"label": "again", "base_model": "miniature"},
        ],
        "baseline": "base",
        "rewards": ["clipscore"],
        "prompt_set": prompt_set,
    }
    problem = refused(client.post("/v1/evaluations", json=merged(body, change)))
    assert field in fields(problem), problem
    assert job_count() == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gains": {"ocr": [1.0, float("nan")], "hpsv2": [2.0, 1.0]}}, "body.gains.ocr.1"),
        ({"gains": {"ocr": [1.0, -1.0], "hpsv2": [2.0, 1.0]}}, "body.gains.ocr.1"),
        ({"gains": {"ocr": [1.0], "hpsv2": [2.0, 1.0]}}, "body.gains"),
        ({"gains": {"ocr": [], "hpsv2": []}}, "body.gains.ocr"),
        ({"gains": {"=cmd()": [1.0, 1.0]}, "budgets": {"=cmd()": 1}}, "body.gains.=cmd().[key]"),
        ({"steps": 3}, "body.steps"),
        ({"steps": 0}, "body.steps"),
        ({"steps": 1001}, "body.steps"),
        ({"budgets": {"ocr": -1, "hpsv2": 1}}, "body.budgets.ocr"),
        ({"budgets": {"ocr": 0, "hpsv2": 0}}, "body.budgets"),
        ({"budgets": {"ocr": 1}}, "body.gains.hpsv2"),
        ({"budgets": {"ocr": 1, "hpsv2": 1, "beauty": 1}}, "body.budgets.beauty"),
        ({"temperature": 0}, "body.temperature"),
        ({"temperature": 1e-300}, "body"),
        ({"method": "sinkhorn"}, "body.method"),
        ({"profile": "prof_x"}, "body"),
        ({"shift": 3.0}, "body"),
        ({"tolerance": 1}, "body.tolerance"),
    ],
)
def test_an_allocation_that_cannot_work_names_the_field(client, change, field):
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/allocations", "/v1/allocations/preview"):
        problem = refused(client.post(path, content=json.dumps(GAINS | change), headers=headers))
        assert field in fields(problem), problem
    assert client.get("/v1/allocations").json()["data"] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "a\\u0000b"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"seed": 1' + b"0" * 10_000 + b"}",
        b"NaN",
    ],
)
def test_malformed_json_is_refused(client, job_count, content):
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/trainings", "/v1/profiles", "/v1/evaluations", "/v1/allocations", "/v1/prompt-sets"):
        problem = refused(client.post(path, content=content, headers=headers))
        assert problem["errors"][0]["loc"][0] == "body"
        assert len(json.dumps(problem)) < 5000  # the input is not echoed back
    assert job_count() == 0


def test_other_content_types_are_refused(client, training, job_count):
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post(
            "/v1/trainings", content=json.dumps(training), headers={"Content-Type": media_type}
        )
        refused(answer, 415)
    assert job_count() == 0


def test_a_body_over_the_limit_is_refused(client, settings, training, job_count):
    content = json.dumps(training | {"padding": "x" * settings.max_body_bytes}).encode()
    headers = {"Content-Type": "application/json"}
    refused(client.post("/v1/trainings", content=content, headers=headers), 413)

    def chunks():
        for start in range(0, len(content), 65536):
            yield content[start : start + 65536]

    refused(client.post("/v1/trainings", content=chunks(), headers=headers), 413)
    refused(client.post("/v1/trainings", content=b"{}", headers=headers | {"Content-Length": "x"}), 413)
    assert job_count() == 0


def test_bad_queries_are_refused(client):
    for path in (
        "/v1/jobs?limit=0",
        "/v1/jobs?limit=101",
        "/v1/jobs?status=sleeping",
        "/v1/jobs?kind=study",
        "/v1/jobs?cursor=never-handed-out",
        "/v1/jobs?cursor=%00",
        "/v1/jobs/a%00b",
        "/v1/rewards?model=nothing",
        "/v1/profiles/prof_x/gains?steps=0",
        "/v1/profiles/prof_x/gains?steps=1001",
        "/v1/profiles/prof_x/gains?steps=4&shift=nan",
        "/v1/profiles/prof_x/gains?steps=4&shift=0.001",
        "/v1/adapters/adapt_x/download?format=pickle",
    ):
        assert refused(client.get(path))["errors"]


def test_a_cursor_from_elsewhere_names_the_parameter_and_the_remedy(client):
    (error,) = refused(client.get("/v1/jobs?cursor=abc"))["errors"]
    assert error["loc"] == ["query", "cursor"]
    assert "`next_cursor` of the page before" in error["msg"]


def test_unknown_query_parameters_are_named(client):
    problem = refused(client.get("/v1/jobs?staus=failed&limit=5&page=2"))
    assert [error["loc"] for error in problem["errors"]] == [["query", "staus"], ["query", "page"]]
    assert "this call takes kind, status, limit, cursor" in problem["errors"][0]["msg"]
    refused(client.post("/v1/trainings/estimate?dry=1", json={}))
    refused(client.get("/v1/jobs?staus=failed", headers={"Authorization": "Bearer nobody"}), 401)
    headers = {"Content-Type": "text/plain"}
    assert client.post("/v1/prompt-sets?name=x", content="a\n", headers=headers).status_code == 201
    problem = refused(client.post("/v1/prompt-sets?nane=x", content="a\n", headers=headers))
    assert fields(problem) == {"query.nane"}
    assert client.get("/healthz?from=monitor").status_code == 200


def test_fields_are_named_as_the_request_has_them(client, training):
    """Not by the classes that read them."""
    changes = {
        "stages/0/allocation": {"method": "magic", "nonsense": 1, "estimator": {"nonsense": 1}},
        "collapse": 1,
    }
    problem = refused(client.post("/v1/trainings", json=merged(training, changes)))
    assert {(".".join(map(str, error["loc"])), error["msg"]) for error in problem["errors"]} == {
        ("body.stages.0.allocation.method", "Input should be 'recast', 'rowwise' or 'static'"),
        ("body.stages.0.allocation.nonsense", "unknown field"),
        ("body.stages.0.allocation.estimator.nonsense", "unknown field"),
        ("body.collapse", "Input should be an object"),
    }
    problem = refused(client.post("/v1/trainings", json=merged(training, {"stages/0/allocation": 5})))
    assert fields(problem) == {"body.stages.0.allocation"}
    wrong_rule = merged(training, {"stages/0/allocation": {"method": "static", "refresh": "on_drift"}})
    assert fields(refused(client.post("/v1/trainings", json=wrong_rule))) == {"body.stages.0.allocation"}
    problem = refused(client.post("/v1/keys", json={"extra": 1}, headers=ADMIN))
    assert fields(problem) == {"body.name", "body.role", "body.extra"}


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
@pytest.mark.parametrize("kind", ["jobs", "allocations", "adapters", "prompt-sets"])
def test_a_cursor_at_the_end_of_the_calendar_is_refused(client, kind, moment):
    cursor = base64.urlsafe_b64encode(f"{moment}|x".encode()).decode()
    assert refused(client.get(f"/v1/{kind}?cursor={cursor}"))["type"].endswith("invalid-cursor")


@pytest.mark.parametrize(
    ("path", "content", "key"),
    [
        ("/v1/trainings", '{{"seed": 1, {training}, "seed": 2}}', "seed"),
        (
            "/v1/allocations",
            '{{"gains": {{"ocr": [1, 2]}}, "budgets": {{"ocr": 1, "ocr": 2}}, "steps": 2}}',
            "ocr",
        ),
    ],
)
def test_a_key_given_twice_is_refused(client, training, job_count, path, content, key):
    body = json.dumps({name: value for name, value in training.items() if name != "seed"})[1:-1]
    content = content.format(training=body)
    problem = refused(client.post(path, content=content, headers={"Content-Type": "application/json"}))
    assert fields(problem) == {f"body.{key}"}
    assert "twice" in problem["detail"]
    assert job_count() == 0
    assert client.get("/v1/allocations").json()["data"] == []


def test_unknown_paths_and_methods_are_problems(client):
    refused(client.get("/v1/nothing"), 404)
    problem = refused(client.put("/v1/trainings"), 405)
    assert problem["detail"] == "PUT is not served at this path; use GET, POST"
    refused(client.get("/v1/jobs/job_nothing"), 404)
    for kind in ("profiles", "trainings", "evaluations", "allocations", "adapters", "prompt-sets"):
        refused(client.get(f"/v1/{kind}/nothing"), 404)
