"""The running profile's window and the drift test, on simulated scores whose curves are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from recast_engine.profiling import Curve, Profile, uncertainty
from recast_engine.profiling.curves import curve_of, estimate_curve
from recast_engine.profiling.drift import FALSE_ALARMS, Drift, drift
from recast_engine.profiling.estimator import moments
from recast_engine.profiling.levels import noise_levels
from recast_engine.profiling.running import (
    FEWEST_PROMPTS,
    WINDOW_UNITS,
    Unit,
    Window,
    with_curves,
)

Array = NDArray[np.float64]
Shape = Callable[[Array], Array]

LEVELS = noise_levels(5)
SIGMAS = np.array(LEVELS[1:-1])
REWARDS = ("early", "late")
CLIP = 5.0
KINDS: dict[str, Shape] = {
    "normal": lambda x: x,
    "bounded": lambda x: 1 / (1 + np.exp(-2 * x)),
    "skewed": lambda x: np.exp(0.8 * x),
}


def survival(power: float) -> Array:
    """What is left of D(0) at the inner levels, for a reward that reads this power of a Gaussian's."""
    return np.array(((1 - SIGMAS) ** 2 / ((1 - SIGMAS) ** 2 + SIGMAS**2)) ** power)


TIMING = (survival(0.5), survival(2.0))


def simulate(
    rng: np.random.Generator,
    groups: int,
    images: int,
    timing: Sequence[Array],
    *,
    between: float = 1.0,
    shape: Shape = KINDS["normal"],
) -> tuple[Array, Array]:
    """(R, P, K) clean and (R, L - 2, P, K) rollout scores: rho_l is the correlation of score and rollout.

    Prompts differ in mean (standard deviation ``between``) and spread (log-normal, 0.3).
    """
    size = (len(timing), groups, images)
    clean, fresh = rng.normal(size=(2, *size))
    mean = between * rng.normal(size=(len(timing), groups, 1))
    spread = np.exp(0.3 * rng.normal(size=(len(timing), groups, 1)))
    rolled = []
    for level in range(len(SIGMAS)):
        rho = np.array([row[level] for row in timing])[:, None, None]
        rolled.append(rho * clean + np.sqrt(1 - rho**2) * fresh)
        fresh = rng.normal(size=size)
    scores = mean[:, None] + spread[:, None] * np.stack(rolled, axis=1)
    return shape(mean + spread * clean), shape(scores)


def reference(rng: np.random.Generator, shape: Shape = KINDS["normal"], prompts: int = 48) -> Profile:
    """A profile measured as the service does by default: 8 images of every prompt at every level."""
    clean, rollouts = simulate(rng, prompts, 8, TIMING, shape=shape)
    found = {
        reward: estimate_curve(
            clean[row],
            rollouts[row][..., None],
            levels=LEVELS,
            alpha=2.0,
            advantage_clip=CLIP,
            rng=np.random.default_rng(0),
        )
        for row, reward in enumerate(REWARDS)
    }
    return Profile(REWARDS, LEVELS, found)


def units(
    rng: np.random.Generator,
    epoch: int,
    count: int,
    timing: Sequence[Array],
    *,
    images: int = 8,
    rolled: int = 4,
    first_prompt: int | None = None,
    shape: Shape = KINDS["normal"],
) -> list[Unit]:
    """Units of one epoch, each of a new prompt and rolled out from the next level."""
    clean, rollouts = simulate(rng, count, images, timing, shape=shape)
    rollouts[..., rolled:] = np.nan
    start = epoch * count if first_prompt is None else first_prompt
    return [
        Unit(epoch, start + k, k % len(SIGMAS), clean[:, k], rollouts[:, k % len(SIGMAS), k])
        for k in range(count)
    ]


def window() -> Window:
    return Window(REWARDS, LEVELS, alpha=2.0, advantage_clip=CLIP)


def stage_alarms(
    rng: np.random.Generator,
    looks: int,
    timing: Sequence[Array],
    shape: Shape = KINDS["normal"],
    per_epoch: int = 15,
) -> tuple[str, ...]:
    """What a stage of ``looks`` looks finds, against a profile of its own."""
    profile, running, made, since = reference(rng, shape), window(), 0, 0
    for epoch in range(looks * 5):
        running.add(units(rng, epoch, per_epoch, timing, shape=shape), epoch)
        if running.renewed_since(since):
            made, since = made + 1, epoch + 1
            if found := drift(running, profile, REWARDS).drifted(made):
                return found
    assert made == looks
    return ()


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drift test uses no bootstrap; only references and running curves draw one."""
    monkeypatch.setattr(uncertainty, "RESAMPLES", 20)


def test_a_stage_without_drift_is_rarely_touched() -> None:
    """60 stages of 6 looks; the promise is at most 5%."""
    rng = np.random.default_rng(0)
    alarms = sum(bool(stage_alarms(rng, 6, TIMING)) for _ in range(60))
    assert alarms <= FALSE_ALARMS * 60


def test_drift_is_found_and_named() -> None:
    """The late reward is decided earlier from the stage's start on; the early one stays as it was."""
    rng = np.random.default_rng(1)
    moved = (TIMING[0], survival(0.7))
    found = [stage_alarms(rng, 6, moved, per_epoch=40) for _ in range(20)]
    assert sum("late" in names for names in found) >= 16
    assert sum("early" in names for names in found) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_false_alarm_rate_of_rewards_of_all_shapes(kind: str) -> None:
    rng = np.random.default_rng(2)
    stages = 400
    alarms = sum(bool(stage_alarms(rng, 10, TIMING, KINDS[kind])) for _ in range(stages))
    assert alarms / stages <= FALSE_ALARMS


def test_a_total_that_collapses_is_found_though_timing_stays() -> None:
    """All images of a prompt score almost alike: the spread that is left is between prompts."""
    rng = np.random.default_rng(3)
    profile, running = reference(rng), window()
    for epoch in range(5):
        made = units(rng, epoch, 15, TIMING)
        for unit in made:
            unit.clean[0], unit.rollouts[0] = (
                unit.clean[0].mean() + 0.2 * (values - unit.clean[0].mean())
                for values in (unit.clean[0].copy(), unit.rollouts[0].copy())
            )
        running.add(made, epoch)
    found = drift(running, profile, REWARDS)
    assert found.totals["early"] < 0.3 * profile.totals["early"]
    assert found.drifted(1) == ("early",)


def test_looks_share_the_false_alarms() -> None:
    found = Drift({}, {}, {"a": 0.02, "b": 0.5})
    assert found.drifted(1) == ("a",)  # 0.05 / 2
    assert found.drifted(2) == ()  # 0.05 / 6
    assert sum(FALSE_ALARMS / (j * (j + 1)) for j in range(1, 10_000)) < FALSE_ALARMS


def test_the_running_curve_tends_to_the_profiles() -> None:
    """Of 4 images rolled out per prompt group, the curve agrees with the closed form within its errors."""
    rng = np.random.default_rng(4)
    running = window()
    running.add(units(rng, 0, 900, TIMING), 0)
    for row, reward in enumerate(REWARDS):
        found_moments = running.running(reward)
        assert found_moments is not None
        found = curve_of(found_moments, LEVELS, np.random.default_rng(0))
        raw, errors = np.array(found.divergence_raw), np.array(found.survival_error)
        assert np.all(np.abs(raw[1:-1] / raw[0] - TIMING[row]) < 3 * errors[1:-1])
        # within prompts 1.197 of the variance (exp(2 0.3^2)), between them 1: D = log(1 + share / 25)
        assert raw[0] == pytest.approx(np.log1p(1.197 / 2.197 / 25), rel=0.05)
        assert found.divergence[-1] == 0.0
        assert found.prompts == 300


def test_rollouts_of_some_images_are_corrected_for_the_centre_of_all() -> None:
    """Images a, b, c make the prompt's mean, a and b are rolled out to x and y: Cov / 3 is added, not / 2."""
    a, b, c, x, y = 0.8, 0.4, 0.3, 0.6, 0.5
    values = np.array([[[a, x], [b, y], [c, np.nan]]])
    found = moments(values, 2.0, centred=True, unit="prompts")
    same, different = (a * x + b * y) / 2, (a * y + b * x) / 2
    assert found.numerator[0] == pytest.approx(same + (same - different) / 3)
    assert found.denominator[0] == pytest.approx(different + (same - different) / 3)


def test_groups_of_one_prompt_are_one_unit_and_its_progress_is_no_spread() -> None:
    rng = np.random.default_rng(6)
    running = window()
    first = units(rng, 0, 30, TIMING, first_prompt=0)
    later = [
        Unit(1, unit.prompt, (unit.level + 1) % 3, unit.clean + 5.0, unit.rollouts + 5.0)
        for unit in units(rng, 1, 30, TIMING, first_prompt=0)
    ]
    running.add(first, 0)
    running.add(later, 1)
    found_moments = running.running("early")
    assert found_moments is not None
    assert [level.prompts for level in found_moments.levels] == [30, *[20] * 6]
    clean, rollouts = running.scores("early")
    np.testing.assert_allclose(clean[:, :8].mean(1), clean[:, 8:].mean(1))
    np.testing.assert_allclose(
        clean[0, 8:] - clean[0, :8], later[0].clean[0] - first[0].clean[0] - (clean_shift(later, first))
    )
    assert rollouts.shape == (3, 30, 16, 1)


def clean_shift(later: Sequence[Unit], first: Sequence[Unit]) -> float:
    return float(later[0].clean[0].mean() - first[0].clean[0].mean())


def test_the_window_keeps_its_epochs_and_enough_units() -> None:
    rng = np.random.default_rng(7)
    running = window()
    for epoch in range(20):
        running.add(units(rng, epoch, 6, TIMING), epoch)
    full = WINDOW_UNITS * 3
    assert len(running.units) == full  # 12 epochs of 6: more than the last 5 epochs
    assert running.renewed_since(8)
    assert not running.renewed_since(9)
    for epoch in range(20, 26):
        running.add(units(rng, epoch, 60, TIMING), epoch)
    assert {unit.epoch for unit in running.units} == {21, 22, 23, 24, 25}


def test_rewards_with_too_few_prompts_are_not_watched() -> None:
    rng = np.random.default_rng(8)
    profile, running = reference(rng), window()
    made = units(rng, 0, 3 * FEWEST_PROMPTS, TIMING)
    made[0].clean[1] = made[0].rollouts[1] = np.nan
    running.add(made, 0)
    assert set(drift(running, profile, REWARDS).p_values) == {"early"}
    assert drift(window(), profile, REWARDS) == Drift({}, {}, {})
    failing = running.running("late")
    assert failing is not None
    assert not failing.enough


def test_levels_that_no_image_was_rolled_out_from_yet() -> None:
    """A stage's first epochs can be too small to reach every level: nothing is known there, nothing fails."""
    rng, start = np.random.default_rng(3), window()
    start.add(units(rng, 0, 1, TIMING), 0)
    running = start.running(REWARDS[0])
    assert running is not None
    assert not running.enough
    assert np.isfinite(running.raw()).sum() <= 2  # the total, and the one level
    assert drift(start, reference(rng), REWARDS).totals == {}


def test_only_drifted_curves_are_replaced() -> None:
    rng = np.random.default_rng(9)
    profile, running = reference(rng), window()
    for epoch in range(5):
        running.add(units(rng, epoch, 15, TIMING), epoch)
    found_moments = running.running("late")
    assert found_moments is not None
    new: Curve = curve_of(found_moments, LEVELS, np.random.default_rng(0))
    mixed = with_curves(profile, {"late": new}, running)
    assert (mixed.curves["early"], mixed.curves["late"]) == (profile.curves["early"], new)
    assert mixed.config["running"] == {"late": [0, 5]}
    assert Profile.from_dict(mixed.to_dict()) == mixed
