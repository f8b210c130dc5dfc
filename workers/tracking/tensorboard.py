"""TensorBoard: event files in a folder per run, below RECAST_TENSORBOARD."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from store.settings import Settings
from workers.tracking.base import Run


class Connection:
    """One event file; a later attempt's says from which epoch on it takes the place of earlier ones'."""

    def __init__(self, settings: Settings) -> None:
        self._root, self._started = Path(settings.tensorboard), False

    def open(self, run: Run) -> None:
        self._writer = EventFileWriter(str(self._root / run.id))
        facts = {**run.parameters(), **{f"tag.{name}": value for name, value in run.tags.items()}}
        self._add(Event(summary=hparams_pb(facts, trial_id=run.id)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self._started:
            self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            self._started = True
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
