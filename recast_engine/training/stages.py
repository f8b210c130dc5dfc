"""What a stage trains on: its rewards, its prompts and its allocation over the denoising steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast_engine.allocation import allocate
from recast_engine.backbones.base import Backbone
from recast_engine.config import StageAllocation, StageConfig, TrainingConfig
from recast_engine.errors import ConfigError
from recast_engine.observer import Observer
from recast_engine.profiling import Profile
from recast_engine.profiling.measure import measure_profile
from recast_engine.prompts import Prompt
from recast_engine.training.adapters import OLD, AdapterSet
from recast_engine.training.rollouts import Scorer

BUDGET_TOLERANCE = 1e-6
"""How far a stored allocation's row sums, per step, may be from the stage's budgets."""


@dataclass(frozen=True)
class Stage:
    """A stage ready to train.

    Attributes:
        index: from 0.
        rewards: reward ids, the rows of ``matrix``.
        budgets: lambda, (R,) summing to 1.
        scorer: of these rewards, in this order.
        prompts: those that at least one reward with a budget can score.
    """

    index: int
    rewards: tuple[str, ...]
    budgets: NDArray[np.float64]
    scorer: Scorer
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Settled:
    """A stage's first allocation.

    Attributes:
        allocation: JSON data.
        profile: that it rests on; None for static weighting.
        measured: the stage, if its profile was measured for it; None: a given profile, or none at all.
    """

    allocation: dict[str, Any]
    profile: Profile | None
    measured: int | None


def prepare(index: int, config: StageConfig, scorer: Scorer, prompts: Sequence[Prompt]) -> Stage:
    """The stage's rewards and usable prompts.

    Raises:
        ConfigError: no prompt carries the metadata that some reward with a budget needs.
    """
    rewards = tuple(config.budgets)
    budgets = np.array([config.budgets[reward] for reward in rewards], dtype=np.float64)
    if not budgets.sum() > 0:
        raise ConfigError(f"stages[{index}].budgets: at least one must be positive")
    own = scorer.select(rewards)
    usable = own.applicable(prompts) & (budgets > 0)[:, None]
    for row, reward in enumerate(rewards):
        if budgets[row] > 0 and not usable[row].any():
            raise ConfigError(f"stages[{index}]: no prompt carries the metadata that {reward!r} needs")
    kept = tuple(prompts[place] for place in np.flatnonzero(usable.any(axis=0)).tolist())
    return Stage(index, rewards, budgets / budgets.sum(), own, kept)


def stored_allocation(
    stage: Stage, allocation: Mapping[str, Any], steps: int
) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """A stored allocation with its rows in the stage's order, and its matrix.

    Raises:
        ConfigError: it is for other rewards, steps or budgets.
    """
    where = f"stages[{stage.index}].allocation"
    rewards = list(allocation["rewards"])
    if sorted(rewards) != sorted(stage.rewards):
        raise ConfigError(f"{where}: is for rewards {rewards}, the stage has {list(stage.rewards)}")
    matrix = np.asarray(allocation["matrix"], dtype=np.float64)[[rewards.index(r) for r in stage.rewards]]
    if matrix.shape[1] != steps:
        raise ConfigError(f"{where}: is for {matrix.shape[1]} steps, sampling.steps is {steps}")
    if np.abs(matrix.mean(1) - stage.budgets).max() > BUDGET_TOLERANCE:
        raise ConfigError(f"{where}: its row sums are not the stage's budgets")
    return {**allocation, "rewards": list(stage.rewards), "matrix": matrix.tolist()}, matrix


def make_allocation(
    stage: Stage,
    backbone: Backbone,
    adapters: AdapterSet,
    options: StageAllocation,
    config: TrainingConfig,
    profiles: Mapping[str, Mapping[str, Any]],
    observer: Observer,
) -> Settled:
    """Allocate the stage's budgets by a profile: the named one, or one measured now.

    The profile is of the *old* policy, which draws the images that training scores. Static weighting needs
    none.
    """
    sigmas = backbone.sigmas(config.sampling.steps, config.sampling.shift).numpy()
    profile: Profile | None = None
    measured: int | None = None
    if options.method != "static":
        if options.profile is not None:
            if options.profile not in profiles:
                raise ConfigError(f"profile {options.profile!r} was not provided")
            profile = Profile.from_dict(dict(profiles[options.profile]))
        else:
            with adapters.using(OLD):
                profile = measure_profile(
                    backbone,
                    stage.scorer,
                    stage.prompts,
                    options.estimator,
                    seed=config.seed,
                    observer=observer,
                )
            observer.finding("profile", {"stage": stage.index, "profile": profile.to_dict()})
            measured = stage.index
        missing = [reward for reward in stage.rewards if reward not in profile.rewards]
        if missing:
            raise ConfigError(f"stages[{stage.index}].allocation.profile: has no curve of {missing}")
    return Settled(project(stage, options, profile, sigmas), profile, measured)


def project(
    stage: Stage, options: StageAllocation, profile: Profile | None, sigmas: NDArray[np.float64]
) -> dict[str, Any]:
    """The stage's budgets on the steps between ``sigmas`` (T + 1,), as JSON data.

    Args:
        profile: where the gains come from; None: there are none (static weighting).
    """
    gains = np.zeros((len(stage.rewards), len(sigmas) - 1))
    if profile is not None:
        gains = profile.gains(sigmas)[[profile.rewards.index(reward) for reward in stage.rewards]]
    result = allocate(gains, stage.budgets, method=options.method, temperature=options.temperature)
    return {
        **result.to_dict(),
        "rewards": list(stage.rewards),
        "budgets": dict(zip(stage.rewards, result.budgets.tolist(), strict=True)),
        "sigmas": sigmas.tolist(),
        "gains": gains.tolist(),
    }
