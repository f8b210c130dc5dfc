"""Shards: the parts of a profile's rounds, jobs of their own that only workers see.

The attempt that holds the profile (the coordinator) opens a round and reports on it; whoever claims a shard
writes to that shard alone. Locks are taken parent first, then shards, except by a shard that ends after its
parent has: nobody else locks that parent together with shards any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session, aliased

from store.models import TERMINAL, Artifact, Job, JobEvent
from store.repositories import attempts, jobs
from store.repositories.attempts import Claim

KIND = "profile_shard"
SCORES = "scores"


@dataclass(frozen=True)
class Part:
    """What a shard is to do: ``work`` is JSON data of the engine's, ``images`` what it will count to."""

    work: Mapping[str, Any]
    images: int


def shard_id(parent_id: str, round: int, index: int) -> str:
    """The id of part ``index`` of a round: the same whoever asks, so a part cannot exist twice."""
    return f"shard_{parent_id.partition('_')[2]}_{round:04d}_{index:02d}"


def of_round(session: Session, parent_id: str, round: int) -> Sequence[Job]:
    """Shards of one round, by index."""
    prefix = shard_id(parent_id, round, 0).removesuffix("00")
    query = select(Job).where(Job.parent_id == parent_id, Job.kind == KIND, Job.id.startswith(prefix))
    return session.scalars(query.order_by(Job.id)).all()


def open_round(
    session: Session, claim: Claim, round: int, parts: Sequence[Part]
) -> tuple[Sequence[Job], bool]:
    """The shards of a round and whether they are new: made now unless an attempt before did.

    All parts of a round are made together, so where there are some there are all. A profile that is being
    cancelled gets none.

    Raises:
        StaleAttempt: the coordinator's attempt is over.
    """
    parent = attempts.hold(session, claim)
    found = of_round(session, parent.id, round)
    if found or parent.status != "running":
        return found, False
    made = [
        jobs.create(
            session,
            workspace_id=parent.workspace_id,
            kind=KIND,
            request={"round": round, "shard": index, "images": part.images, "work": dict(part.work)},
            config=parent.config,
            parent_id=parent.id,
            id=shard_id(parent.id, round, index),
        )
        for index, part in enumerate(parts)
    ]
    return made, True


def scored(shard: Job) -> int:
    """Images that a shard has measured so far, in its present attempt."""
    images = int(shard.request["images"])
    if shard.status == "succeeded":
        return images
    if shard.status == "queued" or shard.phase != "profiling":
        return 0
    done, _ = jobs.phase_progress(shard)
    return min(max(done, 0), images)


def report(session: Session, claim: Claim, shards: Sequence[Job]) -> None:
    """Write a round's progress, the warnings and costs of its shards, and each end, once, to their profile.

    Raises:
        StaleAttempt: the coordinator's attempt is over.
    """
    parent = attempts.hold(session, claim)
    jobs.add_up_shards(session, parent)
    for text in dict.fromkeys(text for shard in shards for text in shard.warnings):
        attempts.add_warning(session, claim, text)
    ended = [shard for shard in shards if jobs.is_terminal(shard)]
    told = _told(session, parent.id)
    for shard in ended:
        place = (shard.request["round"], shard.request["shard"])
        if place not in told:
            data = {"kind": "shard", "round": place[0], "shard": place[1], "status": shard.status}
            data |= {"attempt": shard.attempt, "ended": len(ended), "total": len(shards)}
            jobs.add_event(session, parent.id, "finding", data)
            if shard.status == "succeeded":
                attempts.came_further(session, claim)
    attempts.progress(session, claim, sum(map(scored, shards)))


def _told(session: Session, parent_id: str) -> set[tuple[int, int]]:
    """(round, shard) of the ends that the profile's events tell already."""
    query = select(JobEvent.data).where(JobEvent.job_id == parent_id, JobEvent.type == "finding")
    return {(data["round"], data["shard"]) for data in session.scalars(query) if data["kind"] == "shard"}


def cancel(session: Session, claim: Claim) -> None:
    """Stop what is left of the profile's shards. Raises StaleAttempt."""
    jobs.cancel_shards(session, attempts.hold(session, claim).id)


def spent_scores(session: Session, limit: int = 100) -> Sequence[Artifact]:
    """Score files that nobody will read any more: those of ended shards of ended profiles."""
    parent = aliased(Job)
    query = (
        select(Artifact)
        .join(Job, Job.id == Artifact.job_id)
        .join(parent, parent.id == Job.parent_id)
        .where(Artifact.kind == SCORES, Job.kind == KIND)
        .where(Job.status.in_(TERMINAL), parent.status.in_(TERMINAL))
    )
    return session.scalars(query.order_by(Artifact.id).limit(limit)).all()


def forget_scores(session: Session, artifact_id: str) -> None:
    """Drop the row of a score file whose bytes are gone."""
    session.execute(delete(Artifact).where(Artifact.id == artifact_id))
