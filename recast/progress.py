"""A job's events as progress bars."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from recast.client import Client
from recast.sse import Event

WAITING = ("waiting for a worker", "starting")


def follow(client: Client, job_id: str, console: Console) -> dict[str, Any]:
    """Show a job's progress until it is over; the job as it ended.

    Raises:
        JobFailed: it did not succeed.
    """
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bars = PhaseBars(progress)
        for event in client.events(job_id):
            bars.hear(event)
        bars.finish()
    return client.succeeded(job_id)


class PhaseBars:
    """One bar per phase of the job, made when the phase begins; metrics become the bar's note."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.phase: str | None = None
        self.bar: TaskID | None = None
        self.total: int | None = None

    def hear(self, event: Event) -> None:
        """Show what the event says."""
        data = event.data
        if event.type == "progress":
            self._advance(str(data["phase"]), int(data["phase_done"]), int(data["phase_total"]))
        elif event.type == "metrics" and self.bar is not None:
            self.progress.update(self.bar, note=_note(data))
        elif event.type == "warning":
            self.progress.console.print(f"warning: {data['text']}", style="yellow", markup=False)
        elif event.type == "status":
            self._status(str(data["status"]), int(data["attempt"]))

    def finish(self, *, complete: bool = False) -> None:
        """Take a waiting bar away; fill any other if its phase is complete, else leave it as it stands."""
        if self.bar is None:
            return
        if self.phase in WAITING:
            self.progress.remove_task(self.bar)
        else:
            if complete:
                self.progress.update(self.bar, completed=self.total)
            self.progress.stop_task(self.bar)
        self.bar = self.phase = None

    def _status(self, status: str, attempt: int) -> None:
        if status == "queued" and attempt > 0:
            self.progress.console.print("the job was interrupted and is queued again", style="yellow")
        if status in ("queued", "running"):
            self.finish()
            self._begin("waiting for a worker" if status == "queued" else "starting", None)
        else:
            self.finish(complete=status == "succeeded")

    def _begin(self, phase: str, total: int | None) -> None:
        self.finish(complete=True)
        self.phase, self.total = phase, total
        self.bar = self.progress.add_task(phase, total=total, note="")

    def _advance(self, phase: str, done: int, total: int) -> None:
        if phase != self.phase:
            self._begin(phase, total)
        assert self.bar is not None
        self.total = total
        self.progress.update(self.bar, completed=done, total=total)


def _note(data: dict[str, Any]) -> str:
    values = data["values"]
    known = [("objective", "objective"), ("loss", "loss/total")]
    return "  ".join(f"{label} {values[name]:.4f}" for label, name in known if name in values)
