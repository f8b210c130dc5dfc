"""How much work a training is, counted from its request."""

from __future__ import annotations

from collections.abc import Sequence

from api.jobs.estimates import Work
from api.profiles.estimates import profile_work
from recast_engine.config import StageAllocation, StageConfig, TrainingConfig
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import REWARDS, usable_prompts


def training_work(config: TrainingConfig, prompts: Sequence[Prompt]) -> Work:
    """Every stage's epochs, and the profile it measures first.

    An epoch of P prompts with k images, T sampling steps and m steps trained per image takes

        P k T + P k m v   velocities, v = 2 (policy, old policy), 3 with a KL term (the base model)
        P k a             reward calls, a = the mean number of rewards that apply to a prompt of the stage

    Images on which no reward has an opinion are not trained on, so this is the most it can be. Sample grids
    are not counted, here or in a job's cost. ``config`` is resolved: its budgets are over rewards.
    """
    work = Work(0, 0)
    for stage in config.stages:
        own = stage_prompts(stage, prompts)
        work += _epochs(config, stage, own)
        allocation = stage.allocation
        if (
            isinstance(allocation, StageAllocation)
            and allocation.method != "static"
            and not allocation.profile
        ):
            work += profile_work(allocation.estimator, tuple(stage.budgets), own)
    return work


def stage_prompts(stage: StageConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that at least one reward with a budget can score: those the stage trains on."""
    needs = [REWARDS[reward].needs_metadata for reward, share in stage.budgets.items() if share > 0]
    return [p for p in prompts if any(all(p.has(name) for name in names) for names in needs)]


def _epochs(config: TrainingConfig, stage: StageConfig, prompts: Sequence[Prompt]) -> Work:
    images = config.sampling.prompts_per_epoch * config.sampling.images_per_prompt * stage.epochs
    velocities = 3 if config.optimizer.kl_weight > 0 else 2
    evaluations = images * (config.sampling.steps + config.optimizer.timesteps_per_image * velocities)
    applying = sum(usable_prompts(reward, prompts) for reward in stage.budgets)
    return Work(evaluations, round(images * applying / len(prompts)))
