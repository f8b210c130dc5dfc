"""The command line against a scripted service: what it sends, what it prints, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from recast import cli
from tests.recast.scripted_server import Scripted, send_json

JOB = {
    "id": "train_1",
    "kind": "training",
    "status": "succeeded",
    "attempt": 1,
    "error": None,
    "warnings": [],
    "result": None,
    "progress": {"phase": "training", "done": 3, "total": 3, "eta_seconds": None},
    "created_at": "2026-01-02T03:04:05Z",
    "started_at": None,
    "finished_at": None,
    "cost": {"model_evaluations": 1, "reward_calls": 2, "proposal_images": 0, "device_seconds": 3.0},
}
ALLOCATION = {
    "id": "alloc_1",
    "rewards": ["clipscore", "ocr"],
    "steps": 2,
    "budgets": {"clipscore": 0.25, "ocr": 0.75},
    "method": "recast",
    "temperature": 1.0,
    "matrix": [[0.2, 0.3], [0.8, 0.7]],
    "diagnostics": {
        "row_residual": 0.0,
        "column_residual": 1e-12,
        "iterations": 3,
        "kl_from_static": 0.01,
        "demand": [1.0, 1.0],
        "demand_ratio": None,
    },
}


@pytest.fixture(autouse=True)
def environment(server: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RECAST_URL", server.url)
    monkeypatch.setenv("RECAST_API_KEY", "rk_test")
    monkeypatch.setenv("RECAST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recast", *arguments])
        try:
            cli.main()
        except SystemExit as error:
            code = int(error.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def events(handler: BaseHTTPRequestHandler, *items: tuple[str, dict[str, Any]]) -> None:
    after = int(handler.headers.get("Last-Event-ID", 0))
    text = "".join(
        f"id: {seq}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
        for seq, (kind, data) in enumerate(items, start=1)
        if seq > after
    )
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(text.encode())
    handler.close_connection = True


def progress(phase: str, done: int, total: int) -> tuple[str, dict[str, Any]]:
    return "progress", {
        "phase": phase,
        "done": done,
        "total": total,
        "phase_done": done,
        "phase_total": total,
    }


HELP = """
import sys
sys.argv = ["recast", "--help"]
from recast.cli import main
try:
    main()
except SystemExit:
    heavy = {"torch", "sqlalchemy", "celery", "fastapi", "matplotlib"} & set(sys.modules)
    sys.exit(" ".join(heavy) or 0)
"""
STORY = (
    ("status", {"status": "queued", "attempt": 0, "error": None}),
    ("status", {"status": "running", "attempt": 1, "error": None}),
    progress("loading", 1, 1),
    progress("training", 0, 3),
    ("metrics", {"step": 1, "values": {"objective": 0.25, "loss/total": 2.0}}),
    ("warning", {"text": "ocr failed on [2] images"}),
    progress("training", 3, 3),
    ("status", {"status": "succeeded", "attempt": 1, "error": None}),
)


def test_a_file_of_the_home_that_cannot_be_used_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lock = tmp_path / "home" / "lock"
    lock.mkdir(parents=True)
    assert run(capsys, "up", "--port", "0") == (1, "", f"Error: {lock}: Is a directory\n")


def test_listing_jobs_as_json_prints_json_and_nothing_else(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("GET /v1/jobs", {"data": [JOB], "next_cursor": None})
    code, out, err = run(capsys, "jobs", "list", "--kind", "training", "--json")
    assert (code, json.loads(out), err) == (0, [JOB], "")
    assert server.seen[0].path == "/v1/jobs?kind=training&limit=20"
    code, out, _ = run(capsys, "jobs", "list")
    assert code == 0
    assert "train_1" in out
    assert "3/3" in out


def test_following_shows_phases_and_warnings(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/jobs/train_1/events", lambda handler, _: events(handler, *STORY))
    server.on("GET /v1/jobs/train_1", JOB)
    code, out, err = run(capsys, "jobs", "follow", "train_1")
    assert code == 0
    assert "succeeded in 3 device seconds" in out
    assert "warning: ocr failed on [2] images" in err
    assert "objective 0.2500  loss 2.0000" in err
    assert "3/3" in err
    assert "starting" not in err


def test_following_as_json_prints_one_event_per_line(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("GET /v1/jobs/train_1/events", lambda handler, _: events(handler, *STORY))
    server.on("GET /v1/jobs/train_1", JOB)
    _, out, _ = run(capsys, "jobs", "follow", "train_1", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(STORY) + 1))
    assert lines[4] == {"seq": 5, "type": "metrics", "data": STORY[4][1]}


def test_a_failed_job_is_one_line_and_exit_code_1(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {**JOB, "status": "failed", "error": {"type": "reward-failure", "detail": "ocr [x] failed"}}
    server.on("GET /v1/jobs/train_1/events", lambda handler, _: events(handler, STORY[0]))
    server.on("GET /v1/jobs/train_1", failed)
    code, out, err = run(capsys, "jobs", "follow", "train_1")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "Error: training train_1 failed: ocr [x] failed (reward-failure)"
    assert "Traceback" not in err


def test_a_refusal_names_the_field_and_is_exit_code_4(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "title": "The request is not valid",
        "errors": [{"loc": ["body", "rewards", 0], "msg": "unknown"}],
    }
    server.on(
        "POST /v1/profiles", lambda handler, _: send_json(handler, 422, document, "application/problem+json")
    )
    code, out, err = run(capsys, "profile", "-r", "nope")
    assert (code, out) == (4, "")
    assert err == "Error: The request is not valid (422): rewards.0: unknown\n"


def test_a_reused_profile_is_said_to_be_one(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    profile = {**JOB, "id": "prof_1", "kind": "profile", "levels": [0.0, 1.0], "curves": {}}
    server.on("POST /v1/profiles", {**profile, "reused": True})
    server.on("GET /v1/jobs/prof_1", profile)
    server.on("GET /v1/profiles/prof_1", profile)
    server.on("GET /v1/jobs/prof_1/events", lambda handler, _: events(handler, STORY[-1]))
    code, out, err = run(capsys, "profile", "-r", "ocr", "--shards", "2")
    assert code == 0
    assert "profile prof_1; next:" in out
    assert err.startswith("reused: this profile is stored already")
    code, out, err = run(capsys, "profile", "-r", "ocr", "--no-reuse", "--json")
    assert (code, err) == (0, "reused: this profile is stored already (--no-reuse measures again)\n")
    assert json.loads(out) == {**profile, "reused": True}
    run(capsys, "profile", "-r", "ocr", "--proposals", "folder", "--proposals-folder", "mine")
    bodies = [json.loads(call.body) for call in server.calls("POST /v1/profiles")]
    assert (bodies[0]["shards"], "reuse" in bodies[0], bodies[0]["estimator"]) == (2, False, {})
    assert bodies[2]["estimator"] == {
        "kind": "external_proposal",
        "proposals": {"source": "folder", "folder": "mine"},
    }
    assert ("shards" in bodies[1], bodies[1]["reuse"]) == (False, False)


def test_an_unreachable_service_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recast.client.time.sleep", lambda seconds: None)
    code, out, err = run(capsys, "jobs", "list", "--url", "http://127.0.0.1:1")
    assert (code, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert "recast up" in err


def test_no_service_known_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RECAST_URL")
    code, _, err = run(capsys, "jobs", "list")
    assert code == 3
    assert "run `recast up`" in err


@pytest.mark.parametrize("pair", ["ocr", "ocr=", "=1", "ocr=nan", "ocr=inf", "ocr=x"])
def test_a_budget_that_is_no_number_is_wrong_usage(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "allocate", "--profile", "prof_1", "--steps", "2", "-b", pair)
    assert code == 2
    assert "NAME=WEIGHT" in err


def test_profiles_are_compared(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    interval = {"value": -0.6, "low": -0.7, "high": -0.5}
    total = {"value": 0.8, "low": 0.7, "high": 0.9}
    reward = {
        "correlation": 0.97,
        "total_a": total,
        "total_b": total,
        "change": interval,
        "verdict": "ocr: ok",
    }
    found = {
        "rewards": {"ocr": reward},
        "largest_weight_change": 0.25,
        "mean_weight_change": 0.1,
        "reward": "ocr",
        "at_step": 3,
        "steps": 10,
        "differences": [{"setting": "seed", "a": 0, "b": 1}],
    }
    server.on("POST /v1/profiles/compare", found)
    code, out, _ = run(capsys, "profiles", "compare", "prof_1", "prof_2", "-b", "ocr=1", "--steps", "10")
    assert code == 0
    assert json.loads(server.calls("POST /v1/profiles/compare")[0].body) == {
        "profiles": ["prof_1", "prof_2"],
        "budgets": {"ocr": 1.0},
        "steps": 10,
    }
    assert "0.9700" in out
    assert "ocr: ok" in out
    assert "at most 0.250 (ocr, step 3 of 10), by 0.100 on average" in out
    assert "Measured differently: seed 0 against 1" in out
    code, out, _ = run(capsys, "profiles", "compare", "prof_1", "prof_2", "--json")
    assert json.loads(out) == found


def test_allocating_sends_budgets_and_shows_the_matrix(
    server: Scripted, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.on("POST /v1/allocations", ALLOCATION, status=201)
    options = ["--profile", "prof_1", "--steps", "2", "-b", "clipscore=1", "-b", "ocr=3"]
    code, out, _ = run(capsys, "allocate", *options, "--png", "matrix.png")
    assert code == 0
    sent = json.loads(server.seen[0].body)
    assert sent == {"profile": "prof_1", "budgets": {"clipscore": 1.0, "ocr": 3.0}, "steps": 2}
    assert "0.7500" in out
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("picture", ["no/folder/matrix.png", "there.png", "."])
def test_where_no_picture_can_be_written_nothing_is_stored(
    picture: str, server: Scripted, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "there.png").write_bytes(b"mine")
    server.on("POST /v1/allocations", ALLOCATION, status=201)
    options = ["--profile", "prof_1", "--steps", "2", "-b", "clipscore=1", "-b", "ocr=3", "--png"]
    code, out, err = run(capsys, "allocate", *options, picture)
    assert (code, out, server.seen) == (1, "", [])
    assert err.startswith(f"Error: cannot write {picture}: ")
    assert err.endswith("or give another file with --png\n")
    assert (tmp_path / "there.png").read_bytes() == b"mine"
    code, out, err = run(capsys, "allocate", *options, "m" * 300)
    assert code == 1
    assert "alloc_1" in out  # stored, so its id is said although the drawing failed
    assert "File name too long; give another file with --png" in err


def test_previewing_stores_nothing(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    preview = {key: value for key, value in ALLOCATION.items() if key != "id"}
    server.on("POST /v1/allocations/preview", preview)
    options = ["--profile", "prof_1", "--steps", "2", "-b", "ocr=1", "--preview"]
    assert run(capsys, "allocate", *options)[0] == 0
    code, out, _ = run(capsys, "allocate", *options, "--json")
    assert (code, json.loads(out)) == (0, preview)


def test_training_leaves_defaults_to_the_service(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("POST /v1/trainings", {**JOB, "status": "queued"}, status=202)
    code, out, _ = run(capsys, "train", "-b", "ocr=1", "--epochs", "2", "--rank", "8", "--no-wait", "--json")
    assert (code, json.loads(out)["status"]) == (0, "queued")
    assert json.loads(server.seen[0].body) == {
        "model": "miniature",
        "prompt_set": "pset_miniature_train",
        "stages": [{"budgets": {"ocr": 1.0}, "epochs": 2}],
        "sampling": {},
        "lora": {"rank": 8, "alpha": 16.0},
        "seed": 0,
    }


def test_training_from_a_file_sends_it_as_it_is(
    server: Scripted, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.on("POST /v1/trainings", {**JOB, "status": "queued"}, status=202)
    body = {"model": "miniature", "stages": [], "unknown": 1}
    (tmp_path / "run.json").write_text(json.dumps(body))
    assert run(capsys, "train", "-f", "run.json", "--no-wait")[0] == 0
    assert json.loads(server.seen[0].body) == body
    code, _, err = run(capsys, "train", "-f", "run.json", "--epochs", "20", "-b", "ocr=1")
    assert code == 2
    assert "--budget, --epochs" in err
    assert len(server.seen) == 1
    (tmp_path / "run.json").write_text("{")
    code, _, err = run(capsys, "train", "-f", "run.json", "--no-wait")
    assert code == 2
    assert "run.json" in err


def test_downloading_picks_the_call_from_the_id(
    server: Scripted, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def file(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "3")
        handler.end_headers()
        handler.wfile.write(b"a,b")

    server.on("GET /v1/allocations/alloc_1.csv", file)
    code, out, _ = run(capsys, "download", "alloc_1", "--json")
    assert code == 0
    assert json.loads(out) == {"id": "alloc_1", "path": str(tmp_path / "alloc_1.csv"), "bytes": 3}
    assert (tmp_path / "alloc_1.csv").read_bytes() == b"a,b"
    (tmp_path / "alloc_1.csv").write_bytes(b"mine")
    code, _, err = run(capsys, "download", "alloc_1")
    assert code == 1
    assert "--replace overwrites it" in err
    assert (tmp_path / "alloc_1.csv").read_bytes() == b"mine"
    assert run(capsys, "download", "alloc_1", "--replace")[0] == 0
    assert (tmp_path / "alloc_1.csv").read_bytes() == b"a,b"
    assert run(capsys, "download", "pset_1")[0] == 2
    code, _, err = run(capsys, "download", "alloc_1", "-o", "no/such/folder.csv")
    assert code == 1
    assert "--output" in err


def test_an_adapter_is_downloaded_in_the_format_asked_for(
    server: Scripted, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def file(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1")
        handler.end_headers()
        handler.wfile.write(b"a")

    for query, name, options in (
        ("", "pytorch_lora_weights.safetensors", ()),
        ("?format=comfyui", "adapt_1-comfyui.safetensors", ("--format", "comfyui")),
        ("?format=peft", "adapt_1-peft.zip", ("--format", "peft")),
    ):
        server.on("GET /v1/adapters/adapt_1/download" + query, file)
        assert run(capsys, "download", "adapt_1", *options)[0] == 0
        assert (tmp_path / name).read_bytes() == b"a"
    assert run(capsys, "download", "adapt_1", "--format", "pickle")[0] == 2
    code, _, err = run(capsys, "download", "alloc_1", "--format", "peft")
    assert code == 2
    assert "--format is for adapters" in err


def test_a_new_keys_secret_is_printed_alone(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("POST /v1/keys", {"id": "key_1", "key": "rk_secret"}, status=201)
    code, out, _ = run(capsys, "keys", "create", "dashboard", "--role", "viewer")
    assert (code, out) == (0, "rk_secret\n")
    assert json.loads(server.seen[0].body) == {"name": "dashboard", "role": "viewer"}


def test_help_is_quick_to_load() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_interrupting_says_that_the_job_goes_on(
    options: list[str], server: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(client: object, job_id: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("recast.client.Client.events", interrupt)
    server.on("POST /v1/trainings", {**JOB, "status": "queued"}, status=202)
    for command in (["train", "-b", "ocr=1"], ["jobs", "follow", "train_1"]):
        code, _, err = run(capsys, *command, *options)
        assert code == 130
        assert "train_1 goes on" in err
        assert "recast jobs cancel train_1" in err


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["train", "-b", "ocr=1"], "trainings"),
        (["profile", "-r", "ocr"], "profiles"),
        (["evaluate", "adapt_1", "-r", "ocr"], "evaluations"),
    ],
)
def test_an_estimate_starts_nothing(
    command: list[str], kind: str, server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = {
        "model_evaluations": 3392,
        "reward_calls": 250,
        "proposal_images": 0,
        "device_seconds": {"low": 20.2, "high": 30.1},
        "basis": "counted",
    }
    server.on(f"POST /v1/{kind}/estimate", cost)
    code, out, _ = run(capsys, *command, "--estimate")
    assert code == 0
    assert out == "3,392 model evaluations, 250 reward calls, 20 to 30 device seconds (counted)\n"
    assert [call.path for call in server.seen] == [f"/v1/{kind}/estimate"]
    assert json.loads(run(capsys, *command, "--estimate", "--json")[1]) == cost


def test_a_training_is_shown_with_its_adapters(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    found = {**JOB, "result": {"epochs": 3, "metrics": {"objective": 0.123456789}}}
    server.on("GET /v1/jobs/train_1", found)
    server.on("GET /v1/trainings/train_1", found)
    server.on("GET /v1/trainings/train_1/adapters", {"data": [{"id": "adapt_1", "epoch": 3}]})
    code, out, _ = run(capsys, "jobs", "show", "train_1")
    assert code == 0
    assert "recast download adapt_1" in out
    assert "    objective: 0.123457\n" in out
    assert not {"{", "None", "["} & set(out.split())


def test_what_is_no_address_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "jobs", "list", "--url", "localhost:8321")
    assert (code, "http://" in err, "is it running" in err) == (3, True, False)


def test_a_missing_file_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["prompts", "upload", "no.jsonl"], ["train", "-f", "no.jsonl"]):
        code, _, err = run(capsys, *command)
        assert (code, err.count("no.jsonl"), "Errno" in err) == (2, 1, False)
