"""The verdict in words, the page and the heatmap."""

from __future__ import annotations

import io
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

from recast_engine.evaluation import statistics, verdict
from recast_engine.evaluation.heatmap import heatmap_figure, heatmap_png, save_heatmap
from recast_engine.evaluation.report import render_report, strip


def difference(mean, low, high, p=0.001, wins=40, losses=8):
    return {
        "mean": mean, "low": low, "high": high, "prompts": 48, "images": 192, "wins": wins, "ties": 0,
        "losses": losses, "p_value": p,
    }  # fmt: skip


def summary(mean, failed=0):
    return {"mean": mean, "low": mean, "high": mean, "prompts": 48, "images": 192, "failed": failed}


def metric(base, tuned, diff, held_out=False, failed=0):
    direction = verdict.direction(diff, diff["p_value"])
    return {
        "objective": "appearance",
        "summary": "how it looks",
        "held_out": held_out,
        "higher_is_better": True,
        "prompts": 48,
        "baseline_std": 0.2,
        "means": {"base": summary(base), "tuned": summary(tuned, failed)},
        "differences": {"tuned": diff | {"p_holm": diff["p_value"], "direction": direction}},
    }


@pytest.fixture
def report():
    return {
        "subjects": ["base", "tuned"],
        "baseline": "base",
        "model": "miniature",
        "prompts": {"used": 48, "available": 96, "sha256": "ab" * 32},
        "images_per_subject": 192,
        "images_per_prompt": 4,
        "seeds": [0],
        "seed_rule": "a rule",
        "steps": 20,
        "solver": "euler",
        "metrics": {
            "geneval": metric(0.5, 0.62, difference(0.12, 0.08, 0.16, p=2e-6)),
            "ocr": metric(0.4, 0.41, difference(0.01, -0.02, 0.04, p=0.7)),
            "clipscore": metric(0.3, 0.28, difference(-0.02, -0.03, -0.01, wins=8, losses=40), failed=3),
            "hpsv2": metric(0.3, 0.31, difference(0.01, 0.002, 0.02, p=0.2)),
            "aesthetic": metric(6.0, 6.0, difference(0.0, -0.1, 0.1, p=1.0), held_out=True),
        },
        "objective": {
            "budgets": {"geneval": 0.5, "ocr": 0.5},
            "reference": {},
            "means": {"base": summary(0.0), "tuned": summary(0.3)},
            "differences": {"tuned": difference(0.3, 0.2, 0.4) | {"direction": "up"}},
            "contributions": {"tuned": {"geneval": 0.29, "ocr": -0.01}},
        },
        "diversity": {"base": {"mean": 0.3, "ratio": 1.0}, "tuned": {"mean": 0.29, "ratio": 0.97}},
        "provenance": {"base": {}, "tuned": {"recast.seed": "0"}},
        "config": {"steps": 20},
        "versions": {"torch": "2", "rapidocr": None},
        "cost": {"model_evaluations": 1, "reward_calls": 2, "proposal_images": 0, "device_seconds": 3.0},
    }


ALLOCATION = {
    "rewards": ["geneval", "ocr"],
    "budgets": {"geneval": 0.75, "ocr": 0.25},
    "matrix": [[0.5, 1.0, 0.75], [0.5, 0.0, 0.25]],
    "sigmas": [1.0, 0.8, 0.4, 0.0],
    "method": "recast",
}


@pytest.mark.parametrize(
    ("low", "high", "wins", "p", "expected"),
    [
        (0.1, 0.2, 70, 0.01, "up"),
        (-0.2, -0.1, 30, 0.01, "down"),
        (0.1, 0.2, 60, 0.2, "unclear"),
        (-0.1, 0.2, 70, 0.01, "unclear"),
        (-0.1, 0.2, 50, 0.5, "none"),
        (None, None, 70, 0.01, "none"),
        (0.1, 0.2, 60, None, "unclear"),
        (0.1, 0.2, 30, 0.01, "unclear"),  # a few large gains beside losses on most prompts
        (-0.2, -0.1, 70, 0.01, "unclear"),
    ],
)
def test_direction_takes_interval_and_test_together(low, high, wins, p, expected):
    assert verdict.direction({"low": low, "high": high, "wins": wins, "losses": 100 - wins}, p) == expected


def test_a_mean_against_most_prompts_is_no_clear_direction():
    """30 prompts gain 1, 70 lose 0.01: interval and sign test are both sure, of opposite things."""
    units = np.array([[1.0]] * 30 + [[-0.01]] * 70)
    found = statistics.paired_difference(units, np.zeros_like(units), seed=0)
    assert found.low == pytest.approx(0.2, abs=0.02)
    assert found.p_value == pytest.approx(7.85e-5, rel=1e-3)
    assert verdict.direction(asdict(found), found.p_value) == "unclear"


def test_verdict_says_what_is_supported(report):
    text, findings = verdict.write(report)
    assert findings[0]["tone"] == "good"
    assert "the weighted objective is higher: +0.3 (95% interval +0.2 to +0.4)" in text
    assert "higher on 40 of 48 prompts, lower on 8" in text
    assert "Clearly higher: geneval +0.12" in text
    assert "Clearly lower: clipscore −0.02" in text
    assert "No difference found: ocr +0.01" in text
    assert "not confirmed after correction for 5 metrics: hpsv2" in text
    assert "+0.002 to +0.02), higher on 40 of 48 prompts." in text
    assert "Held out from training, aesthetic 0" in text
    assert "3 scores of clipscore for “tuned”" in text
    assert "48 prompts and 192 images a subject" in text


@pytest.mark.parametrize(
    ("low", "high", "tone", "words"),
    [(-0.4, -0.1, "bad", "is lower"), (-0.1, 0.1, "neutral", "no difference found")],
)
def test_headline_does_not_flatter(report, low, high, tone, words):
    shown = report["objective"]["differences"]["tuned"]
    shown |= {"mean": (low + high) / 2, "low": low, "high": high}
    shown["direction"] = verdict.objective_direction(shown)
    _, findings = verdict.write(report)
    assert findings[0]["tone"] == tone
    assert words in findings[0]["text"]


def test_few_prompts_are_a_caveat(report):
    report["prompts"]["used"] = 8
    assert "with so few prompts" in verdict.write(report)[0]


def test_page_carries_every_figure(report):
    report["verdict"], report["findings"] = verdict.write(report)
    shown = {label: np.zeros((2, 4, 48, 48, 3), np.uint8) for label in ("base", "tuned")}
    prompts = ["a red circle", 'the word "A&B"']
    page = render_report(report, shown, prompts, [ALLOCATION | {"title": "stage 1"}])
    figures = ("+0.12", "40 / 0 / 8", "&lt; 0.001", "held out", "no difference")
    for text in (*figures, "stage 1", "A&amp;B"):
        assert text in page
    for label in ("With diffusers", "SHA-256", "Resolved configuration", "Adapter of tuned"):
        assert label in page
    assert page.count("data:image/png;base64,") == 2 * 2 + 1
    assert "StrictUndefined" not in page
    assert "None" not in page


def test_page_without_objective_or_allocation(report):
    report["objective"] = None
    report["verdict"], report["findings"] = verdict.write(report)
    shown = {label: np.zeros((1, 1, 300, 200, 3), np.uint8) for label in ("base", "tuned")}
    page = render_report(report, shown, ["x"])
    assert "weighted objective" not in page
    assert "Budgets and timing" not in page


def test_strip_reduces_large_images_and_keeps_small_ones():
    small = strip(np.random.default_rng(0).integers(0, 256, (3, 48, 48, 3), dtype=np.uint8))
    assert (small["width"], small["height"], small["count"]) == (3 * 48 + 2 * 2, 48, 3)
    large = strip(np.zeros((2, 512, 512, 3), np.uint8))
    assert (large["width"], large["height"]) == (2 * 192 + 2, 192)
    assert large["src"].startswith("data:image/webp")


def test_heatmap_shows_the_matrix(tmp_path):
    figure = heatmap_figure(ALLOCATION)
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), ALLOCATION["matrix"])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["geneval\nbudget 75%", "ocr\nbudget 25%"]
    assert {text.get_text() for text in axes.texts} == {"0.50", "1.00", "0.75", "0.00", "0.25"}
    as_list = heatmap_figure(ALLOCATION | {"budgets": [0.75, 0.25]})
    assert as_list.axes[0].get_yticklabels()[1].get_text() == "ocr\nbudget 25%"
    path = save_heatmap(ALLOCATION, tmp_path / "matrix.png")
    assert path.read_bytes() == heatmap_png(ALLOCATION)
    assert Image.open(path).width > 300


def test_heatmap_draws_the_demand_below():
    figure = heatmap_figure(ALLOCATION | {"diagnostics": {"demand": [1.5, 0.5, 1.0]}})
    assert [bar.get_height() for bar in figure.axes[1].patches] == [1.5, 0.5, 1.0]
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), ALLOCATION["matrix"])


def test_heatmap_of_many_steps_stays_readable():
    wide = {"rewards": ["a"], "budgets": [1.0], "matrix": [[1.0] * 40]}
    picture = Image.open(io.BytesIO(heatmap_png(wide)))
    assert picture.width <= 14 * 130
    assert len(heatmap_figure(wide).axes[0].texts) == 0
