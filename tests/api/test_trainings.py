from __future__ import annotations

import pytest

from api.trainings.estimates import training_work
from recast_engine.config import TrainingConfig, load
from recast_engine.prompts import parse_prompts
from store.repositories import allocations, artifacts, attempts, jobs, profiles, trainings

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


@pytest.fixture
def started(service, training):
    """A running training and its claim."""
    job = service.client.post("/v1/trainings", json=training).json()["id"]
    with service.write() as session, session.begin():
        return job, attempts.claim(session, job, "worker", 60)


def store_file(service, job, kind, name, content, step, meta):
    key = f"jobs/{job}/1/{kind}/{name}"
    stored = service.context.artifacts.put_bytes(key, content)
    with service.write() as session, session.begin():
        return artifacts.create(
            session,
            job_id=job,
            attempt=1,
            kind=kind,
            name=name,
            key=key,
            bytes=stored.bytes,
            sha256=stored.sha256,
            step=step,
            meta=meta,
        ).id


def test_a_training_is_a_queued_job_with_everything_resolved(service, training):
    training["stages"][0]["budgets"] = {"appearance": 1, "ocr": 1}
    answer = service.client.post("/v1/trainings", json=training)
    job = answer.json()["id"]
    assert answer.status_code == 202
    assert service.published.messages == [("training", job)]
    view = service.client.get(f"/v1/trainings/{job}").json()
    budgets = view["config"]["stages"][0]["budgets"]
    assert budgets == {"hpsv2": 0.25, "pickscore": 0.25, "ocr": 0.5}
    assert view["config"]["sampling"]["shift"] == 1.0
    assert len(view["config"]["prompt_set_sha256"]) == 64
    assert load(TrainingConfig, view["config"]).stages[0].budgets == budgets
    assert view["stages"] == [
        {
            "budgets": budgets,
            "epochs": 2,
            "method": "recast",
            "refresh": "frozen",
            "profile": None,
            "allocation": None,
            "allocations": [],
        }
    ]
    with service.context.read() as session:
        assert jobs.get(session, job).request["stages"][0]["budgets"] == {"appearance": 1, "ocr": 1}


def test_stages_show_the_profiles_and_allocations_they_trained_with(service, started, measured_profile):
    job, _ = started
    matrix = {
        "rewards": ["ocr"],
        "steps": 1,
        "budgets": {"ocr": 1.0},
        "method": "recast",
        "temperature": 1.0,
        "matrix": [[1.0]],
        "gains": [[1.0]],
        "diagnostics": {
            "row_residual": 0.0,
            "column_residual": 0.0,
            "iterations": 0,
            "kl_from_static": 0.0,
            "demand": [1.0],
            "demand_ratio": None,
        },
    }
    with service.write() as session, session.begin():
        made = [
            allocations.create(
                session,
                workspace_id=service.workspace_id,
                allocation=matrix,
                profile_id=measured_profile,
                training_id=job,
                stage=0,
                epoch=epoch,
                reason=reason,
            ).id
            for epoch, reason in ((0, "start of the stage"), (1, "every 1 epochs"))
        ]
    stage = service.client.get(f"/v1/trainings/{job}").json()["stages"][0]
    assert (stage["profile"], stage["allocation"], stage["allocations"]) == (measured_profile, made[1], made)
    view = service.client.get(f"/v1/allocations/{made[0]}").json()
    assert (view["training"], view["stage"], view["epoch"]) == (job, 0, 0)
    assert view["reason"] == "start of the stage"


def allocate(client, **change):
    body = {"gains": {"clipscore": [1, 2, 3, 4], "ocr": [4, 3, 2, 1]}, "budgets": {"clipscore": 1, "ocr": 3}}
    return client.post("/v1/allocations", json=body | change).json()["id"]


def test_a_stored_allocation_that_fits(client, training):
    training["stages"][0]["allocation"] = named = allocate(client)
    job = client.post("/v1/trainings", json=training)
    assert job.status_code == 202, job.text
    stage = client.get(f"/v1/trainings/{job.json()['id']}").json()["stages"][0]
    assert (stage["method"], stage["allocation"], stage["allocations"]) == (None, named, [named])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gains": {"clipscore": [1, 2], "ocr": [2, 1]}}, "2 steps"),
        (
            {"gains": {"hpsv2": [1, 2, 3, 4], "ocr": [4, 3, 2, 1]}, "budgets": {"hpsv2": 1, "ocr": 3}},
            "rewards",
        ),
        ({"budgets": {"clipscore": 1, "ocr": 1}}, "budgets differ"),
    ],
)
def test_a_stored_allocation_that_does_not_fit(client, training, job_count, change, reason):
    training["stages"][0]["allocation"] = allocate(client, **change)
    answer = client.post("/v1/trainings", json=training)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["loc"] == ["body", "stages", 0, "allocation"]
    assert reason in error["msg"]
    assert job_count() == 0


def test_a_named_profile_must_cover_the_stage(client, training, measured_profile):
    training["stages"][0]["allocation"] = {"profile": measured_profile}
    assert client.post("/v1/trainings", json=training).status_code == 202
    training["stages"][0]["budgets"] = {"hpsv2": 1}
    answer = client.post("/v1/trainings", json=training)
    assert answer.json()["errors"] == [
        {
            "loc": ["body", "stages", 0, "allocation", "profile"],
            "msg": "the profile did not measure hpsv2",
        }
    ]


def test_a_refresh_policy_is_kept_and_counted(service, training, measured_profile):
    stage = training["stages"][0]
    frozen = service.client.post("/v1/trainings/estimate", json=training).json()
    stage["allocation"] = {"refresh": "on_drift", "refresh_share": 0.05}
    refreshed = service.client.post("/v1/trainings/estimate", json=training).json()
    epochs = 2 * 4 * (4 + 2 * 3)  # 4 images: 4 steps to draw, 2 timesteps by 3 velocities to train
    assert refreshed["model_evaluations"] - frozen["model_evaluations"] == int(0.05 * epochs)
    job = service.client.post("/v1/trainings", json=training).json()["id"]
    (view,) = service.client.get(f"/v1/trainings/{job}").json()["stages"]
    assert (view["refresh"], view["allocations"]) == ("on_drift", [])
    stage["allocation"] = {"refresh": "every_n", "method": "static"}
    answer = service.client.post("/v1/trainings", json=training)
    assert answer.status_code == 422
    assert any("static weighting" in error["msg"] for error in answer.json()["errors"])
    with service.write() as session, session.begin():
        row = profiles.get(session, measured_profile)
        row.extra = row.extra | {"config": {"kind": "external_proposal"}}
    stage["allocation"] = {"refresh": "on_drift", "profile": measured_profile}
    (error,) = service.client.post("/v1/trainings", json=training).json()["errors"]
    assert error["loc"] == ["body", "stages", 0, "allocation", "profile"]
    assert "self-tilted" in error["msg"]


def test_starting_from_an_adapter_keeps_its_shape(client, training, adapter):
    training["adapter"] = adapter
    answer = client.post("/v1/trainings", json=training)
    assert [error["loc"] for error in answer.json()["errors"]] == [
        ["body", "lora", "rank"],
        ["body", "lora", "alpha"],
    ]
    training["lora"] = {"rank": 2, "alpha": 4, "targets": ["to_q", "to_out.0"]}
    assert client.post("/v1/trainings", json=training).status_code == 202


def test_metrics_are_series_that_can_be_followed(service, started):
    job, _ = started
    with service.write() as session, session.begin():
        for step in (1, 2, 3):
            trainings.add_metrics(session, job, step, {"loss/kl": step / 10, "reward/ocr/mean": step * 1.0})
    url = f"/v1/trainings/{job}/metrics"
    found = service.client.get(url).json()
    assert found["series"] == {
        "loss/kl": {"steps": [1, 2, 3], "values": [0.1, 0.2, 0.3]},
        "reward/ocr/mean": {"steps": [1, 2, 3], "values": [1.0, 2.0, 3.0]},
    }
    assert (found["next_after"], found["more"]) == (3, False)
    later = service.client.get(url, params={"after": 2, "names": "loss/kl,nothing"}).json()
    assert later["series"] == {"loss/kl": {"steps": [3], "values": [0.3]}}
    assert service.client.get(url, params={"after": 3}).json() == {
        "series": {},
        "next_after": None,
        "more": False,
    }
    cut = service.client.get(url, params={"limit": 3}).json()
    assert (cut["series"]["loss/kl"]["steps"], cut["next_after"], cut["more"]) == ([1], 1, True)
    for epoch in (1, 2, 3):  # an epoch has two points: a smaller limit loses none of them
        tight = service.client.get(url, params={"limit": 1, "after": epoch - 1}).json()
        assert {name: series["steps"] for name, series in tight["series"].items()} == {
            "loss/kl": [epoch],
            "reward/ocr/mean": [epoch],
        }
        assert (tight["next_after"], tight["more"]) == (epoch, epoch < 3)
    assert service.client.get(url, params={"names": ["loss/kl", "a\x00b"]}).status_code == 200


def test_samples_are_listed_and_downloaded(service, started):
    job, _ = started
    meta = {"epoch": 2, "steps": 10, "solver": "euler", "cell": [48, 48], "columns": 1,
            "images": [{"prompt": "a red circle", "seed": 7}]}  # fmt: skip
    sample = store_file(service, job, "samples", "epoch-000002.png", PNG, 2, meta)
    (listed,) = service.client.get(f"/v1/trainings/{job}/samples").json()["data"]
    assert {key: listed[key] for key in meta} == meta
    assert listed["id"] == sample
    answer = service.client.get(listed["url"])
    assert (answer.content, answer.headers["content-type"]) == (PNG, "image/png")
    again = service.client.get(listed["url"], headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def test_only_samples_of_the_training_are_served_as_such(service, started, adapter, training):
    job, _ = started
    sample = store_file(service, job, "samples", "epoch-000002.png", PNG, 2, {})
    secret = store_file(service, job, "log", "engine.log", b"secret", 0, {})
    other = service.client.post("/v1/trainings", json=training).json()["id"]
    for path in (f"{job}/samples/{secret}", f"{other}/samples/{sample}", f"{job}/samples/art_nothing"):
        assert service.client.get(f"/v1/trainings/{path}").status_code == 404


def test_checkpoints_are_listed(service, started):
    job, _ = started
    for epoch in (10, 5):
        meta = {"epoch": epoch, "step": epoch * 3, "stage": 0}
        store_file(service, job, "checkpoint", f"epoch-{epoch:06d}", b"x", epoch, meta)
    listed = service.client.get(f"/v1/trainings/{job}/checkpoints").json()["data"]
    assert [(row["epoch"], row["step"], row["stage"]) for row in listed] == [(5, 15, 0), (10, 30, 0)]


def test_the_estimate_counts_epochs_and_the_stages_profile(client, training, job_count):
    training["stages"] = [
        {"budgets": {"ocr": 1}, "epochs": 3, "allocation": {"method": "static"}},
        {
            "budgets": {"clipscore": 1, "geneval": 1},
            "epochs": 2,
            "allocation": {
                "estimator": {"levels": 3, "prompts": 9, "images_per_prompt": 2, "sampling_steps": 4}
            },
        },
    ]
    training["optimizer"] = {"timesteps_per_image": 2, "kl_weight": 0}
    estimate = client.post("/v1/trainings/estimate", json=training).json()
    # An epoch: 2 prompts of 2 images, 4 steps to draw, 2 timesteps by 2 velocities: 4 * (4 + 4) = 32.
    # The profile: all 4 prompts of 2 images; one inner level 1 - 2^-1.5 = 0.646 of 4 steps = 3:
    # 8 * (4 + 3) = 56.
    # Grids of the 4 prompts, 10 steps: before the first epoch and after the fifth and last.
    assert estimate["model_evaluations"] == 5 * 32 + 56 + 2 * 4 * 10
    # Stage 1 trains on the one text prompt: 12 images, one reward. Stage 2: 8 images, 6 rewards over 4
    # prompts; its profile scores 8 images and 8 rollouts.
    assert estimate["reward_calls"] == 12 + 12 + 24
    training["collapse"] = {"held_out": "aesthetic"}  # watches the 5 * 4 images of the epochs
    watched = client.post("/v1/trainings/estimate", json=training).json()
    assert watched["reward_calls"] == estimate["reward_calls"] + 20
    assert job_count() == 0


def test_a_kl_term_costs_a_third_velocity():
    prompts = parse_prompts("a\nb\n")
    config = {
        "model": "miniature",
        "prompt_set": "x",
        "sampling": {"steps": 5, "prompts_per_epoch": 1, "images_per_prompt": 2},
        "stages": [{"budgets": {"clipscore": 1}, "epochs": 1, "allocation": "alloc_x"}],
    }
    without = training_work(load(TrainingConfig, config | {"optimizer": {"kl_weight": 0.0}}), prompts)
    with_kl = training_work(load(TrainingConfig, config), prompts)
    grids = 2 * 2 * 10
    assert without.model_evaluations == 2 * (5 + 2 * 2) + grids
    assert with_kl.model_evaluations == 2 * (5 + 2 * 3) + grids


@pytest.mark.parametrize(("epochs", "every", "grids"), [(1, 5, 2), (5, 5, 2), (6, 5, 3), (10, 1, 11)])
def test_sample_grids_are_counted(epochs, every, grids):
    samples = pytest.importorskip("recast_engine.training.samples")
    config = {
        "model": "miniature",
        "prompt_set": "x",
        "stages": [{"budgets": {"clipscore": 1}, "epochs": epochs, "allocation": "alloc_x"}],
        "sampling": {"steps": 1, "prompts_per_epoch": 1, "images_per_prompt": 2},
        "optimizer": {"kl_weight": 0, "timesteps_per_image": 1},
        "samples_every": every,
    }
    work = training_work(load(TrainingConfig, config), parse_prompts("a\n" * 40))
    assert work.model_evaluations == epochs * 2 * 3 + grids * samples.GRID_IMAGES * 10
