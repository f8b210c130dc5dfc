"""An engine without torch for profiles in shards: scores that only depend on seed, prompt and image.

What else it does is in ``shards.json`` in the service's home: ``pause`` (seconds a prompt group), and numbers
of the shards that are ``slow`` (two seconds more), that ``refuse`` and that ``die``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recast_engine.config import ProfileConfig, load
from recast_engine.errors import RewardFailure
from recast_engine.observer import Observer, Stopped
from recast_engine.profiling.plan import Plan, Work
from recast_engine.profiling.scores import ScoreTable
from recast_engine.prompts import parse_prompts

PROMPTS = "".join(f'{{"prompt": "the word {n}", "text": "W{n}"}}\n' for n in range(12))
EVALUATIONS = 10
"""Model evaluations told for each prompt group."""


def run(workdir: Path, observer: Observer) -> Mapping[str, Any]:
    """Measure the shard that ``workdir/request.json`` asks for."""
    request = json.loads((workdir / "request.json").read_text())
    steering = workdir.parents[1] / "shards.json"
    asked = json.loads(steering.read_text()) if steering.exists() else {}
    work = Work.from_dict(request["work"])
    plan = plan_of(request["config"], Path(request["prompts"]).read_text())
    observer.phase("loading", 1)
    if work.shard in asked.get("refuse", ()):
        raise RewardFailure("ocr failed on 40% of the images")
    observer.phase("profiling", work.images)
    observer.finding("warning", {"text": "few prompts"})
    tables, done = [plan.table(work.columns[1], max(work.rollouts), rounds=work.round + 1)], 0
    for rows in plan.groups(work):
        part = Work(work.round, work.shard, rows, work.columns, work.rollouts)
        tables.append(measured(plan, part))
        observer.cost(model_evaluations=EVALUATIONS, device_seconds=0.25)
        done += part.images
        observer.advance(done)
        time.sleep(asked.get("pause", 0.0) + 2.0 * (work.shard in asked.get("slow", ())))
        if work.shard in asked.get("die", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if observer.should_stop():
            raise Stopped
    path = workdir / "scores.safetensors"
    ScoreTable.merge(tables).save(path)
    observer.file("scores", path.name, path, {"round": work.round, "shard": work.shard})
    return {"round": work.round, "shard": work.shard}


def plan_of(config: Mapping[str, Any], prompts: str = PROMPTS) -> Plan:
    """The plan of a profile's config."""
    loaded = load(ProfileConfig, config)
    return Plan.of(loaded.estimator, loaded.rewards, parse_prompts(prompts), loaded.seed)


def measured(plan: Plan, work: Work) -> ScoreTable:
    """The scores of ``work``; a rollout from sigma keeps the share 1 - sigma of its image's score."""
    table = plan.table(work.columns[1], max(work.rollouts), rounds=work.round + 1)
    for row in work.rows:
        for image in range(*work.columns):
            rng = np.random.default_rng([plan.seed, plan.places[row], image])
            clean = rng.normal(size=len(plan.rewards))
            table.clean[:, row, image] = clean
            for level, count in enumerate(work.rollouts):
                for rollout in range(count):
                    seed = [plan.seed, plan.places[row], image, level, rollout]
                    noise = np.random.default_rng(seed).normal()
                    sigma = plan.levels[level + 1]
                    table.rollouts[:, level, row, image, rollout] = (1 - sigma) * clean + sigma * noise
    return table
