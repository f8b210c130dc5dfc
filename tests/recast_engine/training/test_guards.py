"""The collapse guard, retention and room on the disk: rules by hand, and in whole trainings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import CollapseGuardConfig, RetentionConfig, TrainingConfig
from recast_engine.errors import Collapsed, DiskFull, NonFinite
from recast_engine.training import checkpoint as checkpoints
from recast_engine.training import retention, update
from recast_engine.training.guards import Watch, group_diversity, watch_epoch
from recast_engine.training.loop import TrainingResult, train
from recast_engine.training.retention import Kept, best, require_room, retain
from tests.recast_engine.training.tiny import PROMPTS, PixelScorer, Recorder, training_config


def test_diversity_is_the_pairs_root_mean_square() -> None:
    """Against its definition; 0 for copies, 1 for black and white."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 4, 6, 3)).astype(np.uint8)
    pairs = [
        np.mean((a / 255.0 - b / 255.0) ** 2) for a, b in itertools.combinations(images.astype(float), 2)
    ]
    assert group_diversity(images) == pytest.approx(np.sqrt(np.mean(pairs)), rel=1e-6)
    assert group_diversity(np.stack([images[0], images[0]])) == 0.0
    assert group_diversity(np.stack([np.zeros((2, 2, 3)), np.full((2, 2, 3), 255)]).astype(np.uint8)) == 1.0


def _doubts(config: CollapseGuardConfig, *epochs: tuple[float, float, float | None]) -> list[int]:
    watch, counts = Watch(), []
    for objective, diversity, held_out in epochs:
        watch, _ = watch_epoch(
            watch,
            config,
            objective=objective,
            diversity=diversity,
            held_out=None if held_out is None else (held_out, 0.5),
        )
        counts.append(watch.doubts)
    return counts


def test_the_guard_counts_epochs_in_a_row() -> None:
    config = CollapseGuardConfig(diversity=0.5)
    low, high, start = (1.0, 0.09, None), (1.0, 0.11, None), (0.0, 0.2, None)
    assert _doubts(config, start, low, low, high, low) == [0, 1, 2, 0, 1]
    # while the objective does not rise there is nothing to doubt
    assert _doubts(config, start, low, (-0.1, 0.01, None), low) == [0, 1, 0, 1]
    assert _doubts(CollapseGuardConfig(diversity=None), start, low, low) == [0, 0, 0]
    assert _doubts(CollapseGuardConfig(), start, (1.0, 0.021, None), (1.0, 0.019, None)) == [0, 0, 1]
    assert _doubts(config, (0.0, 0.0, None), (1.0, 0.0, None)) == [0, 0]  # a start without any


def test_the_guard_watches_a_held_out_reward_in_its_own_units() -> None:
    """Start 2.0, standard deviation 0.5: a drop of two of them is below 1.0; epochs without scores pass."""
    config = CollapseGuardConfig(diversity=None, held_out="h", held_out_drop=2.0)
    epochs = [(0.0, 1.0, None), (0.1, 1.0, 2.0), (0.5, 1.0, 1.01), (0.5, 1.0, 0.99), (0.5, 1.0, None)]
    assert _doubts(config, *epochs) == [0, 0, 0, 1, 0]


def test_retention_by_hand() -> None:
    found = [Kept(epoch, 0, objective) for epoch, objective in enumerate((0.1, 0.9, 0.5, 0.9, None, 0.2), 1)]

    def kept(**options: Any) -> list[int]:
        stay, go = retain(found[::-1], RetentionConfig(**options))
        assert sorted([*stay, *go], key=lambda one: one.epoch) == found
        return [one.epoch for one in stay]

    assert kept(last=1, best=0) == [6]
    assert kept(last=2, best=1) == [2, 5, 6]  # of equals the first
    assert kept(last=1, best=3) == [2, 3, 4, 6]
    assert kept(last=1, best=0, every=3) == [3, 6]
    assert kept(last=10) == [1, 2, 3, 4, 5, 6]
    assert best(found) == found[1]
    second_stage = [*found, Kept(7, 1, 0.05)]  # its objective starts anew
    assert [one.epoch for one in retain(second_stage, RetentionConfig(last=1, best=1))[0]] == [7]
    assert best(second_stage) == second_stage[-1]
    assert best([Kept(1, 0, None)]) is None


def test_room_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 3 * 2**30})()
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda _: usage)
    require_room(tmp_path, 2**30)  # twice 1 GiB and 64 MiB
    with pytest.raises(DiskFull, match=r"need 4.06 GiB of disk and 3.00 GiB are free: .*retention"):
        require_room(tmp_path, 2**30, checkpoints=2)


@pytest.fixture
def config() -> TrainingConfig:
    return training_config({"redness": 1.0}, 6, timesteps_per_image=1, learning_rate=1e-2)


def _train(
    backbone: SD3Backbone, config: TrainingConfig, workdir: Path, observer: Recorder, **options: Any
) -> TrainingResult:
    watched = [config.collapse.held_out] if config.collapse.held_out else []
    scorer = PixelScorer(*{reward for stage in config.stages for reward in stage.budgets}, *watched)
    return train(backbone, scorer, PROMPTS, config, observer=observer, workdir=workdir, **options)


def test_a_full_disk_is_found_before_the_first_image(
    backbone: SD3Backbone, tmp_path: Path, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda _: usage)
    observer = Recorder()
    with pytest.raises(DiskFull):
        _train(backbone, config, tmp_path, observer)
    assert backbone.evaluations == 0
    assert not observer.files


def test_a_disk_that_fills_up_keeps_the_checkpoint_before(
    backbone: SD3Backbone, tmp_path: Path, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 2**40})()
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda _: usage)
    observer = Recorder()

    def metrics(step: int, values: Any) -> None:
        usage.free = 2**40 if step < 2 else 0

    monkeypatch.setattr(observer, "metrics", metrics)
    with pytest.raises(DiskFull, match=r"0.00 GiB are free"):
        _train(backbone, config, tmp_path, observer)
    assert checkpoints.newest(tmp_path / "checkpoints")[0].position.epoch == 1


def test_old_checkpoints_are_deleted_and_their_deletion_reported(
    backbone: SD3Backbone, tmp_path: Path, config: TrainingConfig
) -> None:
    """Across a resumed run too, which has only the newest checkpoint's folder."""
    config = replace(config, retention=RetentionConfig(last=1, best=1, every=3))
    first, second = Recorder(), Recorder()
    half = replace(config, stages=(replace(config.stages[0], epochs=3),))
    _train(backbone, half, tmp_path / "a", first)
    newest = tmp_path / "a" / "checkpoints" / "epoch-000003"
    _train(backbone, config, tmp_path / "b", second, resume_from=newest)
    objectives = {epoch: values["objective"] for epoch, values in (first.history | second.history).items()}
    best_epoch = max(objectives, key=lambda epoch: objectives[epoch])
    everything = {retention.checkpoint_name(epoch) for epoch in range(1, 7)}
    stored = everything - {name for kind, name in [*first.discards, *second.discards]}
    assert stored == {retention.checkpoint_name(epoch) for epoch in {3, 6, best_epoch}}
    here = {path.name for path in (tmp_path / "b" / "checkpoints").iterdir()}
    assert here == {name for name in stored if name > "epoch-000003"}


def test_a_collapse_pauses_and_a_resumed_training_goes_on(
    backbone: SD3Backbone, tmp_path: Path, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diversity measured is made to fall in epoch 3, the objective to rise from 0."""
    values = iter([0.4] * 4 + [0.01] * 100)  # two groups an epoch
    monkeypatch.setattr("recast_engine.training.rollouts.group_diversity", lambda _: next(values))
    monkeypatch.setattr(
        "recast_engine.training.metrics.objective", lambda stage, scores, baseline: float(next(rising))
    )
    rising: Iterator[int] = itertools.count()
    config = replace(config, collapse=CollapseGuardConfig(epochs=2))
    observer = Recorder()
    with pytest.raises(
        Collapsed, match=r"after epoch 4: for 2 epochs .* differ by 2% .* epoch-000002 is the"
    ):
        _train(backbone, config, tmp_path / "a", observer)
    assert [observer.history[epoch]["guard/doubts"] for epoch in (1, 2, 3, 4)] == [0, 0, 1, 2]
    kept = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
    assert kept == ["epoch-000002", "epoch-000003", "epoch-000004"]  # the best, and the last two
    again = Recorder()
    with pytest.raises(Collapsed, match="after epoch 6"):
        _train(backbone, config, tmp_path / "b", again, resume_from=tmp_path / "a" / "checkpoints")
    assert sorted(again.history) == [5, 6]


def test_a_held_out_reward_is_scored_and_never_trained_on(
    backbone: SD3Backbone, tmp_path: Path, config: TrainingConfig
) -> None:
    watched = replace(config, collapse=CollapseGuardConfig(held_out="brightness"))
    plain, observer = Recorder(), Recorder()
    results = [
        _train(backbone, config, tmp_path / "a", plain),
        _train(backbone, watched, tmp_path / "b", observer),
    ]
    assert results[0].metrics["objective"] == results[1].metrics["objective"]
    assert "held_out/brightness/mean" not in plain.history[1]
    for values in observer.history.values():
        assert 0.0 < values["held_out/brightness/mean"] < 1.0
        assert "reward/brightness/mean" not in values
    calls = [sum(cost["reward_calls"] for cost in told.costs) for told in (plain, observer)]
    assert calls == [6 * 16, 2 * 6 * 16]  # its scores cost as much as those that are trained on


def test_metrics_name_the_reward_scale_and_a_kl_that_was_measured(
    backbone: SD3Backbone, tmp_path: Path, config: TrainingConfig
) -> None:
    one = replace(config, stages=(replace(config.stages[0], epochs=1),))
    plain, with_kl, by_group = Recorder(), Recorder(), Recorder()
    _train(backbone, one, tmp_path / "a", plain)
    _train(backbone, replace(one, optimizer=replace(one.optimizer, kl_weight=0.1)), tmp_path / "b", with_kl)
    group = replace(one.optimizer, advantage_scale="group")
    _train(backbone, replace(one, optimizer=group), tmp_path / "c", by_group)
    assert "loss/kl" not in plain.history[1]
    assert with_kl.history[1]["loss/kl"] > 0
    assert plain.history[1]["reward/redness/scale"] == plain.history[1]["reward/redness/std"]
    assert 0 < by_group.history[1]["reward/redness/scale"] < plain.history[1]["reward/redness/scale"]


def test_a_non_finite_loss_leaves_no_new_checkpoint_and_no_adapter(
    backbone: SD3Backbone, tmp_path: Path, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch 2 breaks: what is on the disk is the state after epoch 1, finite to the last number."""
    real, calls = update.nft_loss, itertools.count()

    def poisoned(*args: Any, **options: Any) -> update.NFTLoss:
        loss = real(*args, **options)
        return replace(loss, total=loss.total * float("inf")) if next(calls) == 3 else loss

    monkeypatch.setattr(update, "nft_loss", poisoned)
    observer = Recorder()
    with pytest.raises(NonFinite, match="not finite at optimiser step 4"):
        _train(backbone, config, tmp_path, observer)
    assert [(kind, name) for kind, name, _, _ in observer.files if kind != "samples"] == [
        ("checkpoint", "epoch-000001")
    ]
    saved, complaints = checkpoints.newest(tmp_path / "checkpoints")
    assert not complaints
    assert all(bool(tensor.isfinite().all()) for tensor in saved.tensors.values())
    assert not (tmp_path / "final.safetensors").exists()
