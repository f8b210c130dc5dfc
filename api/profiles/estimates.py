"""How much work a profile is, counted from its request."""

from __future__ import annotations

from collections.abc import Sequence

from api.jobs.estimates import Work
from recast_engine.config import EstimatorConfig
from recast_engine.profiling.levels import noise_levels, rollout_steps
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import usable_prompts


def profile_work(config: EstimatorConfig, rewards: Sequence[str], prompts: Sequence[Prompt]) -> Work:
    """P prompts (those asked for, or all there are), K images of each, M rollouts from each level above 0:

        P K (S + M sum_l s_l)    velocities, s_l those of a rollout from level l, S sampling steps
        P K (1 + M l) a          reward calls, l levels, a = the mean number of rewards that apply to a prompt

    Level 0 needs no rollout, nor does pure noise without an anchor; an external proposal's P K images are
    scored too. a is taken over the whole set, from which the P prompts are drawn in proportion. An adaptive
    profile counts with its budget, or with its first round where it has none.
    """
    images = min(config.prompts, len(prompts)) * config.images_per_prompt
    levels = noise_levels(config.levels)[1:] if config.anchor else noise_levels(config.levels)[1:-1]
    steps = sum(rollout_steps(sigma, config.sampling_steps) for sigma in levels)
    scored = images * (1 + (config.kind == "external_proposal") + config.rollouts * len(levels))
    applying = sum(usable_prompts(reward, prompts) for reward in rewards)
    evaluations = images * (config.sampling_steps + config.rollouts * steps)
    calls = scored * applying / len(prompts)
    if config.adaptive is not None and config.adaptive.max_model_evaluations is not None:
        budget = config.adaptive.max_model_evaluations
        evaluations, calls = budget, calls * budget / evaluations
    return Work(evaluations, round(calls))
