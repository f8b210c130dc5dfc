"""The main job over HTTP, a real broker and a real worker, on the miniature, as small as it goes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from recast import heatmap, service
from recast.client import Client
from recast.errors import ProblemError
from recast.home import Home
from recast_engine import miniature

BUDGETS = {"prompt_fidelity": 1.0, "composition": 3.0}
REWARDS = ["clipscore", "geneval"]
STEPS = 4


def training_body(allocation: str, epochs: int = 2, checkpoint_every: int = 5) -> dict[str, Any]:
    return {
        "model": "miniature",
        "prompt_set": "pset_miniature_train",
        "stages": [{"budgets": BUDGETS, "epochs": epochs, "allocation": allocation}],
        "sampling": {"steps": STEPS, "prompts_per_epoch": 2, "images_per_prompt": 4},
        "optimizer": {"batch_size": 8, "timesteps_per_image": 1, "learning_rate": 1e-3},
        "lora": {"rank": 32, "alpha": 64},
        "checkpoint_every": checkpoint_every,
        "seed": 3,
    }


@pytest.fixture(scope="module")
def done(home: Home) -> dict[str, Any]:
    """Everything the main job makes, from a profile to a report."""
    with Client(home=home.root) as client:
        estimator = {"levels": 3, "prompts": 4, "images_per_prompt": 2, "sampling_steps": 3}
        body = {"model": "miniature", "rewards": REWARDS, "prompt_set": "pset_miniature_train"}
        profile = client.wait(client.create_profile({**body, "estimator": estimator})["id"])
        allocation = client.create_allocation({"profile": profile["id"], "budgets": BUDGETS, "steps": STEPS})
        training = client.wait(client.create_training(training_body(allocation["id"]))["id"])
        adapter = client.adapters(training["id"])[0]
        evaluation = client.wait(
            client.create_evaluation(
                {
                    "subjects": [
                        {"label": "base", "base_model": "miniature"},
                        {"label": "tuned", "adapter": adapter["id"]},
                    ],
                    "baseline": "base",
                    "rewards": REWARDS,
                    "objective": {"clipscore": 1.0, "geneval": 3.0},
                    "prompt_set": "pset_miniature_heldout",
                    "max_prompts": 4,
                    "images_per_prompt": 1,
                    "steps": STEPS,
                }
            )["id"]
        )
    return {
        "profile": profile,
        "allocation": allocation,
        "training": training,
        "adapter": adapter,
        "evaluation": evaluation,
    }


def test_budgets_come_out_as_they_went_in(done: dict[str, Any], client: Client) -> None:
    allocation = client.allocation(done["allocation"]["id"])
    assert allocation["budgets"] == {"clipscore": 0.25, "geneval": 0.75}
    assert heatmap.budget_error(allocation) < 1e-9
    np.testing.assert_allclose(np.sum(allocation["matrix"], axis=0), np.ones(STEPS), atol=1e-9)


def test_every_finding_is_kept(done: dict[str, Any], client: Client) -> None:
    profile = client.result(done["profile"])
    assert set(profile["curves"]) == set(REWARDS)
    assert profile["cost"]["model_evaluations"] > 0
    training = client.result(done["training"])
    assert training["stages"][0]["allocation"] == done["allocation"]["id"]
    series = client.metrics(done["training"]["id"], ["objective", "reward/geneval/mean"])["series"]
    assert series["objective"]["steps"] == [1, 2]
    assert [grid["epoch"] for grid in client.samples(done["training"]["id"])] == [0, 2]
    report = client.result(done["evaluation"])["report"]
    assert report["objective"]["differences"]["tuned"]["prompts"] > 0
    assert report["verdict"]


def test_a_profile_in_shards_is_one_engines_to_the_last_bit(home: Home) -> None:
    estimator = {"levels": 3, "prompts": 4, "images_per_prompt": 16, "sampling_steps": 2}  # two prompt groups
    body = {"model": "miniature", "rewards": ["clipscore"], "prompt_set": "pset_miniature_train"}
    with Client(home=home.root) as client:
        whole = client.create_profile({**body, "estimator": estimator})
        parts = client.create_profile({**body, "estimator": estimator, "shards": 8, "reuse": False})
        one, many = (client.result(client.wait(job["id"])) for job in (whole, parts))
        assert many["curves"] == one["curves"]
        for name in ("model_evaluations", "reward_calls"):
            assert many["cost"][name] == one["cost"][name] > 0
        events = [event.data for event in client.events(many["id"]) if event.type == "finding"]
        ends = sorted((event["round"], event["shard"]) for event in events if event["kind"] == "shard")
        assert ends == [(0, 0), (0, 1)]
        again = client.create_profile({**body, "estimator": estimator, "shards": 2})
        assert (again["reused"], again["id"]) == (True, many["id"])
        assert {job["kind"] for job in client.jobs(limit=100)} <= {"profile", "training", "evaluation"}


def test_events_tell_the_whole_story_once(done: dict[str, Any], client: Client) -> None:
    events = list(client.events(done["training"]["id"]))
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    statuses = [event.data["status"] for event in events if event.type == "status"]
    assert (statuses[0], statuses[-1]) == ("queued", "succeeded")
    later = list(client.events(done["training"]["id"], after=events[3].seq))
    assert later == events[4:]


def test_the_adapter_reproduces_the_services_samples_in_plain_diffusers(
    done: dict[str, Any], client: Client, tmp_path: Path, reproduce_script: Path
) -> None:
    grid = client.samples(done["training"]["id"])[-1]
    before = client.samples(done["training"]["id"])[0]
    adapter = tmp_path / "pytorch_lora_weights.safetensors"
    client.download(f"/v1/adapters/{done['adapter']['id']}/download", adapter)
    client.download(grid["url"], tmp_path / "after.png")
    client.download(before["url"], tmp_path / "before.png")
    request = {
        "pipeline": str(miniature.PIPELINE),
        "adapter": str(adapter),
        "images": grid["images"],
        "steps": grid["steps"],
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    arguments = [str(tmp_path / "request.json"), str(tmp_path / "images.npy")]
    subprocess.run([sys.executable, str(reproduce_script), *arguments], check=True, cwd=tmp_path, timeout=120)
    drawn = np.load(tmp_path / "images.npy").astype(int)
    cells = np.stack(list(split(tmp_path / "after.png", grid))).astype(int)
    assert np.abs(drawn - cells).max() <= 2
    base = np.stack(list(split(tmp_path / "before.png", before))).astype(int)
    assert np.abs(base - cells).max() > 8  # the adapter does something, so that loading it half would show


def split(path: Path, grid: dict[str, Any]) -> Iterator[np.ndarray]:
    """The images of a grid without padding, in order."""
    width, height = grid["cell"]
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    for number in range(len(grid["images"])):
        row, column = divmod(number, grid["columns"])
        yield pixels[row * height : (row + 1) * height, column * width : (column + 1) * width]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/trainings", {**training_body("alloc_none")}, "allocation"),
        (
            "/v1/profiles",
            {"model": "miniature", "rewards": ["nope"], "prompt_set": "pset_miniature_train"},
            "rewards",
        ),
        (
            "/v1/profiles",
            {"model": "miniature", "rewards": ["geneval"], "prompt_set": "pset_none"},
            "prompt_set",
        ),
        ("/v1/allocations", {"gains": {"ocr": [1, 2]}, "budgets": {"ocr": -1}}, "budgets"),
    ],
)
def test_a_wrong_request_starts_nothing(
    done: dict[str, Any], client: Client, path: str, body: dict[str, Any], field: str
) -> None:
    before = client.jobs(limit=100)
    with pytest.raises(ProblemError) as caught:
        client._create(path, body)
    assert caught.value.status == 422
    assert any(field in loc for loc, _ in caught.value.errors)
    assert client.jobs(limit=100) == before


def test_nothing_is_readable_without_a_key(done: dict[str, Any], client: Client) -> None:
    answer = httpx.get(f"{client.url}/v1/jobs/{done['training']['id']}", trust_env=False)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"


def test_everything_survives_a_restart(done: dict[str, Any], home: Home, tmp_path: Path) -> None:
    with Client(home=home.root) as client:
        known = client.jobs(limit=100)
        events = list(client.events(done["training"]["id"]))
    assert service.stop_running(home)
    service.start_in_background(home, 0, bound=True)
    with Client(home=home.root) as client:
        assert client.jobs(limit=100) == known
        assert list(client.events(done["training"]["id"])) == events
        assert client.allocation(done["allocation"]["id"])["matrix"] == done["allocation"]["matrix"]
        files = {
            f"/v1/adapters/{done['adapter']['id']}/download": done["adapter"]["bytes"],
            f"/v1/allocations/{done['allocation']['id']}.csv": None,
            f"/v1/evaluations/{done['evaluation']['id']}/report": None,
            client.samples(done["training"]["id"])[-1]["url"]: None,
        }
        for path, size in files.items():
            saved = client.download(path, tmp_path / "file")
            assert saved.stat().st_size == (size or saved.stat().st_size) > 0
