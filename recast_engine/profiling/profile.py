"""A measured profile: how much of each reward's discriminability survives at each noise level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator

from recast_engine.errors import InvalidArgument

Array = NDArray[np.float64]
Series = tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """D(sigma) of one reward on the profile's L levels, in nats (METHOD section 4).

    Attributes:
        divergence: cleaned: non-increasing in sigma, >= 0, and 0 at sigma = 1.
        divergence_raw: as estimated; exactly 0 at sigma = 1, which needs no measurement.
        standard_error: of the raw values, by the jackknife over prompts.
        ci_low, ci_high: 95% bootstrap interval of the cleaned values.
        gain, gain_low, gain_high: (L - 1,) D(levels[l]) - D(levels[l+1]) with its 95% bootstrap interval.
        total: D(0).
        max_violation_se: largest rise of the raw curve with sigma, in standard errors of the rise.
        prompts, images: how many the estimate rests on, at the level where they are fewest.
        survival_error: standard error of D(sigma) / D(0), raw values, by the jackknife over prompts: what the
            levels share cancels. Empty in profiles measured before it was recorded.
    """

    divergence: Series
    divergence_raw: Series
    standard_error: Series
    ci_low: Series
    ci_high: Series
    gain: Series
    gain_low: Series
    gain_high: Series
    total: float
    max_violation_se: float
    prompts: int
    images: int
    survival_error: Series = ()


@dataclass(frozen=True)
class Profile:
    """Curves of R rewards on common noise levels, with what they cost and how they were measured.

    Attributes:
        rewards: ids, in row order of ``gains``.
        levels: noise levels, ascending from 0 to 1.
        curves: one per reward.
        warnings: texts for people.
        cost: ``model_evaluations``, ``reward_calls``, ``proposal_images``, ``device_seconds``.
        config: the estimator's settings and the seed.
    """

    rewards: tuple[str, ...]
    levels: Series
    curves: Mapping[str, Curve]
    warnings: tuple[str, ...] = ()
    cost: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def totals(self) -> dict[str, float]:
        """D(0) of every reward."""
        return {reward: self.curves[reward].total for reward in self.rewards}

    def summary(self) -> dict[str, Any]:
        """The short result of the job that measured it."""
        return {"rewards": list(self.rewards), "totals": self.totals, "warnings": list(self.warnings)}

    def divergence(self, sigmas: ArrayLike) -> Array:
        """Cleaned D between the levels too, by monotone cubic interpolation (PCHIP).

        (S,) noise levels in [0, 1] -> (R, S).
        """
        points = np.asarray(sigmas, dtype=np.float64)
        if points.ndim != 1 or not np.all((points >= 0) & (points <= 1)):
            raise InvalidArgument("sigmas must be a list of noise levels in [0, 1]")
        rows = [PchipInterpolator(self.levels, self.curves[r].divergence)(points) for r in self.rewards]
        return np.asarray(rows, dtype=np.float64)

    def gains(self, sigmas: ArrayLike) -> Array:
        """g[i,t] = D_i(sigma_{t+1}) - D_i(sigma_t) >= 0 for a sampler's noise levels.

        Args:
            sigmas: (T + 1,) strictly descending, as the sampler visits them (1 first, 0 last).

        Returns:
            (R, T); each row sums to D_i(last) - D_i(first).

        Raises:
            InvalidArgument: sigmas of another form.
        """
        points = np.asarray(sigmas, dtype=np.float64)
        if points.ndim != 1 or len(points) < 2 or not np.all(np.diff(points) < 0):
            raise InvalidArgument("sigmas must be at least two strictly descending noise levels")
        gains: Array = np.maximum(np.diff(self.divergence(points), axis=1), 0.0)
        return gains

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; ``from_dict`` inverts it exactly."""
        return {
            "rewards": list(self.rewards),
            "levels": list(self.levels),
            "curves": {reward: _listed(asdict(curve)) for reward, curve in self.curves.items()},
            "warnings": list(self.warnings),
            "cost": dict(self.cost),
            "config": dict(self.config),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Read what ``to_dict`` wrote. Raises InvalidArgument when it is something else."""
        try:
            curves = {reward: Curve(**_tupled(curve)) for reward, curve in data["curves"].items()}
            return cls(
                rewards=tuple(data["rewards"]),
                levels=tuple(data["levels"]),
                curves=curves,
                warnings=tuple(data["warnings"]),
                cost=dict(data["cost"]),
                config=dict(data["config"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"not a profile: {error}") from None


def _listed(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def _tupled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
