"""Whatever a body contains, the answer is a clear yes or a problem document, never a failure of ours."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

TRAINING = {
    "model": "miniature",
    "prompt_set": "pset_miniature_train",
    "stages": [
        {"budgets": {"clipscore": 1.0, "appearance": 2.0}, "epochs": 2, "allocation": {"method": "recast"}},
        {"budgets": {"ocr": 1.0}, "epochs": 1, "allocation": "alloc_x"},
    ],
    "adapter": None,
    "lora": {"rank": 4, "alpha": 8, "targets": ["to_q"]},
    "sampling": {"steps": 4, "shift": None, "solver": "euler"},
    "optimizer": {"betas": [0.9, 0.99], "kl_weight": 0},
    "seed": 0,
}
BODIES = {
    "/v1/trainings": TRAINING,
    "/v1/trainings/estimate": TRAINING,
    "/v1/profiles": {
        "model": "miniature",
        "prompt_set": "pset_miniature_train",
        "rewards": ["ocr", "clipscore"],
        "estimator": {"levels": 5, "alpha": 2.0, "prompts": 8},
    },
    "/v1/evaluations/estimate": {
        "subjects": [{"label": "a", "base_model": "miniature"}, {"label": "b", "base_model": "miniature"}],
        "baseline": "a",
        "rewards": ["clipscore"],
        "prompt_set": "pset_miniature_heldout",
        "seeds": [0, 1],
        "max_prompts": 4,
        "objective": {"clipscore": 1},
    },
    "/v1/allocations": {
        "gains": {"ocr": [1.0, 2.0], "hpsv2": [0.0, 1.0]},
        "budgets": {"text_accuracy": 1, "hpsv2": 1},
        "steps": 2,
        "method": "recast",
        "temperature": 1.0,
    },
    "/v1/prompt-sets": {"name": "x", "content": '{"prompt": "a", "text": "A"}\n'},
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**64, 10**30, -0.0, 1e-320, 1e308, 1e999, -1e999, float("nan")]),
    st.text(max_size=20),
    st.sampled_from(
        ["", "\x00", "miniature", "ocr", "pset_miniature_train", "a" * 5000, "../../etc", "'; --"]
    ),
    st.just([]),
    st.just({}),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=8), st.floats(), max_size=3),
)


def places(node, path=()):
    """Every place in a body that a value can be put at."""
    yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from places(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from places(value, (*path, index))


def put(body, path, value):
    if not path:
        return value
    body = copy.deepcopy(body)
    target = body
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    return body


@pytest.mark.parametrize("path", BODIES)
def test_no_value_anywhere_makes_the_service_fail(client, path):
    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(place=st.sampled_from(list(places(BODIES[path]))), value=VALUES)
    def check(place, value):
        content = json.dumps(put(BODIES[path], place, value))
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 201, 202, 422), (content, answer.text)
        if answer.status_code == 422:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["errors"], answer.text

    check()
