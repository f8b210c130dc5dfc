"""How much work a training is, counted from its request."""

from __future__ import annotations

import math
from collections.abc import Sequence

from api.jobs.estimates import Work
from api.profiles.estimates import profile_work
from recast_engine.backbones.catalogue import model_info
from recast_engine.config import StageAllocation, StageConfig, TrainingConfig
from recast_engine.profiling.levels import noise_levels, rollout_steps
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import REWARDS, usable_prompts

GRID_IMAGES = 16


def training_work(config: TrainingConfig, prompts: Sequence[Prompt]) -> Work:
    """Every stage's epochs, the profile it measures first, and its running profile.

    An epoch of P prompts with k images, T sampling steps and m steps trained per image takes

        P k T + P k m v   velocities, v = 2 (policy, old policy), 3 with a KL term (the base model)
        P k a             reward calls, a = the mean number of rewards that apply to a prompt of the stage,
                          the collapse guard's held-out one among them

    and each sample grid (before the first epoch, every ``samples_every``, after the last) up to 16 images of
    the model's default steps. Images on which no reward has an opinion are not trained on, so this is the
    most it can be. ``config`` is resolved: its budgets are over rewards.
    """
    work = _grids(config, prompts)
    for stage in config.stages:
        own = stage_prompts(stage, prompts)
        epochs = _epochs(config, stage, own)
        allocation = stage.allocation
        work += epochs
        if isinstance(allocation, StageAllocation) and allocation.refresh != "frozen":
            work += _running_profile(allocation, stage, own, epochs)
        if (
            isinstance(allocation, StageAllocation)
            and allocation.method != "static"
            and not allocation.profile
        ):
            work += profile_work(allocation.estimator, tuple(stage.budgets), own)
    return work


def _running_profile(
    allocation: StageAllocation, stage: StageConfig, prompts: Sequence[Prompt], epochs: Work
) -> Work:
    """At most ``refresh_share`` of the epochs' velocities, for rollouts from all inner levels in turn."""
    estimator = allocation.estimator
    inner = noise_levels(estimator.levels)[1:-1]
    steps = [rollout_steps(sigma, estimator.sampling_steps) for sigma in inner]
    evaluations = int(allocation.refresh_share * epochs.model_evaluations)
    applying = sum(usable_prompts(reward, prompts) for reward in stage.budgets) / len(prompts)
    return Work(evaluations, round(evaluations * len(steps) / sum(steps) * applying))


def _grids(config: TrainingConfig, prompts: Sequence[Prompt]) -> Work:
    epochs = sum(stage.epochs for stage in config.stages)
    grids = 1 + math.ceil(epochs / config.samples_every)
    return Work(grids * min(GRID_IMAGES, len(prompts)) * model_info(config.model).default_steps, 0)


def stage_prompts(stage: StageConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that at least one reward with a budget can score: those the stage trains on."""
    needs = [REWARDS[reward].needs_metadata for reward, share in stage.budgets.items() if share > 0]
    return [p for p in prompts if any(all(p.has(name) for name in names) for names in needs)]


def _epochs(config: TrainingConfig, stage: StageConfig, prompts: Sequence[Prompt]) -> Work:
    images = config.sampling.prompts_per_epoch * config.sampling.images_per_prompt * stage.epochs
    velocities = 3 if config.optimizer.kl_weight > 0 else 2
    evaluations = images * (config.sampling.steps + config.optimizer.timesteps_per_image * velocities)
    watched = () if config.collapse.held_out is None else (config.collapse.held_out,)
    applying = sum(usable_prompts(reward, prompts) for reward in (*stage.budgets, *watched))
    return Work(evaluations, round(images * applying / len(prompts)))
