"""Group-normalised advantages, above all where groups are degenerate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recast_engine.training import group_advantages, optimality, usable_samples

NAN = math.nan


def test_by_hand_global_scale() -> None:
    rewards = [1.0, 3.0, 10.0, 14.0]
    deviation = np.std(rewards)
    expected = np.array([-1.0, 1.0, -2.0, 2.0]) / deviation
    np.testing.assert_allclose(group_advantages(rewards, [7, 7, 2, 2]), expected, rtol=1e-12)


def test_by_hand_group_scale() -> None:
    values = group_advantages([1.0, 3.0, 10.0, 14.0], [0, 0, 1, 1], scale="group")
    np.testing.assert_allclose(values, [-1.0, 1.0, -1.0, 1.0], rtol=1e-12)


def test_rewards_are_normalised_on_their_own() -> None:
    rewards = np.array([[1.0, 3.0, 10.0, 14.0], [100.0, 300.0, 1000.0, 1400.0]])
    values = group_advantages(rewards, [0, 0, 1, 1])
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], group_advantages(torch.tensor(rewards[0]), [0, 0, 1, 1]))


@pytest.mark.parametrize("scale", ["global", "group"])
def test_failed_scores_are_left_out_of_every_statistic(scale: str) -> None:
    rewards = [1.0, NAN, 3.0, math.inf, 10.0, 14.0, -math.inf]
    values = group_advantages(rewards, [0, 0, 0, 0, 1, 1, 1], scale=scale)
    kept = group_advantages([1.0, 3.0, 10.0, 14.0], [0, 0, 1, 1], scale=scale)
    np.testing.assert_allclose(values[[0, 2, 4, 5]], kept, rtol=1e-12)
    assert values[[1, 3, 6]].tolist() == [0.0, 0.0, 0.0]
    usable = usable_samples(rewards, [0, 0, 0, 0, 1, 1, 1])
    assert usable.tolist() == [True, False, True, False, True, True, False]


@pytest.mark.parametrize("scale", ["global", "group"])
def test_dead_and_single_image_groups_are_exactly_zero(scale: str) -> None:
    rewards = [0.3, 0.3, 0.3, 0.9, 0.1, 0.5, 0.4, NAN]
    groups = [0, 0, 0, 1, 2, 2, 3, 3]
    values = group_advantages(rewards, groups, scale=scale)
    assert values[[0, 1, 2, 3, 6, 7]].tolist() == [0.0] * 6
    assert values[4] == -values[5] != 0.0
    assert usable_samples(rewards, groups).tolist() == [False] * 4 + [True] * 2 + [False] * 2


@pytest.mark.parametrize("scale", ["global", "group"])
@pytest.mark.parametrize("magnitude", [1.0, 21.7, 1e6, 1e-6])
def test_rounding_noise_is_not_a_preference(scale: str, magnitude: float) -> None:
    base = np.float32(magnitude)
    noisy = [base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(0)), base]
    assert (
        group_advantages(np.array(noisy, dtype=np.float32), [0, 0, 0, 0], scale=scale).tolist() == [0.0] * 4
    )


@pytest.mark.parametrize("scale", ["global", "group"])
@pytest.mark.parametrize("rewards", [[NAN, NAN], [math.inf, -math.inf], [1.0, 1.0], [0.0, 0.0], [5.0, NAN]])
def test_nothing_usable_gives_zeros(scale: str, rewards: list[float]) -> None:
    assert group_advantages(rewards, [0, 0], scale=scale).tolist() == [0.0, 0.0]
    assert not usable_samples(rewards, [0, 0]).any()


def test_empty_batches_keep_their_shape() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert group_advantages(torch.zeros(0, 3), [0, 0, 1]).shape == (0, 3)


@given(
    st.lists(
        st.tuples(st.one_of(st.floats(width=32), st.sampled_from([NAN, 0.0, 1.0])), st.integers(0, 3)),
        min_size=1,
        max_size=24,
    ),
    st.sampled_from(["global", "group"]),
)
def test_always_finite_and_centred(samples: list[tuple[float, int]], scale: str) -> None:
    rewards = [reward for reward, _ in samples]
    groups = torch.tensor([group for _, group in samples])
    values = group_advantages(rewards, groups, scale=scale)
    assert bool(torch.isfinite(values).all())
    usable = usable_samples(rewards, groups)
    assert not values[~usable].any()
    for group in groups.unique():
        assert abs(float(values[groups == group].sum())) < 1e-6


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        group_advantages([1.0, 2.0], [0, 0, 1])
    with pytest.raises(ValueError, match="scale"):
        group_advantages([1.0, 2.0], [0, 0], scale="none")  # type: ignore[arg-type]


def test_optimality() -> None:
    values = optimality(torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, 50.0]), 5.0)
    assert values.tolist() == [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]
