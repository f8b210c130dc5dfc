"""Measured profiles; a profile's id is its job's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from store.errors import NotFound
from store.models import Profile
from store.repositories import jobs


def create(session: Session, job_id: str, profile: Mapping[str, Any]) -> Profile:
    """Store what the engine measured (``Profile.to_dict()``); a repeated measurement replaces the row."""
    row = Profile(
        job_id=job_id,
        levels=list(profile["levels"]),
        curves=dict(profile["curves"]),
        warnings=list(profile["warnings"]),
        extra=dict(profile),
    )
    merged = session.merge(row)
    session.flush()
    return merged


def get(session: Session, job_id: str, workspace_id: str | None = None) -> Profile:
    """The measured profile of a job. Raises NotFound, also while the job has not measured it yet."""
    jobs.get(session, job_id, workspace_id, kind="profile")
    profile = session.get(Profile, job_id)
    if profile is None:
        raise NotFound("profile", job_id)
    return profile


def find(session: Session, job_id: str) -> Profile | None:
    """The measured profile of a job that the caller has checked, None while there is none."""
    return session.get(Profile, job_id)
