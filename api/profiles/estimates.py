"""How much work a profile is, counted from its request."""

from __future__ import annotations

import math
from collections.abc import Sequence

from api.jobs.estimates import Work
from recast_engine.config import EstimatorConfig
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import usable_prompts

LEVEL_EXPONENT = 1.5
FEWEST_ROLLOUT_STEPS = 2


def profile_work(config: EstimatorConfig, rewards: Sequence[str], prompts: Sequence[Prompt]) -> Work:
    """P prompts (those asked for, or all there are), K images of each, M rollouts from each inner level:

        P K (S + M sum_l s_l)    velocities, s_l = max(2, ceil(sigma_l S)) for S sampling steps
        P K (1 + M (L - 2)) a    reward calls, a = the mean number of rewards that apply to a prompt

    The levels are sigma_l = 1 - (1 - l / (L - 1))^1.5; the two outer ones need no rollout. a is taken over
    the whole set, from which the P prompts are drawn in proportion. ``recast_engine.profiling.measure`` does
    this work but loads torch; a test holds the two together.
    """
    images = min(config.prompts, len(prompts)) * config.images_per_prompt
    inner = [
        1.0 - (1.0 - level / (config.levels - 1)) ** LEVEL_EXPONENT for level in range(1, config.levels - 1)
    ]
    steps = sum(max(FEWEST_ROLLOUT_STEPS, math.ceil(sigma * config.sampling_steps)) for sigma in inner)
    scored = images * (1 + config.rollouts * len(inner))
    applying = sum(usable_prompts(reward, prompts) for reward in rewards)
    return Work(
        images * (config.sampling_steps + config.rollouts * steps), round(scored * applying / len(prompts))
    )
