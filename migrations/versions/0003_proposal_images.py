"""Images of other generators by workspace, and which sources of them a worker can use.

Revision: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "proposal_images",
        sa.Column("workspace_id", sa.Text(), nullable=False),
        sa.Column("prompt_key", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("artifact_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name=op.f("fk_proposal_images_workspace_id")
        ),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name=op.f("fk_proposal_images_artifact_id")
        ),
        sa.PrimaryKeyConstraint("workspace_id", "prompt_key", "number", name=op.f("pk_proposal_images")),
    )
    with op.batch_alter_table("worker_heartbeats") as batch:
        batch.add_column(
            sa.Column("proposals", sa.JSON(none_as_null=True), nullable=False, server_default="[]")
        )


def downgrade() -> None:
    with op.batch_alter_table("worker_heartbeats") as batch:
        batch.drop_column("proposals")
    op.drop_table("proposal_images")
