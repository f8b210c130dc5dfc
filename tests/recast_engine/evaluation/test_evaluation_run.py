"""The whole evaluation: on a transparent fake model, and on a real tiny pipeline."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recast_engine import config as configs
from recast_engine.backbones.base import Conditioning
from recast_engine.config import EvaluationConfig, Subject
from recast_engine.errors import ConfigError
from recast_engine.evaluation import run
from recast_engine.evaluation.drawing import Plan, image_seed, pairwise_distance, spread_evenly
from recast_engine.observer import NullObserver, Stopped
from recast_engine.prompts import Prompt
from recast_engine.rewards.scoring import Scorer

PROMPTS = [Prompt(f"prompt {i}", text="WORD" if i % 2 else None) for i in range(10)]


class FakeBackbone:
    """Image = squashed noise + ``shift``: what is drawn depends on seed and adapter alone."""

    id = "fake"
    device = torch.device("cpu")
    dtype = torch.float32
    latent_shape = (3, 6, 8)

    def __init__(self):
        self.transformer = torch.nn.Identity()
        self.evaluations = 0
        self.shift = 0.0

    def encode_prompts(self, prompts):
        codes = torch.tensor([[float(p.split()[-1])] for p in prompts])
        return Conditioning(codes[:, None], codes)

    def sigmas(self, steps, shift=None):
        return torch.linspace(1, 0, steps + 1, dtype=torch.float64)

    def velocity(self, latents, sigma, conditioning):
        self.evaluations += len(latents)
        return torch.zeros_like(latents)

    def decode(self, latents):
        pixels = (torch.tanh(latents / 2) * 0.4 + 0.5 + self.shift).clamp(0, 1) * 255
        return pixels.permute(0, 2, 3, 1).round().to(torch.uint8).numpy()


class Brightness:
    id = "clipscore"

    def score(self, images, prompts):
        return images.reshape(len(images), -1).mean(axis=1) / 255


class Redness:
    """Applies to every other prompt; fails on the darkest images."""

    id = "ocr"

    def score(self, images, prompts):
        assert all(prompt.text == "WORD" for prompt in prompts)
        red = images[..., 0].reshape(len(images), -1).mean(axis=1) / 255
        return np.where(red < 0.5, np.nan, red)


class Constant:
    id = "aesthetic"

    def score(self, images, prompts):
        return np.full(len(images), 5.0)


class Recorder(NullObserver):
    def __init__(self, stop_after: int | None = None):
        self.files, self.phases, self.done, self.costs = [], [], [], []
        self._stop_after = stop_after

    def phase(self, name, total):
        self.phases.append((name, total))

    def advance(self, done):
        self.done.append(done)

    def file(self, kind, name, path, metadata):
        self.files.append((kind, name, Path(path), metadata))

    def cost(self, **values):
        self.costs.append(values)

    def should_stop(self):
        return self._stop_after is not None and len(self.done) >= self._stop_after


@pytest.fixture
def backbone(monkeypatch):
    @contextmanager
    def loaded_adapter(backbone, path):
        backbone.shift = 0.0 if path is None else float(path.read_text())
        yield backbone
        backbone.shift = 0.0

    monkeypatch.setattr(run, "loaded_adapter", loaded_adapter)
    monkeypatch.setattr(run, "_provenance", lambda adapter: {})
    return FakeBackbone()


@pytest.fixture
def adapters(tmp_path):
    brighter = tmp_path / "brighter"
    brighter.write_text("0.1")
    same = tmp_path / "same"
    same.write_text("0.0")
    return {"base": None, "brighter": brighter, "same": same}


def config(**changes):
    values = {
        "subjects": (
            Subject("base", base_model="fake"),
            Subject("brighter", adapter="adapt_1"),
            Subject("same", adapter="adapt_2"),
        ),
        "baseline": "base",
        "rewards": ("clipscore", "ocr", "aesthetic"),
        "prompt_set": "pset",
        "images_per_prompt": 2,
        "seeds": (0, 7),
        "steps": 3,
        "model": "fake",
        "objective": {"clipscore": 1.0, "ocr": 3.0},
    }
    return EvaluationConfig(**values | changes)


@pytest.fixture
def scorer():
    return Scorer([Brightness(), Redness(), Constant()])


def test_the_report_finds_what_was_planted(backbone, scorer, adapters, tmp_path):
    observer = Recorder()
    report = run.evaluate(backbone, scorer, PROMPTS, config(), adapters, observer=observer, workdir=tmp_path)
    assert json.loads(json.dumps(report, allow_nan=False)) == report

    bright = report["metrics"]["clipscore"]["differences"]["brighter"]
    assert bright["mean"] == pytest.approx(0.1, abs=0.005)
    assert 0.09 < bright["low"] < bright["high"] < 0.11
    assert (bright["wins"], bright["losses"], bright["prompts"], bright["images"]) == (10, 0, 10, 40)
    assert bright["p_value"] == pytest.approx(2 / 2**10)
    assert bright["p_holm"] == pytest.approx(3 * 2 / 2**10)
    assert bright["direction"] == "up"

    for metric in report["metrics"].values():
        same = metric["differences"]["same"]
        assert (same["mean"], same["wins"], same["losses"], same["p_holm"]) == (0.0, 0, 0, 1.0)
        assert same["direction"] == "none"
    assert report["objective"]["differences"]["brighter"]["low"] > 0
    assert report["objective"]["differences"]["same"]["mean"] == 0.0
    assert "“brighter” against “base”: the weighted objective is higher" in report["verdict"]
    assert "“same” against “base”: no difference found in the weighted objective" in report["verdict"]
    assert "Held out from training, aesthetic 0" in report["verdict"]
    assert report["verdict"] == " ".join(finding["text"] for finding in report["findings"])


def test_failed_and_inapplicable_scores_are_left_out_and_counted(backbone, scorer, adapters, tmp_path):
    report = run.evaluate(
        backbone, scorer, PROMPTS, config(), adapters, observer=NullObserver(), workdir=tmp_path
    )
    ocr = report["metrics"]["ocr"]
    base, bright = ocr["means"]["base"], ocr["means"]["brighter"]
    assert ocr["prompts"] == 5
    assert base["images"] + base["failed"] == 20
    assert base["failed"] > bright["failed"] == 0
    assert ocr["differences"]["brighter"]["images"] == base["images"]
    assert base["mean"] >= 0.5
    assert f"{base['failed']} scores of ocr for “base”" in report["verdict"]


def test_contributions_add_up_to_the_objectives_difference(backbone, scorer, adapters, tmp_path):
    report = run.evaluate(
        backbone, scorer, PROMPTS, config(), adapters, observer=NullObserver(), workdir=tmp_path
    )
    objective = report["objective"]
    assert objective["budgets"] == {"clipscore": 0.25, "ocr": 0.75}
    assert objective["means"]["base"]["mean"] == pytest.approx(0.0, abs=0.3)
    for label in ("brighter", "same"):
        parts = objective["contributions"][label]
        assert sum(parts.values()) == pytest.approx(objective["differences"][label]["mean"], abs=1e-12)


def test_progress_costs_and_files(backbone, scorer, adapters, tmp_path):
    observer = Recorder()
    report = run.evaluate(backbone, scorer, PROMPTS, config(), adapters, observer=observer, workdir=tmp_path)
    assert observer.phases == [("evaluating", 120)]
    assert observer.done == sorted(observer.done)
    assert observer.done[-1] == 120
    total = {
        key: sum(cost.get(key, 0) for cost in observer.costs) for key in ("model_evaluations", "reward_calls")
    }
    assert total == {"model_evaluations": 120 * 3, "reward_calls": 3 * (40 + 20 + 40)}
    assert report["cost"]["model_evaluations"] == total["model_evaluations"]
    assert report["cost"]["reward_calls"] == total["reward_calls"]
    assert report["cost"]["device_seconds"] > 0

    samples = [entry for entry in observer.files if entry[0] == "samples"]
    assert [entry[3]["label"] for entry in samples] == ["base", "brighter", "same"]
    _, _, path, metadata = samples[0]
    assert metadata["solver"] == "euler"
    assert (metadata["steps"], metadata["cell"], metadata["columns"]) == (3, [8, 6], 4)
    assert len(metadata["images"]) == 8 * 4
    assert Image.open(path).size == (4 * 8, 8 * 6)
    grid = np.asarray(Image.open(path))
    for number, image in enumerate(metadata["images"]):
        noise = torch.randn((1, 3, 6, 8), generator=torch.Generator().manual_seed(image["seed"]))
        y, x = divmod(number, 4)
        np.testing.assert_array_equal(grid[y * 6 : y * 6 + 6, x * 8 : x * 8 + 8], backbone.decode(noise)[0])
    assert observer.files[-1][:2] == ("report", "report.html")


def test_the_report_is_self_contained(backbone, scorer, adapters, tmp_path):
    observer = Recorder()
    run.evaluate(
        backbone,
        scorer,
        [Prompt("<script>alert(1)</script> 1"), Prompt("b 2")],
        config(),
        adapters,
        observer=observer,
        workdir=tmp_path,
    )
    page = observer.files[-1][2].read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<img") == page.count('alt="')


def test_every_allocation_of_a_refreshed_stage_is_titled_by_its_stage():
    facts = [{"stage": 0, "epoch": 0}, {"stage": 0, "epoch": 4}, {"stage": 1, "epoch": 6}]
    found = run._allocations({"base": {}, "tuned": {"recast.allocations": json.dumps(facts)}})
    assert [one["title"] for one in found] == [
        "tuned, stage 1, from epoch 1",
        "tuned, stage 1, from epoch 5",
        "tuned, stage 2, from epoch 7",
    ]


def test_the_same_request_gives_the_same_report(backbone, scorer, adapters, tmp_path):
    reports = [
        run.evaluate(backbone, scorer, PROMPTS, config(), adapters, observer=NullObserver(), workdir=tmp_path)
        for _ in range(2)
    ]
    for report in reports:
        report["cost"].pop("device_seconds")
    assert reports[0] == reports[1]


def test_stopping_leaves_in_good_order(backbone, scorer, adapters, tmp_path):
    observer = Recorder(stop_after=2)
    with pytest.raises(Stopped):
        run.evaluate(backbone, scorer, PROMPTS, config(), adapters, observer=observer, workdir=tmp_path)
    assert len(observer.done) == 2


def test_without_objective_and_with_one_image(backbone, scorer, adapters, tmp_path):
    one = config(objective=None, images_per_prompt=1, seeds=(3,), max_prompts=1)
    report = run.evaluate(backbone, scorer, PROMPTS, one, adapters, observer=NullObserver(), workdir=tmp_path)
    assert report["objective"] is None
    assert report["prompts"]["used"] == 1
    assert report["diversity"]["base"] == {"mean": None, "ratio": None}
    assert report["metrics"]["clipscore"]["differences"]["brighter"]["low"] is None
    assert report["metrics"]["ocr"]["means"]["base"]["mean"] is None
    assert "no clear difference found in any of 3 metrics" in report["verdict"]


def test_baseline_alone(backbone, scorer, tmp_path):
    alone = config(subjects=(Subject("base", base_model="fake"),))
    report = run.evaluate(
        backbone, scorer, PROMPTS, alone, {"base": None}, observer=NullObserver(), workdir=tmp_path
    )
    assert "nothing to compare" in report["verdict"]
    assert report["metrics"]["clipscore"]["means"]["base"]["images"] == 40


def test_bad_requests(backbone, scorer, adapters, tmp_path):
    where = {"observer": NullObserver(), "workdir": tmp_path}
    with pytest.raises(ConfigError, match="hpsv2"):
        run.evaluate(backbone, scorer, PROMPTS, config(objective={"hpsv2": 1.0}), adapters, **where)
    with pytest.raises(ConfigError, match="same"):
        run.evaluate(backbone, scorer, PROMPTS, config(), {"base": None, "brighter": None}, **where)


def test_a_collapse_is_noticed(backbone, scorer, adapters, tmp_path, monkeypatch):
    decode = backbone.decode
    monkeypatch.setattr(backbone, "decode", lambda z: decode(z * (0.3 if backbone.shift else 1.0)))
    report = run.evaluate(
        backbone, scorer, PROMPTS, config(), adapters, observer=NullObserver(), workdir=tmp_path
    )
    assert report["diversity"]["base"]["ratio"] == 1.0
    assert report["diversity"]["brighter"]["ratio"] < 0.5
    assert "look for a collapse of variety" in report["verdict"]


def test_seeds_follow_the_written_rule_and_do_not_repeat():
    plan = Plan.of(PROMPTS, config(max_prompts=5))
    assert plan.indices == (0, 2, 4, 6, 8)
    assert plan.seeds.shape == (5, 4)
    rule = lambda s, p, i: int(np.random.SeedSequence((s, p, i)).generate_state(1)[0] >> 1)  # noqa: E731
    assert plan.seeds[2].tolist() == [rule(0, 4, 0), rule(0, 4, 1), rule(7, 4, 0), rule(7, 4, 1)]
    whole = Plan.of(PROMPTS, config())
    np.testing.assert_array_equal(whole.seeds[4], plan.seeds[2])
    drawn = {image_seed(s, p, i) for s in range(3) for p in range(50) for i in range(4)}
    assert len(drawn) == 600
    assert max(drawn) < 2**31


def test_even_choice():
    assert spread_evenly(10, 4) == [0, 2, 5, 7]
    assert spread_evenly(3, 8) == [0, 1, 2]
    assert spread_evenly(7, 7) == list(range(7))


def test_pairwise_distance_equals_the_mean_over_pairs():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    pairs = [(a, b) for a in range(5) for b in range(a)]
    squares = [((images[a] / 255 - images[b] / 255) ** 2).mean() for a, b in pairs]
    assert pairwise_distance(images) == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-5)
    assert pairwise_distance(np.repeat(images[:1], 3, axis=0)) == 0.0
    assert np.isnan(pairwise_distance(images[:1]))


def test_a_plain_pipeline_draws_the_same_images(tiny_pipeline, tmp_path):
    from diffusers import StableDiffusion3Pipeline

    from recast_engine.backbones.sd3 import SD3Backbone

    backbone = SD3Backbone.from_pretrained(
        str(tiny_pipeline), id="tiny", revision=None, resolution=16, device="cpu", dtype=torch.float32
    )
    prompts = [Prompt("a cat"), Prompt("two dogs")]
    alone = configs.load(
        EvaluationConfig,
        {
            "subjects": [{"label": "base", "base_model": "tiny"}],
            "baseline": "base",
            "rewards": ["clipscore"],
            "prompt_set": "pset",
            "images_per_prompt": 2,
            "steps": 4,
        },
    )
    observer = Recorder()
    run.evaluate(
        backbone, Scorer([Brightness()]), prompts, alone, {"base": None}, observer=observer, workdir=tmp_path
    )
    _, _, path, metadata = observer.files[0]
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        tiny_pipeline, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline(
        [image["prompt"] for image in metadata["images"]],
        num_inference_steps=metadata["steps"],
        guidance_scale=1.0,
        generator=[torch.Generator().manual_seed(image["seed"]) for image in metadata["images"]],
        max_sequence_length=0,
        output_type="np",
    ).images
    grid = np.asarray(Image.open(path)).astype(int)
    for number, image in enumerate((drawn * 255).round().astype(int)):
        y, x = divmod(number, metadata["columns"])
        cell = grid[y * 16 : y * 16 + 16, x * 16 : x * 16 + 16]
        assert np.abs(cell - image).max() <= 1
