"""Reports of finished evaluations; a report's id is its job's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from store.errors import NotFound
from store.models import Artifact, EvaluationReport
from store.repositories import artifacts, jobs


def create(session: Session, job_id: str, report: Mapping[str, Any]) -> EvaluationReport:
    """Store the report; a repeated one replaces the row."""
    row = session.merge(EvaluationReport(job_id=job_id, report=dict(report)))
    session.flush()
    return row


def get(session: Session, job_id: str, workspace_id: str | None = None) -> EvaluationReport:
    """The report of an evaluation. Raises NotFound, also while there is none yet."""
    jobs.get(session, job_id, workspace_id, kind="evaluation")
    row = session.get(EvaluationReport, job_id)
    if row is None:
        raise NotFound("evaluation report", job_id)
    return row


def find(session: Session, job_id: str) -> EvaluationReport | None:
    """The report of a job that the caller has checked, None while there is none."""
    return session.get(EvaluationReport, job_id)


def html(session: Session, job_id: str) -> Artifact | None:
    """The HTML report's file, None while there is none."""
    return artifacts.find(session, job_id, "report", "report.html")
