"""A service on SQLite in a temporary folder, a client per role, and what was published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.app import create_app
from api.context import Context
from recast_engine import miniature
from recast_engine.profiling import Curve, Profile
from store.models import Job
from store.repositories import adapters, artifacts, attempts, jobs, keys, profiles, workspaces
from store.settings import Settings

SECRETS = {role: f"rk_{role}_secret_for_tests" for role in ("viewer", "editor", "admin")}
STRANGER = "rk_stranger_secret_for_tests"


@dataclass
class Published:
    """Stands in for the queue; ``messages`` are (kind, job id)."""

    messages: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, kind: str, job_id: str) -> bool:
        self.messages.append((kind, job_id))
        return True


@dataclass
class Service:
    """The running app and its inside."""

    client: TestClient
    context: Context
    published: Published
    workspace_id: str

    def as_role(self, role: str) -> dict[str, str]:
        """Headers of a key with ``role``; "stranger" is an admin of another workspace."""
        return {"Authorization": f"Bearer {SECRETS.get(role, STRANGER)}"}

    def write(self) -> Session:
        """A session to arrange things with; use as ``with service.write() as session, session.begin()``."""
        return self.context.write()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database as the service leaves it after its first start."""
    home = tmp_path_factory.mktemp("prepared")
    with TestClient(create_app(Settings(home=home))):
        pass
    return home / "recast.db"


@pytest.fixture
def settings(tmp_path: Path, prepared: Path) -> Settings:
    """A service of its own for every test, with a broker that nobody answers for."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(prepared, home)
    return Settings(home=home, broker_url="redis://127.0.0.1:1/0")


@pytest.fixture
def service(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """All rewards count as available, whatever weights this checkout has; nothing here loads them."""
    weights = settings.home / "weights"
    weights.mkdir()
    monkeypatch.setattr(miniature, "reward_weights", lambda name: weights)
    published = Published()
    app = create_app(settings, publish=published)
    with TestClient(app, raise_server_exceptions=False) as client:
        context: Context = app.state.context
        with context.write.begin() as session:
            own = workspaces.create(session, "default")
            other = workspaces.create(session, "other")
            for role, secret in SECRETS.items():
                keys.create(session, workspace_id=own.id, name=role, role=role, secret=secret)
            keys.create(session, workspace_id=other.id, name="stranger", role="admin", secret=STRANGER)
        client.headers.update({"Authorization": f"Bearer {SECRETS['editor']}"})
        yield Service(client, context, published, own.id)


@pytest.fixture
def client(service: Service) -> TestClient:
    """Calls as an editor unless told otherwise."""
    return service.client


PROMPTS = "".join(
    json.dumps(line) + "\n"
    for line in (
        {
            "prompt": "a red circle",
            "include": [{"class": "circle", "count": 1, "color": "red"}],
            "tag": "shape",
        },
        {"prompt": "two green triangles", "include": [{"class": "triangle", "count": 2}], "tag": "shape"},
        {"prompt": 'the word "CAT"', "text": "CAT", "tag": "text"},
        {"prompt": "a blue square"},
    )
)


@pytest.fixture
def prompt_set(service: Service) -> str:
    """Id of an uploaded set: two prompts for geneval, one for ocr, one plain."""
    answer = service.client.post("/v1/prompt-sets", json={"name": "four", "content": PROMPTS})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


@pytest.fixture
def training(prompt_set: str) -> dict[str, Any]:
    """A small valid training request."""
    return {
        "model": "miniature",
        "prompt_set": prompt_set,
        "stages": [{"budgets": {"clipscore": 1.0, "ocr": 3.0}, "epochs": 2}],
        "sampling": {"steps": 4, "prompts_per_epoch": 2, "images_per_prompt": 2},
    }


@pytest.fixture
def job_count(service: Service) -> Callable[[], int]:
    """How many job rows there are, of any workspace."""

    def count() -> int:
        with service.context.read() as session:
            return session.scalar(select(func.count()).select_from(Job)) or 0

    return count


def curve(total: float) -> Curve:
    levels = len(LEVELS)
    divergence = tuple(total * (1 - level) for level in LEVELS)
    gain = (total / (levels - 1),) * (levels - 1)
    return Curve(
        divergence=divergence,
        divergence_raw=divergence,
        standard_error=(0.01,) * levels,
        ci_low=divergence,
        ci_high=divergence,
        gain=gain,
        gain_low=gain,
        gain_high=gain,
        total=total,
        max_violation_se=0.0,
        prompts=4,
        images=16,
    )


LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.fixture
def measured_profile(service: Service) -> str:
    """Id of a succeeded profile of the miniature: clipscore (D = 0.4) and ocr (D = 0.8), both linear."""
    profile = Profile(
        rewards=("clipscore", "ocr"),
        levels=LEVELS,
        curves={"clipscore": curve(0.4), "ocr": curve(0.8)},
        warnings=("few prompts",),
        cost={"model_evaluations": 100, "device_seconds": 2.0},
        config={"alpha": 2.0},
    )
    with service.write() as session, session.begin():
        job = jobs.create(
            session,
            workspace_id=service.workspace_id,
            kind="profile",
            request={},
            config={"model": "miniature", "prompt_set": "pset_x", "rewards": ["clipscore", "ocr"]},
        )
        claim = attempts.claim(session, job.id, "worker", 60)
        profiles.create(session, job.id, profile.to_dict())
        attempts.add_cost(session, claim, {"model_evaluations": 100, "device_seconds": 2.0})
        attempts.finish(session, claim, "succeeded", result={"totals": profile.totals})
    return job.id


@pytest.fixture
def adapter(service: Service) -> str:
    """Id of a final adapter of the miniature, rank 2 alpha 4, whose training has succeeded."""
    return store_adapter(service)


def lora_file() -> bytes:
    """A LoRA of rank 2 and alpha 4 on two layers, in the diffusers format."""
    generator = np.random.default_rng(0)
    tensors = {}
    for module in ("blocks.0.to_q", "blocks.0.to_out.0"):
        tensors[f"transformer.{module}.lora_A.weight"] = generator.normal(size=(2, 6)).astype(np.float32)
        tensors[f"transformer.{module}.lora_B.weight"] = generator.normal(size=(5, 2)).astype(np.float32)
    metadata = {
        "lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 4}),
        "recast.seed": "7",
    }
    return save(tensors, metadata=metadata)


def store_adapter(service: Service, base_model: str = "miniature") -> str:
    content = lora_file()
    with service.write() as session, session.begin():
        job = jobs.create(
            session,
            workspace_id=service.workspace_id,
            kind="training",
            request={},
            config={"model": base_model, "stages": []},
        )
        claim = attempts.claim(session, job.id, "worker", 60)
        key = f"jobs/{job.id}/1/adapter/final.safetensors"
        stored = service.context.artifacts.put_bytes(key, content)
        artifact = artifacts.create(
            session,
            job_id=job.id,
            attempt=1,
            kind="adapter",
            name="final.safetensors",
            key=key,
            bytes=stored.bytes,
            sha256=stored.sha256,
            step=8,
            meta={},
        )
        row = adapters.create(
            session,
            workspace_id=service.workspace_id,
            artifact=artifact,
            step=8,
            epoch=2,
            base_model=base_model,
            rank=2,
            alpha=4.0,
            final=True,
            provenance={"seed": 7},
        )
        attempts.finish(session, claim, "succeeded", result={})
    return row.id
