"""Images of other generators: found again within their workspace, on both databases."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session, sessionmaker

from store.models import Artifact, ProposalImage
from store.repositories import artifacts, jobs, proposals, workers, workspaces
from store.types import utcnow


def stored(session: Session, workspace: str, name: str) -> Artifact:
    job = jobs.create(session, workspace_id=workspace, kind="profile", request={}, config={})
    return artifacts.create(
        session,
        job_id=job.id,
        attempt=1,
        kind="proposal",
        name=name,
        key=f"jobs/{job.id}/1/proposal/{name}",
        bytes=3,
        sha256="0" * 64,
        step=None,
        meta={},
    )


def remember(session: Session, workspace: str, prompt_key: str, number: int) -> str:
    artifact = stored(session, workspace, f"{prompt_key}-{number}.png")
    proposals.remember(
        session, workspace_id=workspace, prompt_key=prompt_key, number=number, artifact=artifact
    )
    return artifact.id


def known(session: Session, workspace: str, keys: list[str], per_prompt: int) -> dict[tuple[str, int], str]:
    found = proposals.known(session, workspace, keys, per_prompt)
    return {(image.prompt_key, image.number): artifact.id for image, artifact in found}


def test_images_are_found_by_prompt_and_number_within_the_workspace(session: Session, workspace: str) -> None:
    other = workspaces.create(session, "other").id
    ids = {(key, n): remember(session, workspace, key, n) for key in ("a", "b") for n in range(3)}
    remember(session, other, "a", 0)
    assert known(session, workspace, ["a", "c"], 2) == {("a", n): ids["a", n] for n in range(2)}
    assert known(session, workspace, ["a", "b", "a"], 9) == ids
    assert set(known(session, other, ["a", "b"], 9)) == {("a", 0)}
    assert proposals.count_known(session, workspace, ["a", "b", "a", "c"], 2) == 4
    assert proposals.count_known(session, workspace, [], 2) == 0


def test_many_prompts_are_looked_up_in_parts(
    session: Session, workspace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposals, "_KEYS_AT_ONCE", 2)
    keys = [f"k{number}" for number in range(5)]
    for key in keys:
        remember(session, workspace, key, 0)
    assert {key for key, _ in known(session, workspace, keys, 1)} == set(keys)
    assert proposals.count_known(session, workspace, keys, 1) == 5


def test_an_image_stored_again_takes_the_place_of_the_first(session: Session, workspace: str) -> None:
    remember(session, workspace, "a", 0)
    newer = remember(session, workspace, "a", 0)
    assert known(session, workspace, ["a"], 1) == {("a", 0): newer}


def test_two_jobs_that_store_the_same_image_at_once_both_succeed(
    sessions: sessionmaker[Session], workspace: str
) -> None:
    barrier, failures = threading.Barrier(4), []

    def store() -> None:
        barrier.wait()
        try:
            with sessions.begin() as session:
                remember(session, workspace, "a", 0)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            failures.append(error)

    threads = [threading.Thread(target=store) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with sessions() as session:
        assert session.query(ProposalImage).count() == 1


def test_a_source_is_usable_where_every_live_worker_of_the_queue_can_use_it(session: Session) -> None:
    recently = utcnow() - timedelta(minutes=1)
    assert workers.proposal_sources(session, "recast.profile", recently) is None
    workers.beat(session, "a", ["recast.profile"], ["openai", "folder"])
    workers.beat(session, "b", ["recast.training"], [])
    assert workers.proposal_sources(session, "recast.profile", recently) == {"openai", "folder"}
    workers.beat(session, "c", ["recast.profile", "recast.training"], ["folder"])
    assert workers.proposal_sources(session, "recast.profile", recently) == {"folder"}
    assert workers.proposal_sources(session, "recast.profile", utcnow() + timedelta(seconds=1)) is None
