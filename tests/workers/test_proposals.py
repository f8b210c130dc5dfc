"""External proposals through workers: bought once for the workspace, whatever dies, the key nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sqlalchemy import select, text

from recast_engine import config as configs
from recast_engine.config import ProfileConfig
from store.models import Artifact, Base, Job, ProposalImage
from store.repositories import attempts, jobs, prompt_sets, workers, workspaces
from store.types import utcnow
from tests.recast_engine.proposals.image_server import GOOGLE_KEY, OPENAI_KEY, ImageServer, serving, status
from tests.workers.conftest import Service
from tests.workers.fake_buyer import DIE_AFTER
from workers.preparation import prepare
from workers.supervisor import Supervisor
from workers.sweeper import Sweeper

PROMPTS = ("a red circle", "two green triangles", "a blue square")
VARIABLES = (
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "GEMINI_API_KEY",
    "GOOGLE_API_KEY",
    "GOOGLE_GEMINI_BASE_URL",
)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageServer]:
    """Both providers, and the environment that leads to them."""
    with serving() as state:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in state.environment.items():
            monkeypatch.setenv(name, value)
        yield state


@pytest.fixture
def buying(service: Service) -> Service:
    """The service with an engine that only collects, and three prompts."""
    settings = replace(service.settings, engine_runner="tests.workers.fake_buyer:run")
    with service.runtime.sessions.begin() as session:
        prompt_sets.create(
            session,
            workspace_id=service.workspace,
            name="three",
            sha256="1" * 64,
            count=3,
            tags={},
            content="".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS),
            id="pset_three",
        )
    return replace(service, settings=settings, runtime=replace(service.runtime, settings=settings))


def profile(seed: int = 0, images: int = 2, **fields: Any) -> dict[str, Any]:
    source = {"source": "openai", "size": 64, "concurrency": 1, **fields}
    estimator = {
        "kind": "external_proposal",
        "prompts": 3,
        "images_per_prompt": images,
        "proposals": source,
    }
    body = {"model": "miniature", "rewards": ["clipscore"], "prompt_set": "pset_three", "seed": seed}
    return configs.dump(configs.load(ProfileConfig, {**body, "estimator": estimator}))


Run = Callable[..., Job]


@pytest.fixture
def run(buying: Service) -> Run:
    """Run a profile in this process's worker until it has ended."""

    def call(config: dict[str, Any], workspace: str | None = None) -> Job:
        submitter = buying if workspace is None else replace(buying, workspace=workspace)
        job_id = submitter.submit_config("profile", config, publish=False)
        for _ in range(3):
            with buying.runtime.sessions.begin() as session:
                claim = attempts.claim(session, job_id, "w1", 60)
            if claim is None:
                break
            Supervisor(buying.runtime, claim).run()
        return buying.job(job_id)

    return call


def images(service: Service) -> list[ProposalImage]:
    with service.runtime.sessions() as session:
        return list(session.scalars(select(ProposalImage)))


def test_a_killed_engine_buys_nothing_twice(
    buying: Service, run: Run, server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIE_AFTER, "4")
    job = run(profile())
    assert (job.status, job.attempt) == ("succeeded", 2)
    assert job.result == {"kept": 4, "images": [2, 2, 2], "bought": 2}
    assert server.prompts() == dict.fromkeys(PROMPTS, 2)
    assert job.cost["proposal_images"] == 6
    assert len(images(buying)) == 6


def test_other_profiles_of_the_workspace_share_the_images_and_other_workspaces_do_not(
    buying: Service, run: Run, server: ImageServer
) -> None:
    run(profile())
    again = run(profile(seed=5, max_images=7, concurrency=3))
    assert again.result == {"kept": 6, "images": [2, 2, 2], "bought": 0}
    assert again.cost["proposal_images"] == 0
    more = run(profile(images=3))
    assert more.result == {"kept": 6, "images": [3, 3, 3], "bought": 3}
    assert server.prompts() == dict.fromkeys(PROMPTS, 3)
    with buying.runtime.sessions.begin() as session:
        other = workspaces.create(session, "other").id
        session.execute(text("UPDATE prompt_sets SET workspace_id = NULL WHERE id = 'pset_three'"))
    theirs = run(profile(), workspace=other)
    assert theirs.result == {"kept": 0, "images": [2, 2, 2], "bought": 6}


def test_a_shard_is_given_only_the_images_of_its_own_prompts(buying: Service, run: Run) -> None:
    run(profile())
    work = {"round": 0, "shard": 1, "rows": [2], "columns": [0, 2], "rollouts": [1] * 8, "external": True}
    with buying.runtime.sessions.begin() as session:
        shard = jobs.create(
            session,
            workspace_id=buying.workspace,
            kind="profile_shard",
            request={"work": work},
            config=profile(),
        )
        claim = attempts.claim(session, shard.id, "w1", 60)
    assert claim is not None
    folder = prepare(buying.runtime, claim) / "proposals"
    assert len(list(folder.glob("*.png"))) == 2


def test_the_key_is_in_no_row_no_log_and_no_artifact(
    buying: Service, run: Run, server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_LOG", "debug")
    server.faults.append(status(500, f"you sent {OPENAI_KEY}"))
    done = run(profile())
    server.faults.append(status(401, f"Incorrect API key provided: {OPENAI_KEY}", code="invalid_api_key"))
    failed = run(profile(seed=1, model="gpt-image-1"))
    assert (done.status, failed.status) == ("succeeded", "failed")
    assert failed.error == {
        "type": "proposal-failure",
        "detail": "openai: the API key was refused (status 401); check it and its rights",
    }
    with buying.runtime.sessions() as session:
        rows = [str(row) for table in Base.metadata.sorted_tables for row in session.execute(table.select())]
        assert session.scalar(select(Artifact).where(Artifact.kind == "log")) is not None
    files = [path for path in buying.settings.home.rglob("*") if path.is_file()]
    assert files
    secrets = (OPENAI_KEY.encode(), GOOGLE_KEY.encode())
    assert not [path for path in files for secret in secrets if secret in path.read_bytes()]
    assert not [row for row in rows for secret in secrets if secret.decode() in row]


def test_a_missing_key_is_a_clear_error_of_the_job(
    buying: Service, run: Run, server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    job = run(profile())
    assert job.status == "failed"
    assert job.error is not None
    assert job.error["type"] == "proposal-failure"
    assert "set OPENAI_API_KEY in their environment" in job.error["detail"]
    assert server.asked == []


def test_a_folder_is_read_where_the_operator_keeps_it(buying: Service, run: Run, tmp_path: Path) -> None:
    folder = Path(buying.settings.proposals) / "mine"
    folder.mkdir(parents=True)
    for prompt in PROMPTS:
        for number in range(2):
            Image.new("RGB", (50, 50)).save(folder / f"{prompt.replace(' ', '-')}.{number}.png")
    config = profile()
    config["estimator"]["proposals"] = configs.dump(configs.ProposalConfig(source="folder", folder="mine"))
    job = run(config)
    assert job.result == {"kept": 0, "images": [2, 2, 2], "bought": 0}
    assert images(buying) == []
    assert len(list(folder.iterdir())) == 6  # the work folder's end has not taken them along
    config["estimator"]["proposals"]["folder"] = "theirs"
    job = run(config)
    assert job.error == {
        "type": "invalid-config",
        "detail": "folder: the worker has no folder 'theirs' in its folder of proposals (RECAST_PROPOSALS)",
    }


def test_workers_say_which_sources_they_can_use(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> set[str] | None:
        Sweeper(service.runtime).beat()
        with service.runtime.sessions() as session:
            return workers.proposal_sources(session, "recast.profile", utcnow() - timedelta(minutes=1))

    assert told() == {"openai", "google", "folder", "diffusers"}
    monkeypatch.delenv("GEMINI_API_KEY")
    assert told() == {"openai", "folder", "diffusers"}
    monkeypatch.setenv("GOOGLE_API_KEY", "AIzaOther")
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert told() == {"google", "folder", "diffusers"}
