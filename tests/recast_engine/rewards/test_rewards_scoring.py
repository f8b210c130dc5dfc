"""The scorer keeps failures apart from bad scores, and asks no reward about prompts it cannot judge."""

from __future__ import annotations

import numpy as np
import pytest

from recast_engine import miniature
from recast_engine.errors import ConfigError, RewardFailure, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.catalogue import REWARDS
from recast_engine.rewards.scoring import Scorer, load_scorer

IMAGES = np.zeros((4, 8, 8, 3), np.uint8)
PROMPTS = [Prompt("a"), Prompt("b", text="B"), Prompt("c", text="C"), Prompt("d")]


class Fake:
    def __init__(self, id, score):
        self.id = id
        self._score = score

    def score(self, images, prompts):
        return self._score(images, prompts)


def fail(images, prompts):
    raise KeyError("no such weight")


def test_values_land_where_the_reward_applies():
    asked = []

    def spell(images, prompts):
        asked.extend(p.prompt for p in prompts)
        return np.array([0.25, 0.75])

    scores = Scorer([Fake("ocr", spell), Fake("clipscore", lambda i, p: np.arange(4.0))])(IMAGES, PROMPTS)
    assert asked == ["b", "c"]
    assert scores.rewards == ("ocr", "clipscore")
    np.testing.assert_array_equal(scores.values, [[np.nan, 0.25, 0.75, np.nan], [0, 1, 2, 3]])
    np.testing.assert_array_equal(scores.applicable, [[0, 1, 1, 0], [1, 1, 1, 1]])
    assert not scores.failed.any()
    assert (scores.seconds >= 0).all()


def test_a_raising_reward_is_masked_counted_and_logged(caplog):
    scores = Scorer([Fake("clipscore", fail), Fake("hpsv2", lambda i, p: np.ones(4))])(IMAGES, PROMPTS)
    assert np.isnan(scores.values[0]).all()
    np.testing.assert_array_equal(scores.failed, [[True] * 4, [False] * 4])
    assert "KeyError" in caplog.text
    assert "clipscore" in caplog.text


def test_non_finite_and_misshapen_scores_are_failures():
    infinite = Fake("clipscore", lambda i, p: np.array([1.0, np.inf, -np.inf, np.nan]))
    short = Fake("hpsv2", lambda i, p: np.ones(3))
    scores = Scorer([infinite, short])(IMAGES, PROMPTS)
    np.testing.assert_array_equal(scores.values[0], [1.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(scores.failed.sum(axis=1), [3, 4])


def test_partial_scores_of_another_shape_are_a_failure_of_the_batch():
    def partly(images, prompts):
        raise PartialFailure(np.zeros(len(images) + 1), "some failed")

    scores = Scorer([Fake("clipscore", partly), Fake("hpsv2", lambda i, p: np.ones(len(i)))])(IMAGES, PROMPTS)
    assert scores.failed.sum(1).tolist() == [len(IMAGES), 0]
    assert scores.errors == (f"{len(IMAGES)} images gave scores of shape ({len(IMAGES) + 1},)", "")


def test_a_reward_that_applies_nowhere_is_not_called():
    scores = Scorer([Fake("ocr", fail)])(IMAGES[:1], PROMPTS[:1])
    assert not scores.failed.any()
    assert np.isnan(scores.values).all()


def test_an_empty_batch_gives_empty_scores():
    scores = Scorer([Fake("clipscore", fail)])(IMAGES[:0], [])
    assert scores.values.shape == (1, 0)


@pytest.mark.parametrize(
    ("images", "prompts"),
    [(IMAGES.astype(np.float32), PROMPTS), (IMAGES[..., 0], PROMPTS), (IMAGES, PROMPTS[:3])],
)
def test_wrong_input_is_an_error_and_not_a_failed_score(images, prompts):
    with pytest.raises(ValueError, match="images"):
        Scorer([Fake("clipscore", fail)])(images, prompts)


def test_rewards_must_differ_and_be_known():
    with pytest.raises(ConfigError, match="differ"):
        Scorer([Fake("clipscore", fail), Fake("clipscore", fail)])
    with pytest.raises(ConfigError, match="unknown reward"):
        load_scorer(["beauty"], "miniature")


def test_missing_weights_name_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(miniature, "WEIGHTS", tmp_path)
    with pytest.raises(WeightsUnavailable, match=r"recast_engine\.miniature\.build"):
        load_scorer(["clipscore"], "miniature")


@pytest.mark.parametrize(
    ("reward", "remedy"),
    [
        ("clipscore", "hf download openai/clip-vit-large-patch14"),
        ("pickscore", "hf download yuvalkirstain/PickScore_v1"),
        ("hpsv2", "recast rewards convert hpsv2"),
        ("geneval", "hf download facebook/mask2former-swin-small-coco-instance"),
        ("imagereward", "recast rewards convert imagereward"),
        ("hpsv3", "recast rewards convert hpsv3 FILE --instruction FILE"),
        ("unifiedreward", "set RECAST_UNIFIEDREWARD_URL"),
    ],
)
def test_full_size_rewards_without_weights_name_the_remedy(reward, remedy, monkeypatch, tmp_path):
    monkeypatch.setenv("RECAST_REWARD_WEIGHTS", str(tmp_path))
    monkeypatch.delenv("RECAST_UNIFIEDREWARD_URL", raising=False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: None)
    assert remedy in str(REWARDS[reward].missing("public"))
    with pytest.raises(WeightsUnavailable, match=remedy):
        load_scorer([reward], "public")


def test_licences_are_those_of_the_published_weights():
    licences = {id: REWARDS[id].licence for id in REWARDS}
    assert licences["geneval"].startswith("CC-BY-NC-4.0")  # of every model in Mask2Former's zoo
    assert licences["aesthetic"].startswith("Apache-2.0")  # of the improved predictor; LAION's first is MIT
    assert licences["hpsv2"] == licences["imagereward"] == licences["ocr"] == "Apache-2.0"
    assert licences["hpsv3"] == "MIT"
    assert "weights: unknown" in licences["clipscore"]
    assert "weights: unknown" in licences["pickscore"]


def test_errors_are_told_without_what_other_libraries_say():
    def leak(images, prompts):
        raise OSError("/home/someone/secret.key")

    def own(images, prompts):
        raise RewardFailure("the server answered 500")

    def half(images, prompts):
        raise PartialFailure(np.array([1.0, np.nan, 1.0, 1.0]), "one batch timed out")

    scores = Scorer([Fake("clipscore", leak), Fake("hpsv2", own), Fake("pickscore", half)])(IMAGES, PROMPTS)
    assert scores.errors == ("OSError", "the server answered 500", "one batch timed out")
    np.testing.assert_array_equal(scores.failed.sum(axis=1), [4, 4, 1])


def test_composition_and_spelling_load_for_the_miniature():
    scorer = load_scorer(["geneval", "ocr"], "miniature")
    assert scorer.rewards == ("geneval", "ocr")
    circle = Prompt("a red circle", include=({"class": "circle", "count": 1, "color": "red"},))
    scores = scorer(np.full((1, 48, 48, 3), 90, np.uint8), [circle])
    np.testing.assert_array_equal(scores.values, [[0.0], [np.nan]])
    np.testing.assert_array_equal(scores.applicable, [[True], [False]])
