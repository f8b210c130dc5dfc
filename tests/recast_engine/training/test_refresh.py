"""The running profile of a training and its re-projections, on the tiny pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import EstimatorConfig, StageAllocation, StageConfig, TrainingConfig
from recast_engine.errors import ConfigError
from recast_engine.observer import Stopped
from recast_engine.profiling import drift as drift_test
from recast_engine.profiling import running
from recast_engine.profiling.levels import rollout_steps
from recast_engine.training import refresh
from recast_engine.training.adapters import load_adapter
from recast_engine.training.loop import TrainingResult, train
from tests.recast_engine.training.tiny import PROMPTS, PixelScorer, Recorder, training_config

BUDGETS = {"redness": 1.0, "brightness": 3.0}
ESTIMATOR = EstimatorConfig(levels=4, prompts=4, images_per_prompt=4, sampling_steps=2)


def refreshed(policy: str, epochs: int, **options: Any) -> TrainingConfig:
    allocation = StageAllocation(refresh=policy, estimator=ESTIMATOR, **options)  # type: ignore[arg-type]
    stage = StageConfig(budgets=BUDGETS, epochs=epochs, allocation=allocation)
    config = training_config(BUDGETS, epochs)
    sampling = replace(config.sampling, prompts_per_epoch=4)
    return replace(config, stages=(stage,), sampling=sampling)


def run(
    backbone: SD3Backbone, config: TrainingConfig, workdir: Path, observer: Recorder, **options: Any
) -> TrainingResult:
    return train(
        backbone, PixelScorer(*BUDGETS), PROMPTS, config, observer=observer, workdir=workdir, **options
    )


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts are all there are here."""
    monkeypatch.setattr(running, "FEWEST_PROMPTS", 2)
    monkeypatch.setattr(running, "WINDOW_UNITS", 3)
    monkeypatch.setattr(running, "WINDOW_EPOCHS", 2)
    monkeypatch.setattr(refresh, "IMAGES_PER_UNIT", 2)


def test_frozen_costs_nothing_and_changes_nothing(backbone: SD3Backbone, tmp_path: Path) -> None:
    """The running profile only watches: without a re-projection the adapter has the same bits."""
    frozen, watched = Recorder(), Recorder()
    first = run(backbone, refreshed("frozen", 2), tmp_path / "a", frozen)
    second = run(backbone, refreshed("every_n", 2, refresh_every=9), tmp_path / "b", watched)
    assert first.sha256 != second.sha256  # the config, with its policy, stands in the header
    a, b = (load_adapter(result.adapter).weights for result in (first, second))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert frozen.history[2]["allocation/version"] == 1.0
    assert not any(name.startswith(("refresh/", "drift/")) for name in frozen.history[2])
    plain, extra = (sum(c["model_evaluations"] for c in o.costs) for o in (frozen, watched))
    per_epoch = 32 * (4 + 2 * 2)  # 4 steps to draw; 2 steps an image, policy and old policy, to train
    assert 0 < extra - plain <= 0.05 * 2 * per_epoch
    assert extra - plain == pytest.approx(watched.history[2]["refresh/share"] * 2 * per_epoch)


def test_the_account_is_never_overdrawn(backbone: SD3Backbone, tmp_path: Path) -> None:
    observer = Recorder()
    run(backbone, refreshed("every_n", 4, refresh_every=9, refresh_share=0.04), tmp_path, observer)
    shares = [observer.history[epoch]["refresh/share"] for epoch in range(1, 5)]
    assert max(shares) <= 0.04
    # what is left over is saved up: one more unit, 2 images of 2 steps, would not have fitted
    assert shares[-1] > 0.04 - 2 * rollout_steps(1.0, 2) / (4 * 32 * 8)


def test_every_n_projects_anew_and_says_so(backbone: SD3Backbone, tmp_path: Path) -> None:
    observer = Recorder()
    result = run(backbone, refreshed("every_n", 5, refresh_every=2), tmp_path, observer)
    found = observer.found("allocation")
    assert [(f["stage"], f["epoch"], f["profile_stage"]) for f in found] == [(0, 0, 0), (0, 2, 0), (0, 4, 0)]
    assert [f["reason"] for f in found] == ["start of the stage", "every 2 epochs", "every 2 epochs"]
    profiles = observer.found("profile")
    assert [p.get("epoch") for p in profiles] == [None, 2, 4]
    assert profiles[1]["profile"]["config"]["running"] == {"redness": [0, 2], "brightness": [0, 2]}
    matrices = [np.array(f["allocation"]["matrix"]) for f in found]
    for matrix, finding in zip(matrices, found, strict=True):
        np.testing.assert_allclose(matrix.sum(1), 4 * np.array([0.25, 0.75]), atol=1e-9)
        np.testing.assert_allclose(matrix.sum(0), 1.0, atol=1e-9)
        assert (finding["allocation"]["method"], finding["allocation"]["temperature"]) == ("recast", 1.0)
    assert np.abs(matrices[1] - matrices[0]).max() > 1e-6
    assert [observer.history[e]["allocation/version"] for e in range(1, 6)] == [1, 1, 2, 2, 3]
    assert observer.history[5]["profile/redness/total"] > 0
    header = json.loads(load_adapter(result.adapter).metadata["recast.allocations"])
    assert [(a["stage"], a["epoch"], a["reason"]) for a in header] == [
        (f["stage"], f["epoch"], f["reason"]) for f in found
    ]


@pytest.mark.parametrize(("policy", "stop"), [("every_n", 19), ("on_drift", 38)])
def test_resuming_is_bitwise(
    backbone: SD3Backbone, tmp_path: Path, policy: str, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the second or the fourth epoch (8 questions each, 1 for rollouts), to the same bits."""
    monkeypatch.setattr(drift_test, "FALSE_ALARMS", 1e9)  # every look is an alarm
    config = refreshed(policy, 5, refresh_every=2)
    plain = Recorder()
    whole = run(backbone, config, tmp_path / "whole", plain)
    versions = [plain.history[epoch]["allocation/version"] for epoch in range(1, 6)]
    assert versions[-1] > 1
    with pytest.raises(Stopped):
        run(backbone, config, tmp_path / "first", Recorder(stop_at=stop))
    observer = Recorder()
    folder = tmp_path / "first" / "checkpoints"
    resumed = run(backbone, config, tmp_path / "second", observer, resume_from=folder)
    assert resumed.sha256 == whole.sha256
    assert len(observer.history) < 5
    for epoch, metrics in observer.history.items():
        for name, value in metrics.items():
            assert name.startswith("seconds/") or value == plain.history[epoch][name]
    repeated, made = observer.found("allocation"), plain.found("allocation")
    assert repeated == made[len(made) - len(repeated) :]


def test_a_named_profile_is_the_reference(backbone: SD3Backbone, tmp_path: Path) -> None:
    measured = Recorder()
    run(backbone, refreshed("frozen", 1), tmp_path / "a", measured)
    (stored,) = measured.found("profile")
    observer = Recorder()
    config = refreshed("every_n", 3, refresh_every=2, profile="prof_1")
    run(backbone, config, tmp_path / "b", observer, profiles={"prof_1": stored["profile"]})
    assert [f["profile_stage"] for f in observer.found("allocation")] == [None, 0]
    assert len(observer.found("profile")) == 1
    external = {**stored["profile"], "config": {**stored["profile"]["config"], "kind": "external_proposal"}}
    with pytest.raises(ConfigError, match="self-tilted"):
        run(backbone, config, tmp_path / "c", Recorder(), profiles={"prof_1": external})


def test_a_named_allocation_is_never_refreshed(backbone: SD3Backbone, tmp_path: Path) -> None:
    stage = StageConfig(budgets=BUDGETS, epochs=2, allocation="alloc_1")
    config = replace(refreshed("frozen", 2), stages=(stage,))
    stored = {"alloc_1": {"rewards": list(BUDGETS), "matrix": [[0.25] * 4, [0.75] * 4]}}
    observer = Recorder()
    run(backbone, config, tmp_path, observer, allocations=stored)
    (found,) = observer.found("allocation")
    assert found["reason"] == "named"
    assert observer.history[2]["allocation/version"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh": "on_drift", "method": "static"}, "static weighting"),
        ({"refresh": "every_n", "refresh_share": 0.06}, "refresh_share"),
        ({"refresh": "every_n", "refresh_every": 0}, "refresh_every"),
        ({"refresh": "sometimes"}, "refresh"),
    ],
)
def test_policies_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        StageAllocation(**options)
