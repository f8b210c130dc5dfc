from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recast_engine.backbones.sampling import denoise_stochastic, initial_noise, sample
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import EstimatorConfig
from recast_engine.errors import ConfigError, RewardFailure
from recast_engine.observer import NullObserver, Stopped
from recast_engine.profiling import Profile, measure, renyi_self_tilted
from recast_engine.profiling.levels import noise_levels, rollout_steps
from recast_engine.profiling.measure import measure_profile
from recast_engine.profiling.plan import choose_prompts, image_seed
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Scores


def numbered(count: int, *, texts: int = 0, tag: str | None = None) -> list[Prompt]:
    """Prompts whose text is a small number, which the scorer adds to its scores."""
    return [
        Prompt(str(0.1 * (place % 3)), text="word" if place < texts else None, tag=tag)
        for place in range(count)
    ]


class Listener(NullObserver):
    def __init__(self, stop_after: int | None = None) -> None:
        self.phases: list[tuple[str, int]] = []
        self.done: list[int] = []
        self.costs: dict[str, float] = {}
        self.stop_after = stop_after

    def phase(self, name: str, total: int) -> None:
        self.phases.append((name, total))

    def advance(self, done: int) -> None:
        self.done.append(done)

    def cost(self, **amounts: Any) -> None:
        for name, amount in amounts.items():
            self.costs[name] = self.costs.get(name, 0) + amount

    def should_stop(self) -> bool:
        return self.stop_after is not None and len(self.done) >= self.stop_after


@pytest.fixture
def config() -> EstimatorConfig:
    return EstimatorConfig(prompts=6, images_per_prompt=4, levels=5, sampling_steps=8)


def test_measured_curves_agree_with_the_closed_form(backbone: Any, hermite: Any, retained: Any) -> None:
    """Cov(He_n, He_n') = rho^n: the whole chain, from sampling to the interval, against mathematics.

    The prompts' offsets 0, 0.1, 0.2 add their variance, 0.0067, to the global scale and nothing else.
    """
    config = EstimatorConfig(prompts=300, images_per_prompt=8, sampling_steps=10)
    profile = measure_profile(backbone, hermite([1, 2]), numbered(300, texts=300), config, seed=1)
    for order, reward in ((1, "hermite-1"), (2, "hermite-2")):
        curve = profile.curves[reward]
        exact = np.array([np.log1p(retained(s) ** order / 25 / 1.0067) for s in profile.levels])
        deviation = (np.array(curve.divergence_raw) - exact)[:-1] / np.array(curve.standard_error)[:-1]
        assert np.abs(deviation).max() < 3.5
        assert curve.max_violation_se < 3
        assert curve.total == pytest.approx(exact[0], rel=0.1)
    slow, fast = profile.gains(np.linspace(1, 0, 11))
    assert slow[:5].sum() / slow.sum() > fast[:5].sum() / fast.sum() + 0.1


def test_levels_share_their_random_numbers_so_gains_are_less_noisy(
    backbone: Any, hermite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """image_seed's claim: over ten seeds the scatter of inner gains is at most half of that without."""
    config = EstimatorConfig(prompts=24, images_per_prompt=8, levels=5, sampling_steps=6)

    def scatter() -> float:
        raw = [
            measure_profile(backbone, hermite([1]), numbered(24), config, seed=seed).curves["hermite-1"]
            for seed in range(10)
        ]
        return float(np.diff([curve.divergence_raw for curve in raw], axis=1)[:, 1:-1].std(axis=0).mean())

    shared = scatter()
    fresh = itertools.count()
    monkeypatch.setattr(measure, "image_seed", lambda *words: next(fresh))
    assert shared < 0.5 * scatter()


class Brightness:
    """Mean red of an image: what a pipeline's pixels are enough for."""

    rewards = ("brightness",)

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        return np.ones((1, len(prompts)), dtype=bool)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        values = images[..., 0].mean(axis=(1, 2))[None]
        return Scores(self.rewards, values, self.applicable(prompts), np.zeros(1))


def test_a_pipeline_of_the_real_classes_can_be_profiled(tiny_pipeline: Path) -> None:
    backbone = SD3Backbone.from_pretrained(str(tiny_pipeline), id="tiny")
    config = EstimatorConfig(prompts=12, images_per_prompt=6, levels=4, sampling_steps=4)
    prompts = [Prompt(letter) for letter in "abcdefghijkl"]
    profile = measure_profile(backbone, Brightness(), prompts, config, seed=0)
    curve = profile.curves["brightness"]
    assert curve.divergence_raw[0] > 3 * curve.standard_error[0] > 0
    assert curve.images == 72
    assert profile.gains(backbone.sigmas(10).numpy()).sum() == pytest.approx(curve.total)


def test_cost_and_progress_are_counted(backbone: Any, hermite: Any, config: EstimatorConfig) -> None:
    listener = Listener()
    profile = measure_profile(
        backbone, hermite([1, 2]), numbered(6, texts=2), config, seed=0, observer=listener, batch_size=10
    )
    images = 6 * 4
    steps = sum(rollout_steps(sigma, 8) for sigma in noise_levels(5)[1:-1])
    assert profile.cost["model_evaluations"] == images * (8 + steps) == backbone.evaluations
    assert profile.cost["reward_calls"] == (images + 2 * 4) * 4
    assert profile.cost["proposal_images"] == 0
    assert listener.costs["model_evaluations"] == profile.cost["model_evaluations"]
    assert listener.costs["reward_calls"] == profile.cost["reward_calls"]
    assert listener.costs["device_seconds"] == pytest.approx(profile.cost["device_seconds"])
    assert listener.phases == [("profiling", images * 4)]
    assert listener.done == sorted(listener.done)
    assert listener.done[-1] == images * 4


def test_batches_do_not_change_the_result(backbone: Any, hermite: Any, config: EstimatorConfig) -> None:
    profiles = [
        measure_profile(backbone, hermite([1]), numbered(6), config, seed=3, batch_size=size)
        for size in (5, 64)
    ]
    first, second = (np.array(profile.curves["hermite-1"].divergence_raw) for profile in profiles)
    np.testing.assert_allclose(first, second, atol=1e-7)


def test_the_seed_decides_everything(backbone: Any, hermite: Any, config: EstimatorConfig) -> None:
    def measured(seed: int) -> Any:
        return measure_profile(backbone, hermite([1]), numbered(9), config, seed=seed).curves

    assert measured(0) == measured(0)
    assert measured(0) != measured(1)


def test_any_image_can_be_drawn_again_alone(
    backbone: Any, hermite: Any, read_latents: Any, config: EstimatorConfig
) -> None:
    """The documented rule of seeds, followed by hand for one rollout of one image."""
    seen: list[np.ndarray] = []
    scorer = hermite([1])
    score = scorer.score
    scorer.score = lambda images, prompts: (seen.append(read_latents(images)), score(images, prompts))[1]
    prompts = numbered(6)
    measure_profile(backbone, scorer, prompts, config, seed=5)
    prompt, image, level = 4, 2, 1
    sigma = noise_levels(5)[1 + level]
    one = backbone.encode_prompts([prompts[prompt].prompt])
    clean = sample(backbone, one, [image_seed(5, "clean", prompt, image)], steps=8)
    noise = initial_noise(backbone, [image_seed(5, "noise", prompt, image)])
    rollout = denoise_stochastic(
        backbone,
        (1 - sigma) * clean + sigma * noise,
        sigma,
        one,
        [image_seed(5, "rollout", prompt, image)],
        steps=rollout_steps(sigma, 8),
    )
    place = prompt * 4 + image
    np.testing.assert_allclose(seen[0][place], clean.reshape(4), atol=1e-6)
    drawn = np.concatenate(seen[1:])  # level by level, in every level image by image
    np.testing.assert_allclose(drawn[level * 24 + place], rollout.reshape(4), atol=1e-6)


def test_profile_survives_json(backbone: Any, hermite: Any, config: EstimatorConfig) -> None:
    profile = measure_profile(backbone, hermite([1]), numbered(6), config, seed=0)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict(), allow_nan=False))) == profile
    assert profile.config["seed"] == 0
    assert profile.config["advantage_clip"] == 5.0


def test_more_rollouts_are_used(backbone: Any, hermite: Any) -> None:
    few, many = (
        measure_profile(
            backbone,
            hermite([1]),
            numbered(40),
            EstimatorConfig(prompts=40, images_per_prompt=8, levels=4, rollouts=rollouts, sampling_steps=6),
            seed=0,
        ).curves["hermite-1"]
        for rollouts in (1, 6)
    )
    assert many.standard_error[2] < 0.6 * few.standard_error[2]


def test_a_reward_is_left_out_where_it_does_not_apply(
    backbone: Any, hermite: Any, config: EstimatorConfig
) -> None:
    profile = measure_profile(backbone, hermite([1, 2]), numbered(6, texts=3), config, seed=0)
    assert profile.curves["hermite-1"].prompts == 6
    assert profile.curves["hermite-2"].prompts == 3
    assert any("hermite-2: only 3 prompts" in text for text in profile.warnings)


def test_a_reward_that_applies_nowhere_is_refused(
    backbone: Any, hermite: Any, config: EstimatorConfig
) -> None:
    with pytest.raises(ConfigError, match="hermite-2"):
        measure_profile(backbone, hermite([1, 2]), numbered(6), config, seed=0)
    assert backbone.evaluations == 0


def test_failed_scores_are_masked_and_reported(backbone: Any, hermite: Any) -> None:
    config = EstimatorConfig(prompts=40, images_per_prompt=8, levels=4, sampling_steps=6)
    whole = measure_profile(backbone, hermite([1]), numbered(40), config, seed=0).curves["hermite-1"]
    holed = measure_profile(backbone, hermite([1], fails_on=3), numbered(40), config, seed=0)
    assert any("scores failed" in text for text in holed.warnings)
    assert holed.curves["hermite-1"].total == pytest.approx(whole.total, rel=0.15)


def test_a_reward_that_always_fails_is_an_error(backbone: Any, hermite: Any, config: EstimatorConfig) -> None:
    scorer = hermite([1])
    scorer.score = lambda images, prompts: np.full((1, len(images)), np.nan)
    with pytest.raises(RewardFailure, match=r"hermite-1.*scores failed"):
        measure_profile(backbone, scorer, numbered(6), config, seed=0)


def test_stopping_is_in_good_order(backbone: Any, hermite: Any, config: EstimatorConfig) -> None:
    listener = Listener(stop_after=2)
    with pytest.raises(Stopped):
        measure_profile(backbone, hermite([1]), numbered(6), config, seed=0, observer=listener)
    assert listener.done == [24, 24 + 64]


def test_fewer_prompts_than_asked_for_are_all_used(
    backbone: Any, hermite: Any, config: EstimatorConfig
) -> None:
    profile = measure_profile(backbone, hermite([1]), numbered(4), config, seed=0)
    assert profile.config["prompts"] == 4
    assert "only 4 of the 6 prompts asked for are available" in profile.warnings


def test_prompts_are_drawn_in_proportion_to_their_kinds() -> None:
    prompts = numbered(60, tag="a") + numbered(30, tag="b") + numbered(10, tag="c")
    applicable = np.ones((1, 100), dtype=bool)
    for seed in range(20):
        places = choose_prompts(prompts, applicable, 20, seed)
        assert len(set(places)) == 20
        counts = [sum(prompts[place].tag == tag for place in places) for tag in "abc"]
        np.testing.assert_allclose(counts, [12, 6, 2], atol=1)
    assert choose_prompts(prompts, applicable, 20, 0) != choose_prompts(prompts, applicable, 20, 1)


def test_every_prompt_is_equally_likely() -> None:
    prompts = numbered(7, tag="a") + numbered(3, tag="b")
    drawn = np.zeros(10)
    for seed in range(4000):
        drawn[choose_prompts(prompts, np.ones((1, 10), dtype=bool), 4, seed)] += 1
    np.testing.assert_allclose(drawn / 4000, 0.4, atol=0.04)


@pytest.mark.parametrize("count", [3, 9, 64])
def test_levels_include_both_ends_and_are_denser_towards_noise(count: int) -> None:
    levels = np.array(noise_levels(count))
    assert levels[0] == 0.0
    assert levels[-1] == 1.0
    assert np.all(np.diff(levels) > 0)
    assert np.all(np.diff(np.diff(levels)) < 0)


def test_rollouts_take_their_share_of_the_steps() -> None:
    assert [rollout_steps(sigma, 10) for sigma in (0.05, 0.5, 0.51, 1.0)] == [2, 5, 6, 10]


def test_seeds_differ_in_every_part() -> None:
    roles = ("clean", "noise", "rollout")
    seeds = {
        image_seed(seed, role, prompt, image, rollout)
        for seed in (0, 1)
        for role in roles
        for prompt in range(3)
        for image in range(3)
        for rollout in range(2)
    }
    assert len(seeds) == 2 * 3 * 3 * 3 * 2
    assert max(seeds) < 2**32


def test_level_zero_is_the_estimator_on_the_images_themselves() -> None:
    """Where the rollout is the image, D is the log of the second moment over the squared mean."""
    clean = np.random.default_rng(0).uniform(0, 1, (1, 5000))
    estimate = renyi_self_tilted(clean, clean)
    assert estimate.value == pytest.approx(np.log((clean**2).mean() / clean.mean() ** 2), abs=1e-3)
    assert estimate.value == pytest.approx(np.log(4 / 3), abs=3 * estimate.standard_error)
