"""The reference reward server on a real socket, called by the client that workers use, and by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest
import uvicorn

from recast.reward_server import create_app
from recast_engine.prompts import Prompt
from recast_engine.rewards import http_config, wire
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.http import HttpReward
from recast_engine.rewards.jpeg_size import JpegSize
from recast_engine.rewards.scoring import Scorer

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
PROMPTS = [Prompt("x", text="GO")] * 6


class Flaky:
    id = "ocr"

    def score(self, images, prompts):
        if np.array_equal(images[0], IMAGES[0]):
            raise KeyError("/secret/path")
        return np.where(np.arange(len(images)) == 0, np.nan, 1.0)


@pytest.fixture(scope="module")
def address():
    app = create_app(Scorer([JpegSize(), Flaky()]), key="sesame", max_body=200_000)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def client(address):
    with httpx.Client(
        base_url=address, trust_env=False, headers={"Authorization": "Bearer sesame"}
    ) as client:
        yield client


def remote(address: str, monkeypatch, format: str, reward: str) -> HttpReward:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    table = {
        "url": f"{address}/v1/score", "reward": reward, "objective": "appearance", "range": [-9, 9],
        "licence": "MIT", "format": format, "batch": 4, "key_env": "JUDGE_KEY", "retries": 0,
    }  # fmt: skip
    return HttpReward("mine", http_config.info("mine", table).loader.args[1])


@pytest.mark.parametrize("format", ["png", "webp", "safetensors"])
def test_a_served_reward_scores_as_it_does_at_home(address, monkeypatch, format):
    served = remote(address, monkeypatch, format, "jpeg_size").score(IMAGES, PROMPTS)
    np.testing.assert_array_equal(served, JpegSize().score(IMAGES, PROMPTS))


def test_what_fails_there_is_null_here_and_its_text_stays_there(address, client, monkeypatch):
    with pytest.raises(PartialFailure, match=r"the reward server says: KeyError$") as caught:
        remote(address, monkeypatch, "png", "ocr").score(IMAGES[:5], PROMPTS[:5])
    np.testing.assert_array_equal(caught.value.values, [np.nan] * 5)  # a batch that raised, one with a NaN
    body, kind = wire.encode_request(wire.ScoreRequest("ocr", IMAGES[:2], tuple(PROMPTS[:2])), "png")
    answer = client.post("/v1/score", content=body, headers={"Content-Type": kind})
    assert answer.json() == {"scores": [None, None], "error": "KeyError"}
    body, kind = wire.encode_request(wire.ScoreRequest("ocr", IMAGES[1:4], tuple(PROMPTS[:3])), "png")
    answer = client.post("/v1/score", content=body, headers={"Content-Type": kind})
    assert answer.json()["scores"] == [None, 1.0, 1.0]


def test_a_prompt_without_what_the_reward_needs_has_no_score(client):
    prompts = (Prompt("nothing to spell"), *PROMPTS[:1])
    body, kind = wire.encode_request(wire.ScoreRequest("ocr", IMAGES[1:3], prompts), "webp")
    answer = client.post("/v1/score", content=body, headers={"Content-Type": kind}).json()
    assert answer["scores"][0] is None
    assert answer["error"]
    body, kind = wire.encode_request(wire.ScoreRequest("ocr", IMAGES[:1], prompts[:1]), "webp")
    answer = client.post("/v1/score", content=body, headers={"Content-Type": kind}).json()
    assert answer == {"scores": [None], "error": "some prompts lack 'text'"}


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"content": b"{"}, 422, "not JSON"),
        ({"headers": {"Content-Type": "application/x-pickle"}}, 422, "Content-Type"),
        ({"headers": {"Authorization": "Bearer other"}}, 401, "key"),
        ({"content": b"x" * 300_000}, 413, "200000 bytes"),
        ({"reward": "clipscore"}, 404, "not served here; there are jpeg_size, ocr"),
    ],
)
def test_refusals_are_problem_documents(client, change, status, message):
    reward = change.pop("reward", "jpeg_size")
    body, kind = wire.encode_request(wire.ScoreRequest(reward, IMAGES[:1], tuple(PROMPTS[:1])), "png")
    headers = {"Content-Type": kind} | change.pop("headers", {})
    answer = client.post("/v1/score", **({"content": body} | change), headers=headers)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert message in answer.json()["detail"]


def test_the_server_lists_its_rewards_and_lives(client):
    assert [row["id"] for row in client.get("/v1/rewards").json()["data"]] == ["jpeg_size", "ocr"]
    assert client.get("/healthz", headers={"Authorization": ""}).json() == {"status": "ok"}
    assert client.get("/v1/rewards", headers={"Authorization": ""}).status_code == 401


def command(*arguments: str, **environment: str) -> list[str] | dict:
    return {
        "args": [sys.executable, "-m", "recast", *arguments],
        "env": {**os.environ, **environment},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def test_the_command_serves_a_catalogue_reward_until_it_is_told_to_stop():
    process = subprocess.Popen(**command("serve-rewards", "-r", "jpeg_size", "--port", "0"))
    try:
        line = process.stdout.readline()
        url = re.search(r"http://\S+/v1/score", line)
        assert url, line + process.stderr.read()
        body, kind = wire.encode_request(
            wire.ScoreRequest("jpeg_size", IMAGES, tuple(PROMPTS)), "safetensors"
        )
        with httpx.Client(trust_env=False) as client:
            answer = client.post(url[0], content=body, headers={"Content-Type": kind}, timeout=30)
        assert answer.json()["scores"] == JpegSize().score(IMAGES, PROMPTS).tolist()
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    finally:
        process.kill()
        process.communicate()


def test_the_commands_refuse_in_one_line(tmp_path):
    empty = {"RECAST_REWARD_SERVER_KEY": "", "RECAST_REWARD_WEIGHTS": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    cases = [
        (("serve-rewards", "-r", "jpeg_size", "--host", "0.0.0.0"), 5, "set RECAST_REWARD_SERVER_KEY"),
        (("serve-rewards", "-r", "hpsv2"), 5, "recast rewards convert hpsv2"),
        (("rewards", "list"), 1, "RECAST_REWARDS: cannot read"),
        (("rewards", "convert", "hpsv2", str(tmp_path / "no.pt")), 1, "does not exist"),
    ]
    for arguments, code, message in cases:
        wrong = {"RECAST_REWARDS": str(tmp_path / "no.toml")} if arguments[1] == "list" else {}
        run = subprocess.run(**command(*arguments, **empty, **wrong), timeout=60, check=False)
        assert run.returncode == code, run.stderr
        assert message in run.stderr
        assert "Traceback" not in run.stderr


def test_the_command_lists_rewards_with_what_they_lack(tmp_path):
    empty = {"RECAST_REWARD_WEIGHTS": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(**command("rewards", "list", "--json", **empty), timeout=60, check=True)
    rows = {row["id"]: row for row in json.loads(run.stdout)}
    assert rows["jpeg_size"]["missing"] is None
    assert "recast rewards convert hpsv2" in rows["hpsv2"]["missing"]
    assert rows["ocr"]["needs_metadata"] == ["text"]
    assert rows["ocr"]["higher_is_better"] is True
    narrow = {**empty, "COLUMNS": "80"}
    run = subprocess.run(**command("rewards", "list", **narrow), timeout=60, check=True)
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    assert lines[0].split() == ["id", "objective", "role", "range", "GiB", "needs"]
    for id, row in rows.items():
        (line,) = [line for line in lines if line.startswith(f" {id} ")]
        assert line.split()[1:3] == [row["objective"], row["role"]]  # nothing is cut
        assert f"{id}: {row['missing'] or 'ready'} [{row['licence']}]" in lines
