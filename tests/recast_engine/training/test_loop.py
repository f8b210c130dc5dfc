"""Whole trainings on the tiny pipeline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from recast_engine.backbones.sampling import sample
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import (
    EstimatorConfig,
    SamplingConfig,
    StageAllocation,
    StageConfig,
    TrainingConfig,
)
from recast_engine.errors import ConfigError, NonFinite, RewardFailure
from recast_engine.observer import Stopped
from recast_engine.training import update
from recast_engine.training.adapters import EMA, OLD, POLICY, AdapterSet, load_adapter, loaded_adapter
from recast_engine.training.checkpoint import TENSORS
from recast_engine.training.loop import TrainingResult, train
from tests.recast_engine.training.tiny import PROMPTS, PixelScorer, Recorder, training_config


def _train(
    backbone: SD3Backbone, config: TrainingConfig, workdir: Path, observer: Recorder, **options: Any
) -> TrainingResult:
    rewards = dict.fromkeys(reward for stage in config.stages for reward in stage.budgets)
    return train(
        backbone, PixelScorer(*rewards), PROMPTS, config, observer=observer, workdir=workdir, **options
    )


def _same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[key], second[key]) for key in first)


def test_a_learnable_reward_rises(backbone: SD3Backbone, tmp_path: Path) -> None:
    """Redness of fresh images, base against trained, on the same prompts and seeds."""
    config = replace(
        training_config({"redness": 1.0}, 10, timesteps_per_image=4, learning_rate=1e-2), checkpoint_every=100
    )
    observer = Recorder()
    result = _train(backbone, config, tmp_path, observer)
    conditioning = backbone.encode_prompts([prompt.prompt for prompt in PROMPTS] * 16)

    def redness(adapter: Path | None) -> np.ndarray:
        with loaded_adapter(backbone, adapter):
            images = backbone.decode(sample(backbone, conditioning, range(10**6, 10**6 + 64), steps=4))
        return PixelScorer("redness")(images, list(PROMPTS) * 16).values[0]

    gain = redness(result.adapter) - redness(None)
    assert gain.mean() > 5 * gain.std() / 8  # five standard errors
    assert observer.history[10]["objective"] > 0.5
    assert observer.history[1]["objective"] == pytest.approx(0.0, abs=1e-9)


def test_what_a_training_reports(backbone: SD3Backbone, tmp_path: Path) -> None:
    config = training_config({"redness": 3.0, "text": 1.0, "constant": 0.0}, 2)
    observer = Recorder()
    result = _train(backbone, config, tmp_path, observer)
    (allocation,) = observer.found("allocation")
    assert (allocation["stage"], allocation["epoch"], allocation["profile_stage"]) == (0, 0, None)
    assert allocation["allocation"]["rewards"] == ["redness", "text", "constant"]
    np.testing.assert_allclose(allocation["allocation"]["matrix"], [[0.75] * 4, [0.25] * 4, [0.0] * 4])
    assert [(f["stage"], f["status"]) for f in observer.found("stage")] == [(0, "started"), (0, "finished")]
    assert observer.phases == [("training", 2)]
    assert observer.progress == [0, 1, 2]
    assert [(kind, name) for kind, name, _, _ in observer.files] == [
        ("samples", "epoch-000000.png"),
        ("checkpoint", "epoch-000001"),
        ("samples", "epoch-000002.png"),
        ("checkpoint", "epoch-000002"),
        ("adapter", "final.safetensors"),
    ]
    assert sorted(observer.history) == [1, 2]
    metrics = observer.history[1]
    assert {
        f"reward/{r}/{m}" for r in ("redness", "text", "constant") for m in ("mean", "std", "failed")
    } < set(metrics)
    assert {
        "objective",
        "loss/total",
        "loss/policy",
        "grad_norm",
        "advantage/clipped_share",
    } < set(metrics)
    assert metrics["seconds/sampling"] > 0 < metrics["seconds/training"]
    assert all(np.isfinite(value) for history in observer.history.values() for value in history.values())
    # constant is dead in both groups; text applies to the prompts with a text only and never counts as failed
    assert metrics["reward/constant/std"] == metrics["reward/text/failed"] == 0.0
    # 2 prompts x 8 images x 4 steps to sample, and 2 steps an image x (policy + old policy) to train
    grid, epoch = observer.costs[0], observer.costs[1]
    assert grid["model_evaluations"] == 4 * 10
    assert epoch["model_evaluations"] == 16 * 4 + 16 * 2 * 2
    _, _, path, facts = observer.files[-1]
    assert facts == {
        "epoch": 2,
        "step": result.steps,
        "rank": 4,
        "alpha": 8.0,
        "base_model": "miniature",
        "final": True,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert result.steps == 2 * (16 * 2 // 8)
    provenance = load_adapter(path).metadata
    assert provenance["recast.seed"] == "0"
    assert '"redness": 3.0' in provenance["recast.config"]
    (used,) = json.loads(provenance["recast.allocations"])
    assert (used["rewards"], used["method"]) == (["redness", "text", "constant"], "static")


def test_sample_grids_are_reproducible_from_their_metadata(backbone: SD3Backbone, tmp_path: Path) -> None:
    observer = Recorder()
    result = _train(backbone, training_config({"redness": 1.0}, 1), tmp_path, observer)
    for place, adapter in ((0, None), (1, result.adapter)):
        _, _, path, facts = [entry for entry in observer.files if entry[0] == "samples"][place]
        assert (facts["solver"], facts["cell"], facts["columns"]) == ("euler", [16, 16], 2)
        conditioning = backbone.encode_prompts([image["prompt"] for image in facts["images"]])
        seeds = [image["seed"] for image in facts["images"]]
        with loaded_adapter(backbone, adapter):
            images = backbone.decode(
                sample(backbone, conditioning, seeds, steps=facts["steps"], solver="euler")
            )
        grid = np.asarray(Image.open(path))
        assert grid.shape == (32, 32, 3)
        for number, image in enumerate(images):
            row, column = divmod(number, 2)
            cell = grid[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
            np.testing.assert_array_equal(cell, image)


def test_resuming_is_bitwise(backbone: SD3Backbone, tmp_path: Path) -> None:
    """Three epochs at once; two epochs and one more; and stopped inside the third, then resumed."""
    budgets = {"redness": 1.0, "brightness": 1.0}
    whole = _train(backbone, training_config(budgets, 3), tmp_path / "whole", Recorder())
    _train(backbone, training_config(budgets, 2), tmp_path / "parts", Recorder())
    observer = Recorder()
    resumed = _train(
        backbone,
        training_config(budgets, 3),
        tmp_path / "resumed",
        observer,
        resume_from=tmp_path / "parts" / "checkpoints" / "epoch-000002",
    )
    assert _same(load_adapter(whole.adapter).weights, load_adapter(resumed.adapter).weights)
    assert (resumed.epochs, resumed.steps) == (3, whole.steps)
    assert sorted(observer.history) == [3]
    assert not observer.found("allocation")  # the one in force was in the checkpoint
    # questions: one per sampling batch and one per optimiser step, so (1 + 4) an epoch
    with pytest.raises(Stopped):
        _train(backbone, training_config(budgets, 3), tmp_path / "stopped", Recorder(stop_at=13))
    again = _train(
        backbone,
        training_config(budgets, 3),
        tmp_path / "again",
        Recorder(),
        resume_from=tmp_path / "stopped" / "checkpoints",
    )
    assert _same(load_adapter(whole.adapter).weights, load_adapter(again.adapter).weights)


def test_the_same_seed_gives_the_same_file(backbone: SD3Backbone, tmp_path: Path) -> None:
    config = training_config({"redness": 1.0, "brightness": 1.0}, 2)
    first, again, other = (
        _train(backbone, replace(config, seed=seed), tmp_path / name, Recorder())
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert first.adapter.read_bytes() == again.adapter.read_bytes()
    weights = load_adapter(first.adapter).weights, load_adapter(other.adapter).weights
    assert not _same(*weights)


def test_stopping_reports_a_checkpoint_of_the_last_whole_epoch(backbone: SD3Backbone, tmp_path: Path) -> None:
    observer = Recorder(stop_at=8)
    with pytest.raises(Stopped):
        _train(backbone, training_config({"redness": 1.0}, 3), tmp_path, observer)
    kind, name, path, facts = observer.files[-1]
    assert (kind, name, facts["epoch"]) == ("checkpoint", "epoch-000001", 1)
    assert (path / TENSORS).is_file()
    assert not any(".policy." in name for name, _ in backbone.transformer.named_parameters())


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(backbone: SD3Backbone, tmp_path: Path) -> None:
    config = training_config({"redness": 1.0}, 2)
    first = _train(backbone, config, tmp_path / "a", Recorder())
    newest = tmp_path / "a" / "checkpoints" / "epoch-000002"
    (newest / TENSORS).write_bytes(b"")
    observer = Recorder()
    second = _train(backbone, config, tmp_path / "b", observer, resume_from=newest)
    (warning,) = observer.found("warning")
    assert "epoch-000002" in warning["text"]
    assert "went on from epoch-000001" in warning["text"]
    assert _same(load_adapter(first.adapter).weights, load_adapter(second.adapter).weights)


def test_a_checkpoint_of_another_config_is_refused(backbone: SD3Backbone, tmp_path: Path) -> None:
    _train(backbone, training_config({"redness": 1.0}, 1), tmp_path / "a", Recorder())
    with pytest.raises(ConfigError, match="optimizer"):
        _train(
            backbone,
            training_config({"redness": 1.0}, 2, learning_rate=1e-4),
            tmp_path / "b",
            Recorder(),
            resume_from=tmp_path / "a" / "checkpoints",
        )


def test_static_weighting_is_plain_weighting(backbone: SD3Backbone, tmp_path: Path) -> None:
    """W = lambda through a stored matrix trains exactly as the static method does; other timing does not."""
    budgets = {"redness": 1.0, "brightness": 3.0}
    config = training_config(budgets, 1)
    plain = _train(backbone, config, tmp_path / "plain", Recorder())

    def by_matrix(matrix: list[list[float]], name: str) -> TrainingResult:
        stage = StageConfig(budgets=budgets, epochs=1, allocation="alloc_1")
        stored = {"alloc_1": {"rewards": ["brightness", "redness"], "matrix": matrix}}
        return _train(
            backbone, replace(config, stages=(stage,)), tmp_path / name, Recorder(), allocations=stored
        )

    static = by_matrix([[0.75] * 4, [0.25] * 4], "static")
    timed = by_matrix([[1.0, 0.5, 1.0, 0.5], [0.0, 0.5, 0.0, 0.5]], "timed")
    weights = [load_adapter(result.adapter).weights for result in (plain, static, timed)]
    assert _same(weights[0], weights[1])
    assert not _same(weights[0], weights[2])


@pytest.mark.parametrize("allocation", ["alloc_9", StageAllocation(profile="prof_9")])
def test_an_allocation_or_profile_that_was_not_handed_over(
    backbone: SD3Backbone, tmp_path: Path, allocation: str | StageAllocation
) -> None:
    stage = StageConfig(budgets={"redness": 1.0}, epochs=1, allocation=allocation)
    with pytest.raises(ConfigError, match="_9' was not provided"):
        _train(backbone, replace(training_config({"x": 1.0}, 1), stages=(stage,)), tmp_path, Recorder())


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"rewards": ["redness", "brightness"], "matrix": [[0.5] * 4, [0.5] * 4]}, "rewards"),
        ({"rewards": ["redness"], "matrix": [[1.0] * 5]}, "5 steps"),
        ({"rewards": ["redness"], "matrix": [[0.9] * 4]}, "row sums"),
    ],
)
def test_an_allocation_that_does_not_fit_is_refused(
    backbone: SD3Backbone, tmp_path: Path, stored: dict[str, Any], message: str
) -> None:
    stage = StageConfig(budgets={"redness": 1.0}, epochs=1, allocation="alloc_1")
    config = replace(training_config({"redness": 1.0}, 1), stages=(stage,))
    with pytest.raises(ConfigError, match=message):
        _train(backbone, config, tmp_path, Recorder(), allocations={"alloc_1": stored})


def test_two_stages_each_measure_their_profile(backbone: SD3Backbone, tmp_path: Path) -> None:
    estimator = EstimatorConfig(levels=3, prompts=4, images_per_prompt=2, sampling_steps=2)
    measured = StageAllocation(method="recast", estimator=estimator)
    stages = (
        StageConfig(budgets={"redness": 1.0, "brightness": 1.0}, epochs=1, allocation=measured),
        StageConfig(budgets={"brightness": 1.0, "text": 3.0}, epochs=2, allocation=measured),
    )
    observer = Recorder()
    _train(backbone, replace(training_config({"x": 1.0}, 1), stages=stages), tmp_path, observer)
    assert [found["stage"] for found in observer.found("profile")] == [0, 1]
    findings = observer.found("allocation")
    assert [(f["stage"], f["epoch"], f["profile_stage"]) for f in findings] == [(0, 0, 0), (1, 1, 1)]
    for finding, budgets in zip(findings, ([0.5, 0.5], [0.25, 0.75]), strict=True):
        matrix = np.array(finding["allocation"]["matrix"])
        np.testing.assert_allclose(matrix.sum(1), 4 * np.array(budgets), atol=1e-9)
        np.testing.assert_allclose(matrix.sum(0), 1.0, atol=1e-9)
        assert len(finding["allocation"]["sigmas"]) == 5
    assert sorted(observer.history) == [1, 2, 3]
    assert observer.history[2]["objective"] == pytest.approx(0.0, abs=1e-9)  # a stage has its own baseline
    # a stored profile of more rewards gives the same allocation without being measured again
    stored = observer.found("profile")[0]["profile"]
    by_profile = StageConfig(
        budgets={"brightness": 2.0, "redness": 2.0}, epochs=1, allocation=StageAllocation(profile="prof_1")
    )
    again = Recorder()
    config = replace(training_config({"x": 1.0}, 1), stages=(by_profile,))
    _train(backbone, config, tmp_path / "again", again, profiles={"prof_1": stored})
    assert not again.found("profile")
    (finding,) = again.found("allocation")
    np.testing.assert_allclose(
        finding["allocation"]["matrix"], np.array(findings[0]["allocation"]["matrix"])[::-1], atol=1e-9
    )


def test_an_adapter_to_start_from(backbone: SD3Backbone, tmp_path: Path) -> None:
    config = training_config({"redness": 1.0}, 1)
    first = _train(backbone, config, tmp_path / "a", Recorder())
    observer = Recorder()
    _train(backbone, config, tmp_path / "b", observer, initial_adapter=first.adapter)
    last, start = ([e for e in o.files if e[0] == "samples"] for o in (Recorder(), observer))
    assert not last
    with loaded_adapter(backbone, first.adapter):
        conditioning = backbone.encode_prompts([image["prompt"] for image in start[0][3]["images"]])
        seeds = [image["seed"] for image in start[0][3]["images"]]
        images = backbone.decode(sample(backbone, conditioning, seeds, steps=10, solver="euler"))
    np.testing.assert_array_equal(np.asarray(Image.open(start[0][2]))[:16, :16], images[0])
    with pytest.raises(ConfigError, match="rank 4 and alpha 8"):
        _train(
            backbone,
            replace(config, lora=replace(config.lora, alpha=4.0)),
            tmp_path / "c",
            Recorder(),
            initial_adapter=first.adapter,
        )


def test_failing_rewards(backbone: SD3Backbone, tmp_path: Path) -> None:
    with pytest.raises(RewardFailure, match="broken failed on 16 of 16 images"):
        _train(backbone, training_config({"redness": 1.0, "broken": 1.0}, 1), tmp_path / "a", Recorder())
    observer = Recorder()
    _train(backbone, training_config({"flaky": 1.0}, 1), tmp_path / "b", observer)
    assert observer.history[1]["reward/flaky/failed"] == 2.0
    assert observer.history[1]["images_unused"] == 2.0


def test_nothing_to_prefer_leaves_the_policy_alone(backbone: SD3Backbone, tmp_path: Path) -> None:
    observer = Recorder()
    result = _train(backbone, training_config({"constant": 1.0}, 1), tmp_path, observer)
    assert result.steps == 0
    assert observer.history[1]["zero_std_share"] == 1.0
    assert "loss/total" not in observer.history[1]
    weights = load_adapter(result.adapter).weights
    assert not any(value.any() for name, value in weights.items() if "lora_B" in name)


def test_a_reward_without_its_metadata_is_refused(backbone: SD3Backbone, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'text'"):
        train(
            backbone,
            PixelScorer("text"),
            [PROMPTS[0]],
            training_config({"text": 1.0}, 1),
            observer=Recorder(),
            workdir=tmp_path,
        )


def test_a_stage_trains_on_the_prompts_its_rewards_can_score(backbone: SD3Backbone, tmp_path: Path) -> None:
    observer = Recorder()
    _train(backbone, training_config({"text": 1.0}, 2), tmp_path, observer)
    assert observer.history[1]["images_unused"] == observer.history[2]["images_unused"] == 0.0
    assert sum(cost["reward_calls"] for cost in observer.costs) == 2 * 16


def test_a_non_finite_loss_leaves_the_weights_alone(
    backbone: SD3Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third optimiser step gets a NaN; the weights then are those after the second."""
    made: list[AdapterSet] = []
    seen: list[list[Tensor]] = []
    real = update.nft_loss

    def poisoned(*args: Any, **options: Any) -> update.NFTLoss:
        loss = real(*args, **options)
        seen.append([parameter.detach().clone() for parameter in made[0].parameters(POLICY)])
        return replace(loss, total=loss.total * float("nan")) if len(seen) == 3 else loss

    @contextmanager
    def remembered(*args: Any, **options: Any) -> Iterator[AdapterSet]:
        adapters = AdapterSet(*args, **options)
        made.append(adapters)
        yield adapters

    monkeypatch.setattr(update, "nft_loss", poisoned)
    monkeypatch.setattr("recast_engine.training.loop.attached", remembered)
    with pytest.raises(NonFinite, match="loss is not finite at optimiser step 3"):
        _train(backbone, training_config({"redness": 1.0}, 1), tmp_path, Recorder())
    assert all(map(torch.equal, made[0].parameters(POLICY), seen[2]))
    assert not all(map(torch.equal, seen[1], seen[2]))


def test_accumulation_is_a_mean_over_all_its_passes(backbone: SD3Backbone, tmp_path: Path) -> None:
    """32 pairs in chunks of 20 and 12: two optimiser steps, whatever the size of a forward pass."""
    losses = {}
    for passes, batch in ((1, 20), (4, 5)):
        observer = Recorder()
        config = training_config({"redness": 1.0}, 1, batch_size=batch, accumulation=passes)
        assert _train(backbone, config, tmp_path / str(passes), observer).steps == 2
        losses[passes] = observer.history[1]
    # the noise is drawn in the same order, so the two differ by rounding alone
    assert losses[1]["loss/total"] == pytest.approx(losses[4]["loss/total"], rel=1e-4)
    assert losses[1]["grad_norm"] == pytest.approx(losses[4]["grad_norm"], rel=1e-3)


def test_old_policy_follows_by_the_schedule_and_the_ema_by_its_decay(
    backbone: SD3Backbone, tmp_path: Path
) -> None:
    _train(backbone, training_config({"redness": 1.0}, 1), tmp_path, Recorder())
    tensors = load_file(tmp_path / "checkpoints" / "epoch-000001" / TENSORS)
    names = [name.partition("/")[2] for name in tensors if name.startswith(f"{POLICY}/") and "lora_B" in name]
    for name in names:  # B starts at 0; four optimiser steps give eta = 0.004
        torch.testing.assert_close(tensors[f"{OLD}/{name}"], (1 - 0.004) * tensors[f"{POLICY}/{name}"])
    moved = torch.cat([tensors[f"{EMA}/{name}"].flatten() for name in names]).abs().mean()
    ahead = torch.cat([tensors[f"{POLICY}/{name}"].flatten() for name in names]).abs().mean()
    assert 0.05 < float(moved / ahead) < 0.5  # 1 - 0.9^4 = 0.34 of the way at most


def test_sampling_shift_reaches_the_sampler(backbone: SD3Backbone, tmp_path: Path) -> None:
    observer = Recorder()
    config = training_config({"redness": 1.0}, 1)
    sampling = SamplingConfig(steps=4, shift=1.0, prompts_per_epoch=2, images_per_prompt=4)
    _train(backbone, replace(config, sampling=sampling), tmp_path, observer)
    (finding,) = observer.found("allocation")
    np.testing.assert_allclose(finding["allocation"]["sigmas"], [1.0, 0.667, 0.334, 0.001, 0.0], atol=1e-6)
