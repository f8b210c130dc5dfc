"""``recast jobs``: list, show, follow, cancel, resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from recast.cli.app import Home, Json, Url, app, emit, err, out
from recast.client import Client
from recast.progress import follow as follow_job
from recast.tables import listing

jobs = typer.Typer(
    help="Profiles, trainings and evaluations: list, show, follow, cancel, resume.", no_args_is_help=True
)
app.add_typer(jobs, name="jobs")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of a profile, training or evaluation.")]
Kind = Annotated[str | None, typer.Option("--kind", help="profile, training or evaluation.")]
Status = Annotated[str | None, typer.Option("--status", help="queued, running, succeeded, failed, ...")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100)]


@jobs.command("list")
def list_(
    kind: Kind = None,
    status: Status = None,
    limit: Limit = 20,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with Client(url, home=home) as client:
        found = client.jobs(kind=kind, status=status, limit=limit)
    if as_json:
        emit(found)
        return
    rows = [
        [
            job["id"],
            job["status"],
            job["progress"]["phase"],
            f"{job['progress']['done']}/{job['progress']['total']}",
            job["created_at"][5:16].replace("T", " "),
        ]
        for job in found
    ]
    out.print(listing(["id", "status", "phase", "done", "created"], rows) if found else "No jobs.")


@jobs.command()
def show(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Show a job and what it found."""
    with Client(url, home=home) as client:
        job = client.job(job_id)
        full = client.result(job)
        made = client.adapters(job_id) if job["kind"] == "training" else []
    if as_json:
        emit(full)
        return
    for name in ("id", "kind", "status", "attempt", "created_at", "started_at", "finished_at"):
        out.print(f"{name:<12} {job[name] or '-'}", markup=False)
    for name in ("progress", "cost", "error", "result", "warnings"):
        if job.get(name):
            out.print("\n".join([name, *_lines(job[name])]), markup=False, soft_wrap=True)
    for adapter in made:
        text = f"adapter {adapter['id']} of epoch {adapter['epoch']}: recast download {adapter['id']}"
        out.print(text, markup=False, soft_wrap=True)


@jobs.command()
def follow(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Follow a job to its end; with --json, one event per line. Exit code 1 when it did not succeed."""
    with Client(url, home=home) as client, _left_running(job_id):
        if not as_json:
            finish(follow_job(client, job_id, err), False)
            return
        for event in client.events(job_id):
            sys.stdout.write(json.dumps({"seq": event.seq, "type": event.type, "data": event.data}) + "\n")
            sys.stdout.flush()
        client.succeeded(job_id)


@jobs.command()
def cancel(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Ask a job to stop; a training writes a checkpoint first."""
    with Client(url, home=home) as client:
        job = client.cancel(job_id)
    started(job, as_json)


@jobs.command()
def resume(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Let a failed or cancelled training go on from its last checkpoint."""
    with Client(url, home=home) as client:
        job = client.resume(job_id)
    started(job, as_json)


def start(client: Client, job: dict[str, Any], wait: bool, as_json: bool) -> dict[str, Any] | None:
    """What every command does with the job it made: follow it to its end, or say that it started.

    Returns:
        The job once it has succeeded; None when nobody waited.
    """
    if not wait:
        started(job, as_json)
        return None
    with _left_running(job["id"]):
        if as_json:
            return client.wait(job["id"])
        err.print(f"{job['kind']} {job['id']}", markup=False)
        return follow_job(client, job["id"], err)


def estimated(cost: dict[str, Any], as_json: bool) -> None:
    """Say what a job would cost."""
    if as_json:
        emit(cost)
        return
    counts = ("model_evaluations", "reward_calls", "proposal_images")
    said = [f"{cost[name]:,} {name.replace('_', ' ')}" for name in counts if cost[name]]
    if seconds := cost["device_seconds"]:
        said.append(f"{seconds['low']:,.0f} to {seconds['high']:,.0f} device seconds")
    out.print(f"{', '.join(said) or 'nothing'} ({cost['basis']})", markup=False, soft_wrap=True)


@contextmanager
def _left_running(job_id: str) -> Iterator[None]:
    """Ctrl-C ends the following and not the job: say so, with its id."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(
            f"{job_id} goes on: `recast jobs follow {job_id}`; `recast jobs cancel {job_id}` stops it",
            markup=False,
            soft_wrap=True,
        )
        raise


def started(job: dict[str, Any], as_json: bool) -> None:
    """Say how a job stands."""
    if as_json:
        emit(job)
    else:
        out.print(
            f"{job['kind']} {job['id']}: {job['status']}; `recast jobs follow {job['id']}`", soft_wrap=True
        )


def finish(job: dict[str, Any], as_json: bool) -> None:
    """Say how a job ended."""
    if as_json:
        emit(job)
    else:
        out.print(
            f"{job['kind']} {job['id']} {job['status']} in {job['cost']['device_seconds']:.0f} device seconds"
        )


def _lines(value: Any, indent: str = "  ") -> list[str]:
    """JSON data, a line for each value."""
    if isinstance(value, dict):
        found = []
        for name, one in value.items():
            nested = isinstance(one, dict) and one
            found.append(f"{indent}{name}" if nested else f"{indent}{name}: {_plain(one)}")
            found += _lines(one, indent + "  ") if nested else []
        return found
    return [f"{indent}{_plain(one)}" for one in (value if isinstance(value, list) else [value])]


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "-"
    return "-" if value is None else str(value)
