"""The allocation that a stage trains with: its first, and those that a running profile puts in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from recast_engine.config import StageAllocation
from recast_engine.errors import ConfigError
from recast_engine.profiling import Profile
from recast_engine.training import stages
from recast_engine.training.refresh import Refresher
from recast_engine.training.rollouts import Rollouts
from recast_engine.training.stages import Stage
from recast_engine.training.state import TrainingState

Stored = Mapping[str, Mapping[str, Any]]
"""Rows of the store as plain JSON data, by id."""

NOTHING_STORED: Stored = MappingProxyType({})


class Timing:
    """When each reward of a stage counts.

    Attributes:
        matrix: W, (R, T) float64, of the allocation in force.
    """

    def __init__(self, state: TrainingState, stage: Stage, allocations: Stored, profiles: Stored) -> None:
        """Take the allocation in force from the checkpoint, or settle the stage's first.

        Raises:
            ConfigError: what the stage asks for was not provided or does not fit.
            Stopped: the observer asked to stop while a profile was measured.
        """
        self._state, self._stage = state, stage
        self._wanted = state.config.stages[stage.index].allocation
        state.refresher = None
        made = [made for made in state.position.allocations if made["stage"] == stage.index]
        self._version = len(made)
        if made:
            _, self.matrix = stages.stored_allocation(stage, made[-1], state.config.sampling.steps)
            state.refresher = self._restored_refresher()
        elif isinstance(self._wanted, str):
            self._adopt(self._named(self._wanted, allocations), None, "named")
        else:
            self._settle(self._wanted, profiles)

    def _named(self, name: str, allocations: Stored) -> dict[str, Any]:
        if name not in allocations:
            raise ConfigError(f"allocation {name!r} was not provided")
        steps = self._state.config.sampling.steps
        return stages.stored_allocation(self._stage, allocations[name], steps)[0]

    def _settle(self, wanted: StageAllocation, profiles: Stored) -> None:
        """Make the first allocation, by a profile given or measured now."""
        state, stage = self._state, self._stage

        def settle() -> tuple[dict[str, Any], dict[str, Any] | None, int | None]:
            made = stages.make_allocation(
                stage, state.backbone, state.adapters, wanted, state.config, profiles, state.observer
            )
            return made.allocation, None if made.profile is None else made.profile.to_dict(), made.measured

        allocation, profile, measured = state.devices.lead(settle)
        if wanted.refresh != "frozen" and profile is not None:
            reference = Profile.from_dict(profile)
            state.refresher = Refresher(stage, wanted, reference, state.config, state.position.epoch)
        self._adopt(allocation, measured, "start of the stage")

    def _restored_refresher(self) -> Refresher | None:
        state, wanted = self._state, self._wanted
        if isinstance(wanted, str) or wanted.refresh == "frozen":
            return None
        if not state.position.refresh:
            raise ConfigError(
                f"stages[{self._stage.index}].allocation.refresh: the checkpoint has no running profile"
            )
        facts, tensors = state.position.refresh, state.snapshot.refresh
        return Refresher.restore(self._stage, wanted, state.config, facts, tensors)

    def refresh(self) -> None:
        """Project the stage's budgets anew if its policy says so."""
        state, stage = self._state, self._stage
        if state.refresher is None or isinstance(self._wanted, str):
            return
        found = state.refresher.decide(state.position.epoch)
        if found is not None:
            profile = {"stage": stage.index, "epoch": state.position.epoch}
            state.observer.finding("profile", {**profile, "profile": found.profile.to_dict()})
            allocation = stages.project(stage, self._wanted, found.profile, state.sigmas.numpy())
            self._adopt(allocation, stage.index, found.reason)

    def _adopt(self, allocation: dict[str, Any], measured: int | None, reason: str) -> None:
        """Train with ``allocation`` from the next epoch on, and report it.

        Args:
            measured: the stage, if its profile was measured in this training.
        """
        state = self._state
        facts = {"stage": self._stage.index, "epoch": state.position.epoch, "reason": reason}
        self.matrix = np.asarray(allocation["matrix"])
        self._version += 1
        state.advance(allocations=(*state.position.allocations, {**allocation, **facts}))
        state.observer.finding("allocation", {**facts, "profile_stage": measured, "allocation": allocation})

    def watch(self, rollouts: Rollouts, prompts: Sequence[int], evaluations: int) -> int:
        """Keep the running profile, if there is one, with images of the epoch; returns the reward calls.

        Args:
            rollouts: by the old policy, as it still is.
            prompts: (P,) which prompt of the stage each group has.
            evaluations: that drawing and training the epoch's images took on this device.

        Raises:
            Stopped: the observer asked to stop.
        """
        state = self._state
        if state.refresher is None:
            return 0
        return state.refresher.measure(
            state.backbone,
            state.adapters,
            rollouts,
            prompts,
            epoch=state.position.epoch,
            evaluations=state.devices.total(evaluations),
            observer=state.observer,
            devices=state.devices,
        )

    def metrics(self) -> dict[str, float]:
        """Which of the stage's allocations is in force, from 1, and the running profile's metrics."""
        running = {} if self._state.refresher is None else self._state.refresher.metrics()
        return {"allocation/version": float(self._version), **running}
