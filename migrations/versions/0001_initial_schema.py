"""The initial schema.

Revision: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "worker_heartbeats",
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("queues", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("worker", name=op.f("pk_worker_heartbeats")),
    )
    op.create_table(
        "workspaces",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workspaces")),
        sa.UniqueConstraint("name", name=op.f("uq_workspaces_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("workspace_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("role IN ('viewer', 'editor', 'admin')", name=op.f("ck_api_keys_role")),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name=op.f("fk_api_keys_workspace_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_index(op.f("ix_api_keys_workspace_id"), "api_keys", ["workspace_id"], unique=False)

    op.create_table(
        "idempotency_keys",
        sa.Column("workspace_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.Text(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("response", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name=op.f("fk_idempotency_keys_workspace_id")
        ),
        sa.PrimaryKeyConstraint("workspace_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("workspace_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("done", sa.Integer(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("phase_offset", sa.Integer(), nullable=False),
        sa.Column("phase_start", sa.Integer(), nullable=False),
        sa.Column("phase_started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stop_requested", sa.Boolean(), nullable=False),
        sa.Column("request", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("config", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("cost", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("warnings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("resume_from", sa.Text(), nullable=True),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('profile', 'training', 'evaluation')", name=op.f("ck_jobs_kind")),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'succeeded', 'failed', 'cancelling', 'cancelled')",
            name=op.f("ck_jobs_status"),
        ),
        sa.ForeignKeyConstraint(["parent_id"], ["jobs.id"], name=op.f("fk_jobs_parent_id")),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name=op.f("fk_jobs_workspace_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_parent_id"), "jobs", ["parent_id"], unique=False)
    op.create_index(
        op.f("ix_jobs_status_lease_expires_at"), "jobs", ["status", "lease_expires_at"], unique=False
    )
    op.create_index(
        op.f("ix_jobs_workspace_id_created_at_id"), "jobs", ["workspace_id", "created_at", "id"], unique=False
    )

    op.create_table(
        "prompt_sets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("workspace_id", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("tags", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name=op.f("fk_prompt_sets_workspace_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompt_sets")),
    )
    op.create_index(op.f("ix_prompt_sets_workspace_id"), "prompt_sets", ["workspace_id"], unique=False)

    op.create_table(
        "allocations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("workspace_id", sa.Text(), nullable=False),
        sa.Column("profile_id", sa.Text(), nullable=True),
        sa.Column("training_id", sa.Text(), nullable=True),
        sa.Column("stage", sa.Integer(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("rewards", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("budgets", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("matrix", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("gains", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("sigmas", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("diagnostics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["profile_id"], ["jobs.id"], name=op.f("fk_allocations_profile_id")),
        sa.ForeignKeyConstraint(["training_id"], ["jobs.id"], name=op.f("fk_allocations_training_id")),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name=op.f("fk_allocations_workspace_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_allocations")),
    )
    op.create_index(op.f("ix_allocations_training_id"), "allocations", ["training_id"], unique=False)
    op.create_index(
        op.f("ix_allocations_workspace_id_created_at_id"),
        "allocations",
        ["workspace_id", "created_at", "id"],
        unique=False,
    )

    op.create_table(
        "artifacts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("meta", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_artifacts_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
        sa.UniqueConstraint(
            "job_id", "attempt", "kind", "name", name=op.f("uq_artifacts_job_id_attempt_kind_name")
        ),
    )
    op.create_table(
        "evaluation_reports",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("report", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_evaluation_reports_job_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_evaluation_reports")),
    )
    op.create_table(
        "job_events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "type IN ('status', 'progress', 'metrics', 'finding', 'file', 'warning')",
            name=op.f("ck_job_events_type"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_events_job_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_job_events")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_job_events_job_id_seq"), "job_events", ["job_id", "seq"], unique=False)

    op.create_table(
        "metrics",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_metrics_job_id")),
        sa.PrimaryKeyConstraint("job_id", "step", "name", name=op.f("pk_metrics")),
    )
    op.create_table(
        "profiles",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("levels", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("curves", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("warnings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("extra", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_profiles_job_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_profiles")),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("workspace_id", sa.Text(), nullable=False),
        sa.Column("training_id", sa.Text(), nullable=False),
        sa.Column("artifact_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("provenance", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["artifact_id"], ["artifacts.id"], name=op.f("fk_adapters_artifact_id")),
        sa.ForeignKeyConstraint(["training_id"], ["jobs.id"], name=op.f("fk_adapters_training_id")),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name=op.f("fk_adapters_workspace_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
    )
    op.create_index(op.f("ix_adapters_training_id"), "adapters", ["training_id"], unique=False)
    op.create_index(
        op.f("ix_adapters_workspace_id_created_at_id"),
        "adapters",
        ["workspace_id", "created_at", "id"],
        unique=False,
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_adapters_workspace_id_created_at_id"), table_name="adapters")
    op.drop_index(op.f("ix_adapters_training_id"), table_name="adapters")

    op.drop_table("adapters")
    op.drop_table("profiles")
    op.drop_table("metrics")
    op.drop_index(op.f("ix_job_events_job_id_seq"), table_name="job_events")

    op.drop_table("job_events")
    op.drop_table("evaluation_reports")
    op.drop_table("artifacts")
    op.drop_index(op.f("ix_allocations_workspace_id_created_at_id"), table_name="allocations")
    op.drop_index(op.f("ix_allocations_training_id"), table_name="allocations")

    op.drop_table("allocations")
    op.drop_index(op.f("ix_prompt_sets_workspace_id"), table_name="prompt_sets")

    op.drop_table("prompt_sets")
    op.drop_index(op.f("ix_jobs_workspace_id_created_at_id"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_status_lease_expires_at"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_parent_id"), table_name="jobs")

    op.drop_table("jobs")
    op.drop_table("idempotency_keys")
    op.drop_index(op.f("ix_api_keys_workspace_id"), table_name="api_keys")

    op.drop_table("api_keys")
    op.drop_table("workspaces")
    op.drop_table("worker_heartbeats")
