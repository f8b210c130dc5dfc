"""How much work an evaluation is, counted from its request."""

from __future__ import annotations

from collections.abc import Sequence

from api.jobs.estimates import Work
from recast_engine.config import EvaluationConfig
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import usable_prompts


def evaluation_work(config: EvaluationConfig, prompts: Sequence[Prompt]) -> Work:
    """S subjects, P prompts, K images of each, T steps of the Euler solver:

        S P K T   velocities
        S K sum_i P_i   reward calls, P_i = those of the P prompts that reward i applies to

    With ``max_prompts`` the P prompts are taken evenly from the set.
    """
    total = len(prompts)
    wanted = min(total, config.max_prompts or total)
    chosen = [prompts[index * total // wanted] for index in range(wanted)]
    images = len(config.subjects) * len(config.seeds) * config.images_per_prompt
    applying = sum(usable_prompts(reward, chosen) for reward in config.rewards)
    return Work(images * len(chosen) * config.steps, images * applying)
