"""Everything that lasts, as tables. States are text with a named CHECK; all constraints are named."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, MetaData, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from store.types import BigId, PlainJSON, UTCDateTime, utcnow

JOB_KINDS = ("profile", "training", "evaluation", "profile_shard")
INTERNAL_KINDS = ("profile_shard",)
"""Kinds that only workers see: no client lists, reads or cancels them."""
JOB_STATUSES = ("queued", "running", "succeeded", "failed", "cancelling", "cancelled")
ACTIVE = ("running", "cancelling")
TERMINAL = ("succeeded", "failed", "cancelled")
EVENT_TYPES = ("status", "progress", "metrics", "finding", "file", "warning")
ROLES = ("viewer", "editor", "admin")


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def no_cost() -> dict[str, float]:
    """The cost of a job that has not started."""
    return {"model_evaluations": 0, "reward_calls": 0, "proposal_images": 0, "device_seconds": 0.0}


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own hook
        str: Text(),
        datetime: UTCDateTime(),
        dict[str, Any]: PlainJSON,
        list[Any]: PlainJSON,
    }


class Workspace(Base):
    """A tenant: keys, prompt sets, jobs and their results belong to one."""

    __tablename__ = "workspaces"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class ApiKey(Base):
    """A key of a workspace; only the SHA-256 of its secret is stored."""

    __tablename__ = "api_keys"
    __table_args__ = (CheckConstraint(_one_of("role", ROLES), name="role"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"), index=True)
    name: Mapped[str]
    role: Mapped[str]
    key_hash: Mapped[str] = mapped_column(unique=True)
    prefix: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class PromptSet(Base):
    """Prompts as canonical JSONL; without a workspace it is built in and visible to all."""

    __tablename__ = "prompt_sets"

    id: Mapped[str] = mapped_column(primary_key=True)
    workspace_id: Mapped[str | None] = mapped_column(ForeignKey("workspaces.id"), index=True)
    name: Mapped[str]
    sha256: Mapped[str]
    count: Mapped[int]
    tags: Mapped[dict[str, Any]]
    content: Mapped[str] = mapped_column(deferred=True)
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class Job(Base):
    """A profile, training, evaluation or a profile's shard, and where it stands.

    ``done`` and ``total`` count over the phases of an attempt seen so far, so ``done`` never goes down within
    an attempt; ``phase_offset`` is what ``done`` was when the current phase began, and ``phase_start`` how
    far that phase was already then (a second stage or a resumed training goes on counting). ``crashes``
    counts the attempts in a row that ended without a word and brought the job no further; a person who queues
    it again ends the row. ``fingerprint`` is the same for profiles that would come out the same.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(_one_of("kind", JOB_KINDS), name="kind"),
        CheckConstraint(_one_of("status", JOB_STATUSES), name="status"),
        Index(None, "workspace_id", "created_at", "id"),
        Index(None, "status", "lease_expires_at"),
        Index(None, "workspace_id", "fingerprint"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    kind: Mapped[str]
    status: Mapped[str] = mapped_column(default="queued")
    phase: Mapped[str] = mapped_column(default="queued")
    done: Mapped[int] = mapped_column(default=0)
    total: Mapped[int] = mapped_column(default=0)
    phase_offset: Mapped[int] = mapped_column(default=0)
    phase_start: Mapped[int] = mapped_column(default=0)
    phase_started_at: Mapped[datetime | None]
    error: Mapped[dict[str, Any] | None]
    attempt: Mapped[int] = mapped_column(default=0)
    crashes: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    stop_requested: Mapped[bool] = mapped_column(default=False)
    request: Mapped[dict[str, Any]]
    config: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None]
    cost: Mapped[dict[str, Any]] = mapped_column(default=no_cost)
    warnings: Mapped[list[Any]] = mapped_column(default=list)
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    resume_from: Mapped[str | None]
    fingerprint: Mapped[str | None]
    published_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class JobEvent(Base):
    """What happened to a job, in order; ``seq`` increases over all jobs and is never used twice."""

    __tablename__ = "job_events"
    __table_args__ = (
        CheckConstraint(_one_of("type", EVENT_TYPES), name="type"),
        Index(None, "job_id", "seq"),
        {"sqlite_autoincrement": True},
    )

    seq: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    type: Mapped[str]
    data: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class Metric(Base):
    """One scalar of one training epoch; a repeated epoch overwrites it."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]


class Profile(Base):
    """A measured Rényi profile; ``extra`` is all of it as the engine gave it, the rest its public parts."""

    __tablename__ = "profiles"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    levels: Mapped[list[Any]]
    curves: Mapped[dict[str, Any]]
    warnings: Mapped[list[Any]]
    extra: Mapped[dict[str, Any]]


class Allocation(Base):
    """An allocation matrix, never changed once stored; with a training when a training computed it."""

    __tablename__ = "allocations"
    __table_args__ = (Index(None, "workspace_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    profile_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    training_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    stage: Mapped[int | None]
    epoch: Mapped[int | None]
    reason: Mapped[str | None]
    method: Mapped[str]
    temperature: Mapped[float]
    steps: Mapped[int]
    rewards: Mapped[list[Any]]
    budgets: Mapped[dict[str, Any]]
    matrix: Mapped[list[Any]]
    gains: Mapped[list[Any] | None]
    sigmas: Mapped[list[Any] | None]
    diagnostics: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class Artifact(Base):
    """A stored file, or a stored folder: then ``key`` is its prefix and ``meta["files"]`` lists its files."""

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("job_id", "attempt", "kind", "name"), Index(None, "kind"))

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    attempt: Mapped[int]
    kind: Mapped[str]
    name: Mapped[str]
    key: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    step: Mapped[int | None]
    meta: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class ProposalImage(Base):
    """An image of another generator that a workspace has, by what determines it: it is never bought again."""

    __tablename__ = "proposal_images"

    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"), primary_key=True)
    prompt_key: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    artifact_id: Mapped[str] = mapped_column(ForeignKey("artifacts.id"))


class Adapter(Base):
    """A LoRA adapter that a training exported."""

    __tablename__ = "adapters"
    __table_args__ = (Index(None, "workspace_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    training_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    artifact_id: Mapped[str] = mapped_column(ForeignKey("artifacts.id"))
    step: Mapped[int]
    epoch: Mapped[int]
    base_model: Mapped[str]
    rank: Mapped[int]
    alpha: Mapped[float]
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    final: Mapped[bool]
    provenance: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class EvaluationReport(Base):
    """The statistics of a finished evaluation; the HTML report is an artifact of the job."""

    __tablename__ = "evaluation_reports"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class IdempotencyKey(Base):
    """The first answer to a creating request; without a status code while that request is under way."""

    __tablename__ = "idempotency_keys"

    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    status_code: Mapped[int | None]
    response: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = mapped_column(default=utcnow)


class WorkerHeartbeat(Base):
    """A worker process, its queues and the sources of proposals it can use; dead when ``seen_at`` is old."""

    __tablename__ = "worker_heartbeats"

    worker: Mapped[str] = mapped_column(primary_key=True)
    queues: Mapped[list[Any]]
    proposals: Mapped[list[Any]] = mapped_column(default=list)
    started_at: Mapped[datetime] = mapped_column(default=utcnow)
    seen_at: Mapped[datetime] = mapped_column(default=utcnow)
