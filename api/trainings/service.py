"""Trainings: started, and what they leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from sqlalchemy.orm import Session

from api.context import Caller, Context
from api.idempotency import Answer
from api.jobs import service as jobs_service
from api.jobs.estimates import estimate_view
from api.jobs.schemas import Estimate
from api.trainings.estimates import training_work
from api.trainings.resolution import resolve
from api.trainings.schemas import (
    Checkpoint,
    CheckpointList,
    Metrics,
    Sample,
    SampleList,
    Series,
    StageView,
    TrainingView,
)
from recast_engine import config as configs
from recast_engine.config import TrainingConfig
from store.errors import NotFound
from store.models import Allocation, Artifact, Job, Metric
from store.repositories import allocations, artifacts, jobs, trainings

KIND = "training"


def create(context: Context, caller: Caller, key: str | None, config: TrainingConfig, status: int) -> Answer:
    """Queue a training. Raises Invalid, Conflict."""
    return jobs_service.submit(
        context,
        caller,
        key,
        KIND,
        configs.dump(config),
        status,
        lambda: configs.dump(resolve(context, caller, config)[0]),
    )


def estimate(context: Context, caller: Caller, config: TrainingConfig) -> Estimate:
    """What the training would cost. Raises Invalid."""
    resolved, prompts = resolve(context, caller, config)
    return estimate_view(context, caller, KIND, config.model, training_work(resolved, prompts))


def get(context: Context, caller: Caller, training_id: str) -> TrainingView:
    """The training with its stages. Raises NotFound."""
    with context.read() as session:
        job = _job(session, caller, training_id)
        made = allocations.of_training(session, training_id)
        stages = [_stage(job, index, made) for index in range(len(job.config["stages"]))]
        return TrainingView(**jobs_service.fields(job), config=job.config, stages=stages)


def _stage(job: Job, index: int, made: Sequence[Allocation]) -> StageView:
    stage = job.config["stages"][index]
    named = stage["allocation"]
    own = [row for row in made if row.stage == index]
    if isinstance(named, str):
        return StageView(
            budgets=stage["budgets"],
            epochs=stage["epochs"],
            method=None,
            refresh=None,
            profile=None,
            allocation=named,
            allocations=[named],
        )
    return StageView(
        budgets=stage["budgets"],
        epochs=stage["epochs"],
        method=named["method"],
        refresh=named["refresh"],
        profile=(own[-1].profile_id if own else None) or named["profile"],
        allocation=own[-1].id if own else None,
        allocations=[row.id for row in own],
    )


def metrics(
    context: Context,
    caller: Caller,
    training_id: str,
    *,
    names: Sequence[str] | None,
    after: int | None,
    limit: int,
) -> Metrics:
    """Time series after epoch ``after``, whole epochs only: one, or as many as ``limit`` points hold.

    Raises NotFound.
    """

    def points(**which: int | None) -> Sequence[Metric]:
        return trainings.metrics(session, training_id, names=names, **which)

    with context.read() as session:
        _job(session, caller, training_id)
        rows = points(after=after, limit=limit + 1)
        more = len(rows) > limit
        if more and rows[0].step == rows[-1].step:
            rows = points(after=after, until=rows[0].step)
            more = bool(points(after=rows[0].step, limit=1))
        elif more:
            rows = [row for row in rows if row.step != rows[-1].step]
    series: dict[str, Series] = {}
    for row in rows:
        found = series.setdefault(row.name, Series(steps=[], values=[]))
        found.steps.append(row.step)
        found.values.append(row.value)
    return Metrics(series=series, next_after=rows[-1].step if rows else None, more=more)


def samples(context: Context, caller: Caller, training_id: str) -> SampleList:
    """Sample grids. Raises NotFound."""
    with context.read() as session:
        _job(session, caller, training_id)
        return SampleList(data=[_sample(row) for row in trainings.samples(session, training_id)])


def _sample(row: Artifact) -> Sample:
    meta = row.meta
    return Sample(
        id=row.id,
        url=f"/v1/trainings/{row.job_id}/samples/{row.id}",
        epoch=meta.get("epoch"),
        steps=meta.get("steps"),
        solver=meta.get("solver"),
        cell=meta.get("cell"),
        columns=meta.get("columns"),
        images=meta.get("images", []),
        bytes=row.bytes,
        sha256=row.sha256,
        created_at=row.created_at,
    )


def sample_image(
    context: Context, caller: Caller, training_id: str, sample_id: str
) -> tuple[Artifact, IO[bytes]]:
    """A sample grid's row and its open PNG. Raises NotFound, ArtifactMissing."""
    with context.read() as session:
        _job(session, caller, training_id)
        row = artifacts.get(session, sample_id, caller.workspace_id)
    if row.job_id != training_id or row.kind != "samples":
        raise NotFound("sample", sample_id)
    return row, context.artifacts.open(row.key)


def checkpoints(context: Context, caller: Caller, training_id: str) -> CheckpointList:
    """Checkpoints. Raises NotFound."""
    with context.read() as session:
        _job(session, caller, training_id)
        rows = trainings.checkpoints(session, training_id)
    return CheckpointList(
        data=[
            Checkpoint(
                id=row.id,
                name=row.name,
                epoch=row.meta.get("epoch"),
                step=row.meta.get("step"),
                stage=row.meta.get("stage"),
                bytes=row.bytes,
                sha256=row.sha256,
                created_at=row.created_at,
            )
            for row in rows
        ]
    )


def check(context: Context, caller: Caller, training_id: str) -> None:
    """Raises NotFound unless the caller has such a training."""
    with context.read() as session:
        _job(session, caller, training_id)


def _job(session: Session, caller: Caller, training_id: str) -> Job:
    return jobs.get(session, training_id, caller.workspace_id, kind=KIND)
