"""A stage's running profile, and when its allocation is projected anew (METHOD section 6, "Refresh").

Training's own images are the clean images of the self-tilted estimator; what it lacks are stochastic
rollouts. After each epoch's update, and before the old policy moves on, a few of the epoch's images are
noised and rolled out by the old policy, which drew them. They are paid from an account: drawing and training
earn ``refresh_share`` of their model evaluations, so the running profile never costs more than that share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast_engine.backbones.base import Backbone
from recast_engine.backbones.sampling import denoise_stochastic, initial_noise
from recast_engine.config import StageAllocation, TrainingConfig
from recast_engine.errors import ConfigError
from recast_engine.observer import NullObserver, Observer, Stopped
from recast_engine.profiling import Profile
from recast_engine.profiling.curves import curve_of
from recast_engine.profiling.drift import drift
from recast_engine.profiling.levels import rollout_steps
from recast_engine.profiling.running import Unit, Window, with_curves
from recast_engine.training.adapters import OLD, AdapterSet
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.rollouts import Rollouts
from recast_engine.training.stages import Stage

IMAGES_PER_UNIT = 4
"""Images of a prompt group that are rolled out, at least: pairs of images within a prompt carry the estimate,
so fewer waste rollouts, and more are better spent on other prompts."""

_REFRESH = 4  # beside the salts of ``rollouts``


@dataclass(frozen=True)
class Reprojection:
    """A new profile to project the stage's budgets by, and why."""

    profile: Profile
    reason: str


@dataclass(frozen=True)
class _Planned:
    """Images of one prompt group to roll out from one inner level."""

    group: int
    images: tuple[int, ...]
    level: int


class Refresher:
    """The running profile of one stage.

    Attributes:
        reference: the profile that the allocation in force rests on.
        window: the newest units.
        earned: model evaluations that drawing and training took in this stage.
        spent: model evaluations of the running profile.
        rolled: units rolled out so far.
        looks: how often ``on_drift`` has compared.
        looked: epochs finished at the last comparison, or when the stage began.
    """

    def __init__(
        self, stage: Stage, options: StageAllocation, reference: Profile, config: TrainingConfig, began: int
    ) -> None:
        """Start with nothing measured. Raises ConfigError for a reference that is not self-tilted."""
        settings = reference.config
        if settings.get("kind", "self_tilted") != "self_tilted":
            raise ConfigError(
                f"stages[{stage.index}].allocation.refresh: {options.refresh} needs a self-tilted profile to "
                f"compare with, not one of kind {settings['kind']!r}"
            )
        self.stage, self.options, self.config = stage, options, config
        self.reference, self.began, self.looked = reference, began, began
        self.steps = int(settings.get("sampling_steps", options.estimator.sampling_steps))
        self.window = Window(
            stage.rewards,
            reference.levels,
            alpha=float(settings.get("alpha", options.estimator.alpha)),
            advantage_clip=float(settings.get("advantage_clip", options.estimator.advantage_clip)),
        )
        self.earned = self.spent = self.rolled = self.looks = 0

    def measure(
        self,
        backbone: Backbone,
        adapters: AdapterSet,
        rollouts: Rollouts,
        prompts: Sequence[int],
        *,
        epoch: int,
        evaluations: int,
        observer: Observer,
        devices: Devices = ALONE,
    ) -> int:
        """Roll out as many of the epoch's images as the account allows; returns the devices' reward calls.

        Args:
            rollouts: the epoch's images, by the old policy as it still is.
            prompts: (P,) which prompt of the stage each group has.
            epoch: epochs finished before this one.
            evaluations: that drawing and training this epoch's images took, on all devices.
            devices: each rolls out its share.

        Raises:
            Stopped: the observer asked to stop.
        """
        self.earned += evaluations
        images = len(rollouts.groups) // len(prompts)
        planned = self._plan(len(prompts), images, epoch, evaluations)
        rows = [one.group * images + image for one in planned for image in one.images]
        levels = [one.level for one in planned for _ in one.images]
        own = devices.share(len(rows))
        rolled_out, calls = self._roll_out(
            backbone,
            adapters,
            rollouts,
            prompts,
            rows[own.start : own.stop],
            levels[own.start : own.stop],
            epoch,
            observer if devices.size == 1 else NullObserver(),  # ranks stop together, in the update
        )
        scores = devices.join(torch.from_numpy(rolled_out.T.copy()), len(rows)).numpy().T
        clean = _finite(rollouts.scores.values).reshape(-1, len(prompts), images)
        units = []
        for one in planned:
            rolled = np.full(clean[:, 0].shape, np.nan)
            rolled[:, list(one.images)] = scores[:, : len(one.images)]
            scores = scores[:, len(one.images) :]
            units.append(Unit(epoch, prompts[one.group], one.level, clean[:, one.group].copy(), rolled))
        self.window.add(units, epoch)
        return devices.total(calls)

    def _plan(self, groups: int, images: int, epoch: int, evaluations: int) -> list[_Planned]:
        """What to roll out, by (seed, epoch) and what the account holds: one level per group, in turn."""
        rng = np.random.default_rng([self.config.seed, _REFRESH, epoch])
        share = self.options.refresh_share
        costs = [rollout_steps(sigma, self.steps) for sigma in self.reference.levels[1:-1]]
        affordable = int(share * evaluations / (groups * float(np.mean(costs))))
        count = min(max(IMAGES_PER_UNIT, affordable), images)
        planned: list[_Planned] = []
        for group in rng.permutation(groups).tolist():
            chosen = np.sort(rng.choice(images, count, replace=False))
            level = self._level(self.rolled)
            if self.spent + count * costs[level] > math.floor(share * self.earned):
                break
            self.spent += count * costs[level]
            self.rolled += 1
            planned.append(_Planned(group, tuple(chosen.tolist()), level))
        return planned

    def _level(self, unit: int) -> int:
        """The level of unit number ``unit``: every level once, in a new random order each time round."""
        turn, place = divmod(unit, self.window.inner)
        rng = np.random.default_rng([self.config.seed, _REFRESH, self.stage.index, turn])
        return int(rng.permutation(self.window.inner)[place])

    def _roll_out(
        self,
        backbone: Backbone,
        adapters: AdapterSet,
        rollouts: Rollouts,
        prompts: Sequence[int],
        rows: Sequence[int],
        levels: Sequence[int],
        epoch: int,
        observer: Observer,
    ) -> tuple[np.ndarray[Any, np.dtype[np.float64]], int]:
        """(R, N) scores of rollouts of images ``rows`` from inner ``levels``, and the reward calls made."""
        sigmas = [self.reference.levels[1 + level] for level in levels]
        rng = np.random.default_rng([self.config.seed, _REFRESH, epoch, 0])
        seeds = rng.integers(0, 2**31, (2, len(rollouts.groups)))[:, list(rows)].tolist()
        parts: list[Any] = [np.empty((len(self.stage.rewards), 0))]
        size, calls = self.config.sampling.batch_size, 0
        for start in range(0, len(rows), size):
            if observer.should_stop():
                raise Stopped
            batch = slice(start, start + size)
            groups = rollouts.groups[rows[batch]]
            clean = rollouts.latents[rows[batch]]
            noise = initial_noise(backbone, seeds[0][batch]).float()
            level = torch.tensor(sigmas[batch]).to(clean).reshape(-1, *[1] * (clean.ndim - 1))
            with adapters.using(OLD):
                denoised = denoise_stochastic(
                    backbone,
                    (1.0 - level) * clean + level * noise,
                    sigmas[batch],
                    rollouts.conditioning.select(groups),
                    seeds[1][batch],
                    steps=[rollout_steps(sigma, self.steps) for sigma in sigmas[batch]],
                )
            who = [self.stage.prompts[prompts[group]] for group in groups.tolist()]
            scores = self.stage.scorer(backbone.decode(denoised), who)
            calls += int(scores.applicable.sum())
            parts.append(_finite(scores.values))
        return np.concatenate(parts, axis=1), calls

    def decide(self, epoch: int) -> Reprojection | None:
        """Whether to project anew, with ``epoch`` epochs finished; the new profile is then the reference."""
        if self.options.refresh == "every_n":
            return self._every_n(epoch)
        if not self.window.renewed_since(self.looked):
            return None
        self.looks, self.looked = self.looks + 1, epoch
        found = drift(self.window, self.reference, self._watched())
        drifted = found.drifted(self.looks)
        if not drifted:
            return None
        p = max(found.p_values[reward] for reward in drifted)
        return self._reprojection(drifted, f"drift of {', '.join(drifted)} (p = {p:.1g})")

    def _every_n(self, epoch: int) -> Reprojection | None:
        since, every = epoch - self.began, self.options.refresh_every
        if since == 0 or since % every:
            return None
        return self._reprojection(self.stage.rewards, f"every {every} epochs")

    def _reprojection(self, rewards: Sequence[str], reason: str) -> Reprojection | None:
        """With new curves of ``rewards``; None where no reward has enough prompts in the window."""
        curves = {}
        for reward in rewards:
            running = self.window.running(reward)
            if running is not None and running.enough:
                rng = np.random.default_rng([self.config.seed, _REFRESH, self.stage.index])
                cleanup = self.reference.config.get("cleanup", "smooth")
                curves[reward] = curve_of(running, self.window.levels, rng, cleanup)
        if not curves:
            return None
        self.reference = with_curves(self.reference, curves, self.window)
        return Reprojection(self.reference, reason)

    def _watched(self) -> list[str]:
        return [r for r, budget in zip(self.stage.rewards, self.stage.budgets, strict=True) if budget > 0]

    def metrics(self) -> dict[str, float]:
        """Running totals, drift against the reference, and the share of extra model evaluations."""
        found = drift(self.window, self.reference, self._watched())
        return {
            "refresh/share": self.spent / max(self.earned, 1),
            "refresh/units": float(len(self.window.units)),
            **{f"profile/{reward}/total": total for reward, total in found.totals.items()},
            **{f"drift/{reward}/statistic": value for reward, value in found.statistics.items()},
            **{f"drift/{reward}/p_value": value for reward, value in found.p_values.items()},
        }

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that a checkpoint needs: plain JSON data, and tensors."""
        names = ("began", "looked", "earned", "spent", "rolled", "looks")
        facts = {name: getattr(self, name) for name in names} | {"reference": self.reference.to_dict()}
        units = self.window.units
        if not units:
            return facts, {}
        places = [[unit.epoch, unit.prompt, unit.level] for unit in units]
        return facts, {
            "places": torch.tensor(places, dtype=torch.int64),
            "clean": torch.from_numpy(np.stack([unit.clean for unit in units])),
            "rollouts": torch.from_numpy(np.stack([unit.rollouts for unit in units])),
        }

    @classmethod
    def restore(
        cls,
        stage: Stage,
        options: StageAllocation,
        config: TrainingConfig,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> Refresher:
        """What ``state`` gave."""
        made = cls(stage, options, Profile.from_dict(facts["reference"]), config, facts["began"])
        for name in ("looked", "earned", "spent", "rolled", "looks"):
            setattr(made, name, int(facts[name]))
        if "places" in tensors:
            clean, rollouts = (tensors[name].numpy() for name in ("clean", "rollouts"))
            for number, (epoch, prompt, level) in enumerate(tensors["places"].tolist()):
                made.window.units.append(Unit(epoch, prompt, level, clean[number], rollouts[number]))
        return made


def _finite(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.where(np.isfinite(values), values, np.nan)
