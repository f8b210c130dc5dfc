"""The running profile of a training: curves from a window over the images that training draws anyway.

A *unit* is one prompt group of one epoch: the scores of all its images, and those of one stochastic rollout,
from one noise level, of a few of them. Units of the last epochs make up the window. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recast_engine.profiling.curves import tilt
from recast_engine.profiling.estimator import Moments, moments
from recast_engine.profiling.profile import Curve, Profile
from recast_engine.profiling.uncertainty import Measured

Array = NDArray[np.float64]

WINDOW_EPOCHS = 5
WINDOW_UNITS = 24
"""The window: units of the last ``WINDOW_EPOCHS`` epochs, and older ones up to ``WINDOW_UNITS`` a level."""

LARGEST_RATIO = 1.5  # of a noisy D(sigma) to D(0), which theory holds to 1

FEWEST_PROMPTS = 8
"""A reward's running curve is used only if it rests on so many prompts at every level; below that an
interval says little (``curves.FEW_PROMPTS`` warns of the same)."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One prompt group of one epoch.

    Attributes:
        epoch: epochs finished before it was drawn.
        prompt: which prompt; units of one prompt are not independent.
        level: inner noise level of the rollouts, 0 for the lowest.
        clean: (R, K) scores of the group's images, NaN where there is none.
        rollouts: (R, K) scores of their rollouts, NaN where there is none.
    """

    epoch: int
    prompt: int
    level: int
    clean: Array
    rollouts: Array


@dataclass(frozen=True, eq=False)
class Running(Measured):
    """One reward's moments in a window, whose curve is D(0) times what is left of it.

    D(0) comes from all images, the ratio D(sigma) / D(0) from those rolled out from sigma, so that what makes
    these few louder or quieter than all cancels. It is held to [0, ``LARGEST_RATIO``], and 0 where the images
    do not differ.

    ``levels`` are 1 + 2 (L - 2) moments: of all clean images; of the images rolled out from each inner level,
    with their rollouts; and of the same images alone.
    """

    @property
    def inner(self) -> int:
        """L - 2."""
        return (len(self.levels) - 1) // 2

    @property
    def prompts(self) -> int:
        """Usable prompts at the level where they are fewest."""
        return min(level.prompts for level in self.levels)

    @property
    def enough(self) -> bool:
        """Whether they are enough for a curve."""
        return self.prompts >= FEWEST_PROMPTS

    def divergence(self, weights: Array) -> Array:
        """(..., L - 1) curves under unit weights (..., U)."""
        values = super().divergence(weights)
        total, here, clean = np.split(values, [1, 1 + self.inner], axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.clip(here / clean, 0.0, LARGEST_RATIO)
        kept = np.where(clean > 0, ratio, np.where(np.isnan(clean), np.nan, 0.0))
        return np.concatenate([total, total * kept], axis=-1)

    def raw(self) -> Array:
        """(L - 1,) the curve."""
        return self.divergence(np.ones(len(self.spread.count)))

    def influence(self) -> Array:
        """(L - 1, U) as that of every ``Measured``."""
        total, here, clean = np.split(super().influence(), [1, 1 + self.inner])
        raw = self.raw()
        start = super().divergence(np.ones(len(self.spread.count)))[1 + self.inner :]
        ratio = raw[1:] / raw[0] if raw[0] > 0 else np.zeros(self.inner)
        safe = np.where(start > 0, start, np.inf)[:, None]
        change = (here - ratio[:, None] * clean) / safe
        return np.concatenate([total, ratio[:, None] * total + raw[0] * change])

    def standard_errors(self) -> Array:
        """(L - 1,) by the jackknife."""
        return np.asarray(np.sqrt((self.influence() ** 2).sum(axis=1)))


class Window:
    """The newest units of R rewards on L levels of which the L - 2 inner ones are rolled out from."""

    def __init__(
        self,
        rewards: Sequence[str],
        levels: Sequence[float],
        *,
        alpha: float,
        advantage_clip: float,
        units: Iterable[Unit] = (),
    ) -> None:
        self.rewards = tuple(rewards)
        self.levels = tuple(levels)
        self.alpha, self.advantage_clip = alpha, advantage_clip
        self.units: deque[Unit] = deque(units)

    @property
    def inner(self) -> int:
        """L - 2."""
        return len(self.levels) - 2

    def add(self, units: Iterable[Unit], epoch: int) -> None:
        """Add the units of ``epoch``; drop what is older than the window."""
        self.units.extend(units)
        while len(self.units) > WINDOW_UNITS * self.inner and self.units[0].epoch <= epoch - WINDOW_EPOCHS:
            self.units.popleft()

    def renewed_since(self, epoch: int) -> bool:
        """Whether the window is full, and nothing in it was drawn before ``epoch`` epochs were finished."""
        return len(self.units) >= WINDOW_UNITS * self.inner and self.units[0].epoch >= epoch

    def scores(self, reward: str) -> tuple[Array, Array]:
        """(P, V) clean and (L - 2, P, V, 1) rollout scores with one row per prompt, NaN where there is none.

        Groups of one prompt from several epochs stand side by side, each moved to the prompt's common mean:
        what the policy gained between them is no spread within the prompt.
        """
        row = self.rewards.index(reward)
        groups: dict[int, list[Unit]] = {}
        for unit in self.units:
            groups.setdefault(unit.prompt, []).append(unit)
        images = self.units[0].clean.shape[1]
        visits = max(map(len, groups.values()))
        clean = np.full((len(groups), visits, images), np.nan)
        rollouts = np.full((self.inner, len(groups), visits, images), np.nan)
        for prompt, members in enumerate(groups.values()):
            for visit, unit in enumerate(members):
                clean[prompt, visit] = unit.clean[row]
                rollouts[unit.level, prompt, visit] = unit.rollouts[row]
        shift = _mean(clean, (1, 2)) - _mean(clean, (2,))
        flat = (len(groups), visits * images)
        return (clean + shift).reshape(flat), (rollouts + shift).reshape(self.inner, *flat, 1)

    def running(self, reward: str) -> Running | None:
        """The reward's moments in the window; None for an empty window."""
        if not self.units:
            return None
        clean, rollouts = self.scores(reward)
        rolled = [np.isfinite(level[..., 0]) for level in rollouts]

        def levels_at(clip: float) -> list[Moments]:
            start, later = tilt(clean, rollouts, clip)
            images = [np.where(chosen, start, np.nan) for chosen in rolled]
            pairs = [
                (start, start),
                *((start, level[..., 0]) for level in later),
                *zip(images, images, strict=True),
            ]
            return [
                moments(np.stack(pair, axis=2), self.alpha, centred=True, unit="prompts") for pair in pairs
            ]

        return Running.of(levels_at, self.advantage_clip, clean)


def with_curves(reference: Profile, curves: Mapping[str, Curve], window: Window) -> Profile:
    """``reference`` with some curves replaced by those of ``window``; its ``config`` says which and when."""
    epochs = (window.units[0].epoch, window.units[-1].epoch + 1)
    running = {reward: list(epochs) for reward in curves}
    config = {**reference.config, "running": {**reference.config.get("running", {}), **running}}
    kept = {reward: curves.get(reward, curve) for reward, curve in reference.curves.items()}
    return Profile(reference.rewards, reference.levels, kept, config=config)


def _mean(values: Array, axes: tuple[int, ...]) -> Array:
    """Mean over ``axes``, kept, of the finite values; 0 over none."""
    finite = np.isfinite(values)
    total = np.where(finite, values, 0.0).sum(axis=axes, keepdims=True)
    return np.asarray(total / np.maximum(finite.sum(axis=axes, keepdims=True), 1))
