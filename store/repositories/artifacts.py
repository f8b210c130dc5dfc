"""Rows of stored files. Bytes are stored before their row is committed, so what is listed exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete as delete_rows
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from store.errors import NotFound
from store.ids import new_id
from store.models import Artifact
from store.repositories import jobs


def create(
    session: Session,
    *,
    job_id: str,
    attempt: int,
    kind: str,
    name: str,
    key: str,
    bytes: int,
    sha256: str,
    step: int | None,
    meta: Mapping[str, Any],
) -> Artifact:
    """Record a stored file; one of the same attempt, kind and name is replaced, keeping its id."""
    same = {"job_id": job_id, "attempt": attempt, "kind": kind, "name": name}
    row = session.scalar(select(Artifact).filter_by(**same))
    if row is None:
        row = Artifact(id=new_id("art"), **same)
        session.add(row)
    row.key, row.bytes, row.sha256, row.step, row.meta = key, bytes, sha256, step, dict(meta)
    session.flush()
    return row


def get(session: Session, artifact_id: str, workspace_id: str | None = None) -> Artifact:
    """The artifact. Raises NotFound, also when its job is of another workspace."""
    row = session.get(Artifact, artifact_id)
    if row is None:
        raise NotFound("artifact", artifact_id)
    if workspace_id is not None and jobs.get(session, row.job_id).workspace_id != workspace_id:
        raise NotFound("artifact", artifact_id)
    return row


def of_job(session: Session, job_id: str, kind: str) -> Sequence[Artifact]:
    """Files of a kind in the order first reported; of a name that several attempts reported, the last."""
    query = select(Artifact).where(Artifact.job_id == job_id, Artifact.kind == kind)
    newest: dict[str, Artifact] = {}
    for row in session.scalars(query.order_by(Artifact.attempt, Artifact.created_at, Artifact.id)):
        newest[row.name] = row
    return list(newest.values())


DISCARDED = "discarded"
"""Kind of a file that is about to be deleted: it is in no list any more, and its bytes may be gone."""


def discard(session: Session, job_id: str, kind: str, name: str) -> None:
    """Take every attempt's file of a kind and name out of the lists, to be deleted."""
    query = update(Artifact).where(Artifact.job_id == job_id, Artifact.kind == kind, Artifact.name == name)
    session.execute(query.values(kind=DISCARDED))


def discarded(session: Session, job_id: str) -> Sequence[Artifact]:
    """Files whose bytes are to be deleted."""
    query = select(Artifact).where(Artifact.job_id == job_id, Artifact.kind == DISCARDED)
    return session.scalars(query.order_by(Artifact.id)).all()


def delete(session: Session, artifact_id: str) -> None:
    """Forget a file whose bytes are deleted."""
    session.execute(delete_rows(Artifact).where(Artifact.id == artifact_id, Artifact.kind == DISCARDED))


def find(session: Session, job_id: str, kind: str, name: str) -> Artifact | None:
    """The newest file of a kind and name (``("report", "report.html")``)."""
    query = select(Artifact).where(Artifact.job_id == job_id, Artifact.kind == kind, Artifact.name == name)
    return session.scalar(query.order_by(Artifact.attempt.desc()).limit(1))
