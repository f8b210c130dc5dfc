"""Images of other generators that a workspace has already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from store.models import Artifact, ProposalImage

_KEYS_AT_ONCE = 500  # SQLite takes a limited number of parameters in a statement


def remember(
    session: Session, *, workspace_id: str, prompt_key: str, number: int, artifact: Artifact
) -> None:
    """The workspace has this image; the same one stored again takes the place of the first."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    statement = dialect.insert(ProposalImage).values(
        workspace_id=workspace_id, prompt_key=prompt_key, number=number, artifact_id=artifact.id
    )
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["workspace_id", "prompt_key", "number"], set_={"artifact_id": artifact.id}
        )
    )


def known(
    session: Session, workspace_id: str, prompt_keys: Sequence[str], per_prompt: int
) -> Iterator[tuple[ProposalImage, Artifact]]:
    """The first ``per_prompt`` images of each prompt, as far as the workspace has them."""
    for keys in _chunks(prompt_keys):
        query = (
            select(ProposalImage, Artifact)
            .join(Artifact, Artifact.id == ProposalImage.artifact_id)
            .where(
                ProposalImage.workspace_id == workspace_id,
                ProposalImage.prompt_key.in_(keys),
                ProposalImage.number < per_prompt,
            )
        )
        yield from ((image, artifact) for image, artifact in session.execute(query))


def count_known(session: Session, workspace_id: str, prompt_keys: Sequence[str], per_prompt: int) -> int:
    """How many images ``known`` gives."""
    return sum(
        session.scalar(
            select(func.count())
            .select_from(ProposalImage)
            .where(
                ProposalImage.workspace_id == workspace_id,
                ProposalImage.prompt_key.in_(keys),
                ProposalImage.number < per_prompt,
            )
        )
        or 0
        for keys in _chunks(prompt_keys)
    )


def _chunks(prompt_keys: Sequence[str]) -> Iterator[Sequence[str]]:
    distinct = list(dict.fromkeys(prompt_keys))
    return (distinct[start : start + _KEYS_AT_ONCE] for start in range(0, len(distinct), _KEYS_AT_ONCE))
