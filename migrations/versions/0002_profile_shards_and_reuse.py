"""Profiles measured in shards, and found again by their fingerprint.

Revision: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

KINDS = "kind IN ('profile', 'training', 'evaluation')"
KINDS_WITH_SHARDS = "kind IN ('profile', 'training', 'evaluation', 'profile_shard')"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as batch:
        batch.add_column(sa.Column("fingerprint", sa.Text(), nullable=True))
        batch.drop_constraint(op.f("ck_jobs_kind"), type_="check")
        batch.create_check_constraint(op.f("ck_jobs_kind"), KINDS_WITH_SHARDS)
    op.create_index(op.f("ix_jobs_workspace_id_fingerprint"), "jobs", ["workspace_id", "fingerprint"])
    op.create_index(op.f("ix_artifacts_kind"), "artifacts", ["kind"])


def downgrade() -> None:
    op.drop_index(op.f("ix_artifacts_kind"), table_name="artifacts")
    op.drop_index(op.f("ix_jobs_workspace_id_fingerprint"), table_name="jobs")
    with op.batch_alter_table("jobs") as batch:
        batch.drop_column("fingerprint")
        batch.drop_constraint(op.f("ck_jobs_kind"), type_="check")
        batch.create_check_constraint(op.f("ck_jobs_kind"), KINDS)
