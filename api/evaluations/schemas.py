"""What evaluations look like to a client. The request is ``recast_engine.config.EvaluationConfig`` itself."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.jobs.schemas import JobView

EXAMPLE = {
    "subjects": [
        {"label": "base", "base_model": "miniature"},
        {"label": "tuned", "adapter": "adapt_01kbcd3f5v8m2q9r7x4y6z0abc"},
    ],
    "baseline": "base",
    "rewards": ["clipscore", "ocr", "aesthetic"],
    "prompt_set": "pset_miniature_heldout",
    "images_per_prompt": 2,
    "seeds": [0],
    "steps": 10,
    "objective": {"clipscore": 0.5, "ocr": 0.5},
}


class EvaluationView(JobView):
    """An evaluation: its job, its resolved config, and once finished its report."""

    config: dict[str, Any]
    report: dict[str, Any] | None = Field(
        description="means, paired differences, wins, intervals and tests per metric; null until finished"
    )
