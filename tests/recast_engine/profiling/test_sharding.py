"""A profile in parts: one worker and any split into shards give the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recast_engine import config as configs
from recast_engine import miniature
from recast_engine.backbones.load import load_backbone
from recast_engine.config import EstimatorConfig, ProfileConfig
from recast_engine.errors import ConfigError, InvalidArgument
from recast_engine.observer import NullObserver
from recast_engine.profiling import plan as planning
from recast_engine.profiling.assembly import profile_from_scores
from recast_engine.profiling.measure import measure_profile, measure_work
from recast_engine.profiling.plan import Plan, Work
from recast_engine.profiling.scores import ScoreTable
from recast_engine.prompts import Prompt, parse_prompts
from recast_engine.rewards.scoring import load_scorer
from recast_engine.run import Request, run

REWARDS = ("clipscore",)  # the quickest


def same_bits(first: ScoreTable, second: ScoreTable) -> bool:
    pairs = ((getattr(first, name), getattr(second, name)) for name in ("clean", "rollouts", "failed"))
    return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))


@pytest.fixture
def estimator(monkeypatch: pytest.MonkeyPatch) -> EstimatorConfig:
    """Ten prompts of 3 images: five groups of two prompts."""
    monkeypatch.setattr(planning, "GROUP_IMAGES", 6)
    return EstimatorConfig(prompts=10, images_per_prompt=3, levels=3, sampling_steps=2, anchor=True)


def test_any_sharding_gives_the_same_bits(prompts: list[Prompt], estimator: EstimatorConfig) -> None:
    """A fresh backbone for every split, so no cache can help; shards run and merge in other orders."""
    plan = Plan.of(estimator, REWARDS, prompts, 7)
    work = plan.next(plan.empty())
    assert work is not None
    scorer = load_scorer(REWARDS, "miniature")
    merged = []
    for parts in (1, 2, 5):
        shards = plan.split(work, parts)
        assert len(shards) == parts
        backbone = load_backbone("miniature")
        tables = [measure_work(backbone, scorer, prompts, plan, shard) for shard in reversed(shards)]
        order = np.random.default_rng(parts).permutation(parts)
        merged.append(ScoreTable.merge([plan.empty(), *(tables[place] for place in order)]))
    assert same_bits(merged[0], merged[1])
    assert same_bits(merged[0], merged[2])
    curves = [profile_from_scores(plan, table).curves for table in merged]
    assert curves[0] == curves[1] == curves[2]
    whole = measure_profile(backbone, scorer, prompts, estimator, seed=7)
    assert whole.curves == curves[0]
    assert plan.next(merged[0]) is None


class Files(NullObserver):
    def __init__(self) -> None:
        self.files: list[tuple[str, str, ScoreTable, Any]] = []

    def file(self, kind: str, name: str, path: Path, metadata: Any) -> None:  # type: ignore[override]
        self.files.append((kind, name, ScoreTable.load(path), metadata))


def test_a_shard_is_a_kind_of_job(prompts: list[Prompt], estimator: EstimatorConfig, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(miniature.prompt_file("train").read_bytes())
    config = ProfileConfig("miniature", REWARDS, "pset_x", estimator=estimator, seed=7)
    plan = Plan.of(estimator, REWARDS, prompts, 7)
    work = plan.next(plan.empty())
    assert work is not None
    shard = plan.split(work, 5)[4]
    request = Request("profile_shard", configs.dump(config), path, work=shard.to_dict())
    request.save(tmp_path / "request.json")
    observer = Files()
    result = run(Request.load(tmp_path / "request.json"), tmp_path, observer)
    assert result == {"round": 0, "shard": 4}
    [(kind, name, table, facts)] = observer.files
    assert (kind, name, facts) == ("scores", "scores.safetensors", {"round": 0, "shard": 4})
    measured = np.isfinite(table.clean[0]).any(axis=1)
    assert np.nonzero(measured)[0].tolist() == list(shard.rows) == [8, 9]
    assert table.cost["model_evaluations"] == 2 * 3 * (2 + 2 + 2) == plan.model_evaluations(shard)
    with pytest.raises(ConfigError, match="work"):
        run(Request("profile_shard", configs.dump(config), path), tmp_path, observer)


def test_work_and_plan_by_hand(prompts: list[Prompt]) -> None:
    config = EstimatorConfig(
        prompts=10, images_per_prompt=12, levels=4, sampling_steps=10, rollouts=3, anchor=True
    )
    plan = Plan.of(config, REWARDS, prompts, 0)
    work = plan.next(plan.empty())
    assert work == Work(0, 0, tuple(range(10)), (0, 12), (3, 3, 3))
    assert Work.from_dict(json.loads(json.dumps(work.to_dict()))) == work
    assert plan.groups(work) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert [part.rows for part in plan.split(work, 2)] == [(0, 1, 2, 3), (4, 5, 6, 7, 8, 9)]
    assert [part.shard for part in plan.split(work, 64)] == [0, 1, 2, 3, 4]
    # Levels 1 - (2/3)^1.5, 1 - (1/3)^1.5 and 1: 0.456, 0.808, 1: 5 + 9 + 10 steps.
    assert plan.model_evaluations(work) == 10 * 12 * (10 + 3 * 24)
    assert work.images == 10 * 12 * (1 + 9)


@pytest.mark.parametrize("data", [{}, {"round": 0, "shard": 0, "rows": [0], "columns": [1], "rollouts": []}])
def test_other_data_is_no_work(data: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="not the work"):
        Work.from_dict(data)


def table_of(rng: np.random.Generator, rows: list[int], images: int, seconds: float) -> ScoreTable:
    table = ScoreTable.empty(2, 3, 6, images, 1, rounds=1)
    table.clean[:, rows] = rng.normal(size=(2, len(rows), images))
    table.rollouts[:, :, rows] = rng.normal(size=(2, 2, len(rows), images, 1))
    cost = {"model_evaluations": 3, "reward_calls": 1, "proposal_images": 0, "device_seconds": seconds}
    return ScoreTable(table.clean, table.rollouts, table.proposals, np.array([1, 0]), 1, cost)


def test_merging_is_exact_and_order_free() -> None:
    rng = np.random.default_rng(0)
    tables = [table_of(rng, rows, 4, 0.1) for rows in ([0, 3], [1], [2, 4, 5])]
    there, back = ScoreTable.merge(tables), ScoreTable.merge(tables[::-1])
    assert same_bits(there, back)
    assert there.cost == back.cost
    assert there.cost["device_seconds"] == pytest.approx(0.3)
    assert there.cost["model_evaluations"] == 9
    np.testing.assert_array_equal(there.failed, [3, 0])
    np.testing.assert_array_equal(there.clean[:, [1]], tables[1].clean[:, [1]])
    assert np.isfinite(there.clean).all()


def test_later_rounds_add_images_and_never_measure_twice() -> None:
    rng = np.random.default_rng(1)
    first, more = table_of(rng, [0, 1, 2, 3, 4, 5], 4, 0.1), ScoreTable.empty(2, 3, 6, 6, 2, rounds=2)
    more.clean[:, :, 4:] = 1.0
    whole = ScoreTable.merge([more, first])
    assert whole.rollouts.shape == (2, 2, 6, 6, 2)
    assert whole.rounds == 2
    np.testing.assert_array_equal(whole.clean[:, :, :4], first.clean)
    with pytest.raises(InvalidArgument, match="twice"):
        ScoreTable.merge([first, first])
    with pytest.raises(InvalidArgument, match="different plans"):
        ScoreTable.merge([first, ScoreTable.empty(2, 3, 7, 4, 1)])
    with pytest.raises(InvalidArgument, match="at least one"):
        ScoreTable.merge([])


def test_tables_survive_the_disk_bit_for_bit(tmp_path: Path) -> None:
    table = table_of(np.random.default_rng(2), [0, 5], 3, 0.125)
    table.save(tmp_path / "scores.safetensors")
    loaded = ScoreTable.load(tmp_path / "scores.safetensors")
    assert same_bits(table, loaded)
    assert (loaded.rounds, loaded.cost) == (1, table.cost)
    (tmp_path / "other").write_text("{}")
    with pytest.raises(InvalidArgument, match="other is not a table"):
        ScoreTable.load(tmp_path / "other")
