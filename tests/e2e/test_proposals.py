"""Profiles on external proposals through the real service: from a folder, and bought, with a kill between."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recast.client import Client
from recast.home import Home
from recast_engine.miniature import world
from recast_engine.proposals.folder import file_stem
from tests.e2e.conftest import running_service
from tests.e2e.test_recovery import processes
from tests.recast.processes import alive, eventually
from tests.recast_engine.proposals.image_server import GOOGLE_KEY, OPENAI_KEY, ImageServer, serving

PROMPTS = ("a red circle", "two green triangles", "a blue square", "a yellow star")
PER_PROMPT = 2


@pytest.fixture(scope="module")
def server() -> Iterator[ImageServer]:
    with serving() as state:
        state.seconds = 0.3  # long enough to be killed between two images
        yield state


@pytest.fixture(scope="module")
def home(server: ImageServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A service whose workers have the keys, and a folder of proposals."""
    folder = tmp_path_factory.mktemp("home")
    rng = random.Random(0)
    for prompt in PROMPTS:
        for number in range(PER_PROMPT):
            path = folder / "proposals" / "painted" / f"{file_stem(prompt)}.{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            world.render(world.parse(prompt), rng).save(path)
    with running_service(folder, {**server.environment, "OPENAI_LOG": "debug"}) as home:
        yield home


def body(prompt_set: str, **proposals: Any) -> dict[str, Any]:
    estimator = {
        "kind": "external_proposal",
        "levels": 3,
        "prompts": len(PROMPTS),
        "images_per_prompt": PER_PROMPT,
        "sampling_steps": 2,
        "proposals": proposals,
    }
    return {
        "model": "miniature",
        "rewards": ["clipscore"],
        "prompt_set": prompt_set,
        "estimator": estimator,
        "reuse": False,
    }


@pytest.fixture(scope="module")
def prompt_set(home: Home) -> str:
    with Client(home=home.root) as client:
        made = client.create_prompt_set("four", "\n".join(PROMPTS))
    return str(made["id"])


def check_curve(profile: dict[str, Any]) -> None:
    curve = profile["curves"]["clipscore"]
    assert curve["prompts"] == len(PROMPTS)
    assert np.isfinite(curve["divergence_raw"]).all()


def test_a_profile_from_a_folder(client: Client, prompt_set: str) -> None:
    asked = body(prompt_set, source="folder", folder="painted")
    job = client.wait(client.create_profile(asked)["id"])
    assert (job["status"], job["cost"]["proposal_images"]) == ("succeeded", 0)
    whole = client.result(job)
    check_curve(whole)
    sharded = client.wait(client.create_profile({**asked, "shards": 2})["id"])
    assert client.result(sharded)["curves"] == whole["curves"]


def test_a_bought_profile_killed_between_two_images_buys_nothing_twice(
    client: Client, home: Home, server: ImageServer, prompt_set: str
) -> None:
    sources = {source["id"]: source["available"] for source in client.proposal_sources()}
    assert sources == dict.fromkeys(("openai", "google", "folder", "diffusers"), True)
    asked = body(prompt_set, source="openai", size=64, concurrency=1)
    job = client.create_profile(asked)
    stored = 0
    for event in client.events(job["id"]):
        stored += event.type == "file" and event.data["kind"] == "proposal"
        if stored == 3:
            break
    [engine] = processes(home, "workers.engine")
    os.kill(engine, signal.SIGKILL)
    assert eventually(lambda: not alive(engine), 10)
    finished = client.wait(job["id"])
    assert (finished["status"], finished["attempt"]) == ("succeeded", 2)
    check_curve(client.result(finished))
    # what was under way when the engine died is lost; all that had been stored was not asked for again
    total = len(PROMPTS) * PER_PROMPT
    assert total <= len(server.asked) <= total + 1
    kept = Counter(event.data["name"] for event in client.events(job["id"]) if event.type == "file")
    assert len([name for name in kept if name.endswith(".png")]) == total
    assert max(kept.values()) == 1

    before = len(server.asked)
    again = client.wait(client.create_profile({**asked, "seed": 1})["id"])
    assert (again["status"], again["cost"]["proposal_images"]) == ("succeeded", 0)
    assert len(server.asked) == before


def test_no_key_is_left_anywhere(home: Home, prompt_set: str) -> None:
    files = [path for path in home.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.name == "recast.db" for path in files)
    for path in files:
        content = path.read_bytes()
        assert OPENAI_KEY.encode() not in content, path
        assert GOOGLE_KEY.encode() not in content, path
