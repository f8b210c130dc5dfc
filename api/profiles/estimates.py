"""How much work a profile is, counted from its request."""

from __future__ import annotations

from collections.abc import Sequence

from api.jobs.estimates import Work
from recast_engine.config import EstimatorConfig
from recast_engine.prompts import Prompt


def profile_work(config: EstimatorConfig, rewards: Sequence[str], prompts: Sequence[Prompt]) -> Work:
    return Work(0, 0)
