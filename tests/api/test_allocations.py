from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from recast_engine.backbones.catalogue import flow_sigmas

GAINS = {"ocr": [0.1, 0.5, 0.2, 0.2], "hpsv2": [0.6, 0.1, 0.1, 0.2], "pickscore": [0.2, 0.2, 0.3, 0.3]}


def make(client, **body):
    answer = client.post("/v1/allocations", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_from_gains_meets_both_constraints_and_preserves_the_budgets(client):
    made = make(client, gains=GAINS, budgets={"ocr": 1, "hpsv2": 2, "pickscore": 1})
    matrix = np.array(made["matrix"])
    assert (made["rewards"], made["steps"], matrix.shape) == (list(GAINS), 4, (3, 4))
    assert made["budgets"] == {"ocr": 0.25, "hpsv2": 0.5, "pickscore": 0.25}
    np.testing.assert_allclose(matrix.sum(axis=1), 4 * np.array([0.25, 0.5, 0.25]), atol=1e-9)
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0, atol=1e-9)
    assert made["id"].startswith("alloc_")
    assert set(made["diagnostics"]) == {
        "row_residual", "column_residual", "iterations", "kl_from_static", "demand", "demand_ratio",
    }  # fmt: skip
    assert client.get(f"/v1/allocations/{made['id']}").json() == made


def test_an_objective_is_shared_by_its_rows(client):
    made = make(client, gains=GAINS, budgets={"text_accuracy": 1, "appearance": 1})
    assert made["budgets"] == {"ocr": 0.5, "hpsv2": 0.25, "pickscore": 0.25}


def test_names_of_raw_gains_are_free(client):
    made = make(client, gains={"my reward": [1, 2], "B/2": [2, 1]}, budgets={"my reward": 3, "B/2": 1})
    assert made["budgets"] == {"my reward": 0.75, "B/2": 0.25}


def test_static_is_the_budget_at_every_step(client):
    made = make(client, gains=GAINS, budgets={"ocr": 1, "hpsv2": 2, "pickscore": 0}, method="static")
    assert made["matrix"] == [[1 / 3] * 4, [2 / 3] * 4, [0.0] * 4]


def test_a_preview_is_the_same_and_is_stored_nowhere(service):
    body = {"gains": GAINS, "budgets": {"ocr": 1, "appearance": 1}, "temperature": 0.5}
    preview = service.client.post("/v1/allocations/preview", json=body, headers=service.as_role("viewer"))
    assert preview.status_code == 200
    assert service.client.get("/v1/allocations").json()["data"] == []
    made = make(service.client, **body)
    assert {key: made[key] for key in preview.json()} == preview.json()


def test_from_a_profile_uses_its_gains_at_the_models_levels(client, measured_profile):
    made = make(client, profile=measured_profile, budgets={"ocr": 3, "prompt_fidelity": 1}, steps=6)
    sigmas = flow_sigmas(6, 1.0)
    assert made["rewards"] == ["clipscore", "ocr"]
    assert made["budgets"] == {"clipscore": 0.25, "ocr": 0.75}
    assert (made["sigmas"], made["profile"]) == (sigmas.tolist(), measured_profile)
    widths = -np.diff(sigmas)  # both curves are linear in sigma, so a gain is total times width
    np.testing.assert_allclose(made["gains"], [0.4 * widths, 0.8 * widths], rtol=1e-9)
    shifted = make(client, profile=measured_profile, budgets={"ocr": 1}, steps=6, shift=3.0)
    assert shifted["sigmas"] == flow_sigmas(6, 3.0).tolist()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"budgets": {"ocr": 1}}, "body"),
        ({"budgets": {"ocr": 1}, "steps": 4, "gains": GAINS}, "body"),
        ({"budgets": {"hpsv2": 1}, "steps": 4}, "body.budgets"),
        ({"budgets": {"aesthetic": 1}, "steps": 4}, "body.budgets.aesthetic"),
        ({"budgets": {"ocr": 0}, "steps": 4}, "body.budgets"),
    ],
)
def test_what_does_not_fit_the_profile_is_refused(client, measured_profile, body, field):
    answer = client.post("/v1/allocations", json={"profile": measured_profile, **body})
    assert answer.status_code == 422
    assert [".".join(error["loc"]) for error in answer.json()["errors"]] == [field]


def test_a_profile_that_is_not_measured_yet_is_refused(client, prompt_set):
    request = {"model": "miniature", "prompt_set": prompt_set, "rewards": ["ocr"]}
    queued = client.post("/v1/profiles", json=request).json()["id"]
    answer = client.post("/v1/allocations", json={"profile": queued, "budgets": {"ocr": 1}, "steps": 2})
    assert answer.status_code == 422
    assert "has not been measured" in answer.json()["errors"][0]["msg"]


def test_csv_has_the_matrix_at_full_precision(client):
    made = make(client, gains=GAINS, budgets={"ocr": 1, "appearance": 1})
    answer = client.get(f"/v1/allocations/{made['id']}.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    head, *rows = list(csv.reader(io.StringIO(answer.text)))
    assert head == ["reward", "budget", "step_1", "step_2", "step_3", "step_4"]
    assert [row[0] for row in rows] == made["rewards"]
    assert [[float(cell) for cell in row[2:]] for row in rows] == made["matrix"]
    assert {row[0]: float(row[1]) for row in rows} == made["budgets"]


def test_extreme_gains_still_meet_the_constraints(client):
    gains = {"a": [1e12] + [0.0] * 999, "b": [0.0] * 1000}
    made = make(client, gains=gains, budgets={"a": 1, "b": 1e-9})
    matrix = np.array(made["matrix"])
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0, atol=1e-9)
    np.testing.assert_allclose(matrix.sum(axis=1), 1000 * np.array(list(made["budgets"].values())), atol=1e-9)
