"""An engine without torch that collects a profile's external proposals and measures nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recast_engine import config as configs
from recast_engine.config import ProfileConfig
from recast_engine.observer import Observer
from recast_engine.profiling.plan import Plan
from recast_engine.prompts import parse_prompts
from recast_engine.proposals.collection import collect

DIE_AFTER = "RECAST_TEST_DIE_AFTER"


def run(workdir: Path, observer: Observer) -> Mapping[str, Any]:
    """Collect; the first attempt dies by SIGKILL after as many images as the environment says."""
    request = json.loads((workdir / "request.json").read_text())
    config = configs.load(ProfileConfig, request["config"])
    prompts = parse_prompts(Path(request["prompts"]).read_text())
    plan = Plan.of(config.estimator, config.rewards, prompts, config.seed)
    assert config.estimator.proposals is not None
    limit = int(os.environ.get(DIE_AFTER, "0")) if workdir.name.endswith("-1") else 0
    kept = sorted(path.name for path in Path(request["proposals"]).glob("*.png"))
    proposals = collect(
        config.estimator.proposals,
        plan.prompts_of(prompts, request["work"]),
        config.estimator.images_per_prompt,
        cache=Path(request["proposals"]),
        resolution=48,
        observer=_Dying(observer, limit) if limit else observer,
    )
    images = [proposals.images(prompts[place]) for place in plan.places]
    return {"kept": len(kept), "images": [len(one) for one in images], "bought": proposals.bought}


class _Dying:
    """Passes everything on, and kills the process after ``limit`` files."""

    def __init__(self, observer: Observer, limit: int):
        self._observer, self._left = observer, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def file(self, *arguments: Any) -> None:
        self._observer.file(*arguments)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
