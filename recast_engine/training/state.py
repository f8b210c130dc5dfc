"""What the parts of a training in progress share: adapters, optimiser, and the position between epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recast_engine import config as configs
from recast_engine.backbones.base import Backbone
from recast_engine.config import TrainingConfig
from recast_engine.errors import ConfigError
from recast_engine.observer import Observer
from recast_engine.prompts import Prompt
from recast_engine.training import checkpoint as checkpoints
from recast_engine.training.adapters import POLICY, TRAINING_ADAPTERS, AdapterSet, load_adapter
from recast_engine.training.checkpoint import Position
from recast_engine.training.devices import Devices
from recast_engine.training.refresh import Refresher


class TrainingState:
    """A training in progress.

    Attributes:
        sigmas: (T + 1,) noise levels of the sampler.
        position: between the last finished epoch and the next.
        snapshot: a copy of all that a checkpoint at ``position`` holds, so that a training that is stopped in
            the middle of an epoch can still write it.
        refresher: the present stage's running profile; None: its allocation never changes.
        last_metrics: of the last finished epoch.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapters: AdapterSet,
        prompts: Sequence[Prompt],
        config: TrainingConfig,
        observer: Observer,
        workdir: Path,
        devices: Devices,
    ) -> None:
        self.backbone, self.adapters, self.devices = backbone, adapters, devices
        self.prompts, self.config = prompts, config
        self.observer, self.workdir = observer, workdir
        self.sigmas = backbone.sigmas(config.sampling.steps, config.sampling.shift)
        self.optimizer = torch.optim.AdamW(
            adapters.parameters(POLICY),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self.refresher: Refresher | None = None
        self.last_metrics: dict[str, float] = {}
        self.position = Position()
        self.snapshot = self._capture()

    def last_epoch(self, stage: int) -> int:
        """Epochs finished when ``stage`` is."""
        return sum(stage.epochs for stage in self.config.stages[: stage + 1])

    @property
    def epochs(self) -> int:
        """Of all stages."""
        return self.last_epoch(len(self.config.stages) - 1)

    def start_from(self, path: Path) -> None:
        """Start all adapters from a file. Raises ConfigError where it is of another rank or scale."""
        loaded = load_adapter(path)
        lora = self.config.lora
        if (loaded.rank, loaded.alpha) != (lora.rank, lora.alpha):
            raise ConfigError(
                f"lora: the adapter to start from has rank {loaded.rank} and alpha {loaded.alpha:g}, "
                f"the config asks for rank {lora.rank} and alpha {lora.alpha:g}"
            )
        for name in TRAINING_ADAPTERS:
            self.adapters.load_state(name, loaded.weights)
        self.snapshot = self._capture()

    def advance(self, **changes: Any) -> None:
        """Move the position, and copy the state as it now is. Raises NonFinite: a weight is not finite."""
        self.position = replace(self.position, **changes)
        self.snapshot = self._capture()

    def _capture(self) -> checkpoints.Checkpoint:
        facts, tensors = self.refresher.state() if self.refresher is not None else ({}, {})
        self.position = replace(self.position, refresh=facts)
        config = configs.dump(self.config)
        return checkpoints.capture(self.position, config, self.adapters, self.optimizer, tensors)
