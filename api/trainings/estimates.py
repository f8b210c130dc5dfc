"""How much work a training is, counted from its request."""

from __future__ import annotations

from collections.abc import Sequence

from api.jobs.estimates import Work
from recast_engine.config import TrainingConfig
from recast_engine.prompts import Prompt


def training_work(config: TrainingConfig, prompts: Sequence[Prompt]) -> Work:
    return Work(0, 0)
