"""The scalars that a training reports after every epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from recast_engine.backbones.base import Backbone
from recast_engine.config import OptimizerConfig
from recast_engine.observer import Observer
from recast_engine.rewards.base import Scores, spread
from recast_engine.training.advantages import advantage_scales, usable_samples
from recast_engine.training.devices import ALONE, Devices
from recast_engine.training.rollouts import Rollouts
from recast_engine.training.stages import Stage
from recast_engine.training.update import UpdateReport

Baseline = Mapping[str, tuple[float, float]]


class Meter:
    """What a piece of work costs on ``devices``, from when the meter is made on each of them."""

    def __init__(self, backbone: Backbone, devices: Devices = ALONE) -> None:
        self._backbone, self._devices = backbone, devices
        self._before, self._started = backbone.evaluations, time.perf_counter()

    @property
    def evaluations(self) -> int:
        """Model evaluations on this device so far."""
        return self._backbone.evaluations - self._before

    def report(self, observer: Observer, reward_calls: int = 0) -> None:
        """Add the work of all devices to the job's cost; every one of them comes here. Raises DeviceLost."""
        observer.cost(
            model_evaluations=self._devices.total(self.evaluations),
            reward_calls=reward_calls,
            device_seconds=self._devices.size * (time.perf_counter() - self._started),
        )


def extend_baseline(baseline: Baseline, scores: Scores) -> dict[str, tuple[float, float]]:
    """``baseline`` with (mean, standard deviation) of rewards that it lacks and that have two scores now."""
    extended = dict(baseline)
    for reward, values in zip(scores.rewards, scores.values, strict=True):
        finite = values[np.isfinite(values)]
        if reward not in extended and len(finite) > 1:
            extended[reward] = (float(finite.mean()), spread(finite))
    return extended


def objective(stage: Stage, scores: Scores, baseline: Baseline) -> float:
    """sum_i lambda_i * mean((reward_i - mean0_i) / std0_i) over the images that have a score.

    mean0 and std0 are of the stage's first epoch in which the reward had scores, so the objective starts at
    0 and is in units of the rewards' initial standard deviations. A reward without a score in this epoch, or
    one that was constant at first, counts as unchanged (0).
    """
    total = 0.0
    for reward, budget, values in zip(scores.rewards, stage.budgets, scores.values, strict=True):
        finite = values[np.isfinite(values)]
        mean, deviation = baseline.get(reward, (0.0, 0.0))
        if len(finite) and deviation > 0:
            total += float(budget) * (float(finite.mean()) - mean) / deviation
    return total


def epoch_metrics(
    stage: Stage, rollouts: Rollouts, report: UpdateReport, baseline: Baseline, config: OptimizerConfig
) -> dict[str, float]:
    """The metrics of one epoch; a mean over nothing is left out, so every value is finite.

    ``reward/<id>/scale`` is what the reward's deviations are divided by to give its advantages (the mean over
    groups, where each has its own); ``loss/kl`` is measured where it has a weight.
    """
    scores = rollouts.scores
    scales = advantage_scales(scores.values, rollouts.groups, scale=config.advantage_scale)
    values: dict[str, float] = {"objective": objective(stage, scores, baseline)}
    for row, reward in enumerate(scores.rewards):
        finite = scores.values[row][np.isfinite(scores.values[row])]
        values[f"reward/{reward}/failed"] = float(scores.failed[row].sum())
        if len(finite):
            values[f"reward/{reward}/mean"] = float(finite.mean())
            values[f"reward/{reward}/std"] = float(finite.std())
        if np.isfinite(scales[row]):
            values[f"reward/{reward}/scale"] = scales[row]
    if (held_out := moments(rollouts.held_out)) is not None and rollouts.held_out is not None:
        values[f"held_out/{rollouts.held_out.rewards[0]}/mean"] = held_out[0]
    if report.losses:
        total, policy, kl = (float(mean) for mean in np.mean(report.losses, axis=0))
        values |= {"loss/total": total, "loss/policy": policy}
        if config.kl_weight > 0:
            values["loss/kl"] = kl
        values["grad_norm"] = float(np.mean(report.gradient_norms))
        values["advantage/clipped_share"] = report.clipped / report.pairs
    values["diversity"] = float(rollouts.diversity.mean())
    values["zero_std_share"] = zero_spread_share(rollouts)
    values["images_unused"] = float(report.images - report.images_used)
    values["seconds/sampling"] = rollouts.sampling_seconds
    values["seconds/scoring"] = rollouts.scoring_seconds
    return values


def moments(scores: Scores | None) -> tuple[float, float] | None:
    """(mean, standard deviation) of the finite scores of one reward; None: there are none."""
    finite = np.empty(0) if scores is None else scores.values[np.isfinite(scores.values)]
    return (float(finite.mean()), float(finite.std())) if len(finite) else None


def zero_spread_share(rollouts: Rollouts) -> float:
    """Share of (reward, prompt group) pairs, among those the reward applies to, without any preference."""
    alive = usable_samples(rollouts.scores.values, rollouts.groups)
    applicable = torch.from_numpy(rollouts.scores.applicable)
    size = int(rollouts.groups.max()) + 1

    def per_group(mask: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(len(mask), size, dtype=torch.int64)
        return counts.index_add(1, rollouts.groups, mask.long()) > 0

    concerned = per_group(applicable)
    dead = concerned & ~per_group(alive)
    return float(dead.sum()) / max(int(concerned.sum()), 1)
