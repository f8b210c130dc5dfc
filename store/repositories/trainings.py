"""What a training left behind besides its job row: metrics, sample grids, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from store.models import Artifact, Metric
from store.repositories import artifacts


def add_metrics(session: Session, job_id: str, step: int, values: Mapping[str, float]) -> None:
    """Store the scalars of an epoch; an epoch that a resumed attempt repeats is overwritten."""
    session.execute(
        delete(Metric).where(Metric.job_id == job_id, Metric.step == step, Metric.name.in_(values))
    )
    session.add_all(
        Metric(job_id=job_id, step=step, name=name, value=float(value)) for name, value in values.items()
    )
    session.flush()


def metrics(
    session: Session,
    job_id: str,
    *,
    names: Sequence[str] | None = None,
    after: int | None = None,
    until: int | None = None,
    limit: int | None = None,
) -> Sequence[Metric]:
    """Scalars by rising step, then name; of ``names``, after step ``after`` and up to ``until``, if given."""
    query = select(Metric).where(Metric.job_id == job_id)
    if names is not None:
        query = query.where(Metric.name.in_(names))
    if after is not None:
        query = query.where(Metric.step > after)
    if until is not None:
        query = query.where(Metric.step <= until)
    return session.scalars(query.order_by(Metric.step, Metric.name).limit(limit)).all()


def samples(session: Session, job_id: str) -> Sequence[Artifact]:
    """Sample grids by rising epoch."""
    return sorted(artifacts.of_job(session, job_id, "samples"), key=lambda row: row.step or 0)


def checkpoints(session: Session, job_id: str) -> Sequence[Artifact]:
    """Checkpoints (folders) by rising epoch; one that a later attempt wrote again counts once."""
    return sorted(artifacts.of_job(session, job_id, "checkpoint"), key=lambda row: row.step or 0)


def newest_checkpoints(session: Session, job_id: str) -> Sequence[Artifact]:
    """The checkpoint to go on from, and those to fall back to, newest first."""
    return checkpoints(session, job_id)[::-1]
