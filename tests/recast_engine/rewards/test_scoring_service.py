"""The scoring service: beside the caller, in order, counted, and stopped by a reward that keeps failing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from recast_engine.errors import RewardFailure
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.scoring import Scorer, load_scorer
from recast_engine.rewards.service import ScoringService, begin, joined

PROMPTS = [Prompt(str(i), text="GO" if i % 2 else None) for i in range(8)]


def images(offset: int = 0) -> np.ndarray:
    return np.stack([np.full((4, 4, 3), offset + i, np.uint8) for i in range(8)])


class Fake:
    def __init__(self, id, score=None, lane="device"):
        self.id, self.lane, self.calls = id, lane, []
        self._score = score or (lambda images, prompts: images[:, 0, 0, 0].astype(float))

    def score(self, images, prompts):
        self.calls.append((threading.current_thread().name, len(images)))
        return self._score(images, prompts)


def test_the_service_gives_what_the_scorer_gives():
    scorer = Scorer([Fake("clipscore"), Fake("ocr", lane="cpu")])
    expected = scorer(images(), PROMPTS)
    with ScoringService(scorer, device="cuda") as service:
        scores = service(images(), PROMPTS)
    np.testing.assert_array_equal(scores.values, expected.values)
    np.testing.assert_array_equal(scores.applicable, expected.applicable)
    assert scores.rewards == expected.rewards == service.rewards
    assert scores.errors == ("", "")


def test_submitting_does_not_wait_and_batches_keep_their_order():
    gate = threading.Event()

    def wait(images, prompts):
        assert gate.wait(5)
        return images[:, 0, 0, 0].astype(float)

    reward = Fake("clipscore", wait)
    with ScoringService(Scorer([reward])) as service:
        pending = [service.submit(images(10 * k), PROMPTS) for k in range(3)]
        assert len(reward.calls) <= 1  # the first waits at the gate, and nothing overtakes it
        gate.set()
        values = [one.result().values[0, 0] for one in pending]
    assert values == [0, 10, 20]
    assert {name for name, _ in reward.calls} == {"scoring-device_0"}


def test_lanes_work_side_by_side_and_one_lane_in_turn():
    meeting = threading.Barrier(3)

    def meet(images, prompts):
        meeting.wait(5)  # breaks unless all three lanes are here at once
        return np.zeros(len(images))

    lanes = [("clipscore", "device"), ("ocr", "cpu"), ("pickscore", "remote")]
    with ScoringService(Scorer([Fake(id, meet, lane) for id, lane in lanes]), device="cuda") as service:
        scores = service(images(), [Prompt("x", text="GO")] * 8)
    assert scores.errors == ("", "", "")
    one, two = Fake("clipscore"), Fake("ocr", lane="cpu")
    with ScoringService(Scorer([one, two]), device="cpu") as service:
        service(images(), PROMPTS)
    assert one.calls[0][0] == two.calls[0][0] == "scoring-device_0"


def test_scoring_goes_on_while_the_caller_works():
    begun = threading.Event()

    def tell(images, prompts):
        begun.set()
        return images[:, 0, 0, 0].astype(float)

    with ScoringService(Scorer([Fake("clipscore", tell)])) as service:
        first = begin(service, images(), PROMPTS)
        assert begun.wait(5)  # nobody has asked for the result yet
        second = begin(service, images(8), PROMPTS)
        scores = joined([first(), second()])
    np.testing.assert_array_equal(scores.values, [np.arange(16)])


def test_a_scorer_without_threads_scores_at_once():
    reward = Fake("clipscore")
    waiting = begin(Scorer([reward]), images(), PROMPTS)
    assert len(reward.calls) == 1
    assert waiting().values[0, 3] == 3


def test_a_reward_that_keeps_failing_ends_the_job_with_its_error():
    def broken(images, prompts):
        raise RewardFailure("the server answered 500")

    with ScoringService(Scorer([Fake("clipscore", broken), Fake("hpsv2")])) as service:
        for _ in range(3):
            scores = service(images(), PROMPTS)  # 24 images are too few to tell
            assert scores.failed.sum() == 8
        with pytest.raises(
            RewardFailure, match="clipscore failed on 32 of 32 images: the server answered 500"
        ):
            service(images(), PROMPTS)
        assert service.tallies["hpsv2"].failed == 0


def test_a_share_of_failures_below_the_limit_is_masked_and_counted():
    def one_of_eight(images, prompts):
        values = np.ones(len(images))
        values[0] = np.nan
        raise PartialFailure(values, "one batch timed out")

    with ScoringService(Scorer([Fake("clipscore", one_of_eight)])) as service:
        for _ in range(8):
            assert service(images(), PROMPTS).failed.sum() == 1
        tally = service.tallies["clipscore"]
    assert (tally.asked, tally.failed, tally.error) == (64, 8, "one batch timed out")


def test_views_share_the_tally():
    reward = Fake("clipscore", lambda i, p: np.full(len(i), np.nan))
    with ScoringService(Scorer([Fake("hpsv2"), reward])) as service:
        view = service.select(["clipscore"])
        assert view.rewards == ("clipscore",)
        for _ in range(3):
            view(images(), PROMPTS)
        with pytest.raises(RewardFailure, match="32 of 32 images: no finite score"):
            service(images(), PROMPTS)


def test_the_same_image_and_prompt_are_scored_once():
    reward = Fake("clipscore", lambda i, p: np.where(i[:, 0, 0, 0] == 3, np.nan, i[:, 0, 0, 0] + 0.5))
    with ScoringService(Scorer([reward]), cache=True) as service:
        first = service(images(), PROMPTS)
        again = service(images(), PROMPTS)
        assert [count for _, count in reward.calls] == [8, 1]  # only what failed is asked again
        np.testing.assert_array_equal(first.values, again.values)
        assert again.failed.sum() == 1
        shifted = service(images(1), PROMPTS)  # other pixels for the same prompts
        np.testing.assert_array_equal(shifted.values[0, :2], [1.5, 2.5])
        service(images(), [Prompt(f"{i}!") for i in range(8)])  # other prompts for the same pixels
        assert [count for _, count in reward.calls] == [8, 1, 8, 8]


def test_an_image_that_stands_twice_in_a_batch_is_scored_once():
    reward = Fake("clipscore", lambda i, p: np.where(i[:, 0, 0, 0] == 3, np.nan, i[:, 0, 0, 0] + 0.5))
    twice, prompts = np.concatenate([images(), images()]), PROMPTS * 2
    with ScoringService(Scorer([reward]), cache=True) as service:
        scores = service(twice, prompts)
    assert [count for _, count in reward.calls] == [8]
    np.testing.assert_array_equal(scores.values[0, :8], scores.values[0, 8:])
    assert scores.failed.sum() == 2  # both copies of the image without a score


def test_closing_lets_go_of_the_threads():
    service = ScoringService(Scorer([Fake("clipscore")]))
    service(images(), PROMPTS)
    service.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("scoring-")]


def test_the_miniatures_rewards_score_alike_inline_and_in_the_service():
    import random

    from recast_engine.miniature import world

    rng = random.Random(2)
    scenes = [world.sample_scene(rng) for _ in range(12)]
    pictures = world.render_many(scenes, rng)
    prompts = []
    for scene in scenes:
        row = scene.metadata()
        include = tuple(row.get("include", ()))
        prompts.append(Prompt(scene.caption, include=include, tag=row.get("tag")))
    scorer = load_scorer(["clipscore", "hpsv2", "geneval"], "miniature")
    inline = scorer(pictures, prompts)
    with ScoringService(scorer) as service:
        parts = [service.submit(pictures[k : k + 6], prompts[k : k + 6]) for k in (0, 6)]
        beside = joined([part.result() for part in parts])
    np.testing.assert_allclose(beside.values, inline.values, atol=1e-6)


@pytest.mark.parametrize("score", [1e39, -1e308, np.inf, np.nan])
def test_a_score_that_float32_cannot_hold_has_failed(score):
    """Its square would not even be a double, and the loss not finite."""
    values = np.linspace(0.0, 1.0, 8)
    values[3] = score
    scores = Scorer([Fake("clipscore", lambda i, p: values)])(images(), PROMPTS)
    assert scores.failed[0].tolist() == [place == 3 for place in range(8)]
    assert scores.errors == ("no finite score",)


def test_a_score_below_what_float32_can_hold_is_zero():
    values = np.array([5e-324, -1e-300, 0.0, 1e-30, 1.0, 2.0, 3.0, 4.0])
    scores = Scorer([Fake("clipscore", lambda i, p: values)])(images(), PROMPTS)
    assert scores.values[0].tolist() == [0.0, 0.0, *values[2:]]
    assert not scores.failed.any()
