"""Weights & Biases: a run per training in the project WANDB_PROJECT (``recast``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import wandb

from store.settings import Settings
from workers.tracking.base import Run


class Connection:
    """The run with the job's id; the library passes over epochs that it has already."""

    def __init__(self, settings: Settings) -> None:
        self._folder = Path(os.environ.get("WANDB_DIR") or settings.home / "wandb")

    def open(self, run: Run) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "recast",
            id=run.id,
            name=run.id,
            resume="allow",
            reinit="create_new",  # a worker may run several trainings
            config=dict(run.config),
            tags=[f"{name}:{value}"[:64] for name, value in run.tags.items()],
            dir=str(self._folder),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)
