from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from recast import client as client_module
from recast.client import Client, find_service
from recast.errors import JobFailed, NotConfigured, ProblemError, Unreachable
from recast.home import Home, ServiceRecord, write_private
from tests.recast.scripted_server import Scripted, drop, send_json


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module.time, "sleep", lambda seconds: None)


@pytest.fixture
def client(server: Scripted) -> Any:
    with Client(server.url, "rk_test") as made:
        yield made


def sse(handler: BaseHTTPRequestHandler, text: str) -> None:
    """The beginning of an event stream of unknown length."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(text.encode())
    handler.wfile.flush()
    handler.close_connection = True


def event(seq: int, status: str = "running") -> str:
    return f"id: {seq}\nevent: status\ndata: {json.dumps({'status': status})}\n\n"


def job(status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
    return {"id": "train_1", "kind": "training", "status": status, "error": error}


def test_a_dropped_stream_goes_on_without_loss_or_repeats(server: Scripted, client: Client) -> None:
    def stream(handler: BaseHTTPRequestHandler, number: int) -> None:
        after = int(handler.headers.get("Last-Event-ID", 0))
        if number == 0:
            sse(handler, ": hello\n\n" + event(3) + event(5) + "id: 8\nevent: status\ndata: {")
        elif number == 1:
            drop(handler)
        else:
            sse(
                handler,
                "".join(event(seq, "succeeded" if seq == 9 else "running") for seq in (8, 9) if seq > after),
            )

    server.on("GET /v1/jobs/train_1/events", stream)
    server.on("GET /v1/jobs/train_1", job("succeeded"))
    heard = list(client.events("train_1"))
    assert [one.seq for one in heard] == [3, 5, 8, 9]
    assert heard[-1].data == {"status": "succeeded"}
    resumed = [call.headers.get("Last-Event-ID") for call in server.calls("GET /v1/jobs/train_1/events")]
    assert resumed == [None, "5", "5", "9"]


def test_events_end_when_a_finished_job_has_nothing_more(server: Scripted, client: Client) -> None:
    server.on("GET /v1/jobs/train_1/events", lambda handler, _: sse(handler, ""))
    server.on("GET /v1/jobs/train_1", job("failed"))
    assert list(client.events("train_1", after=7)) == []


def test_events_give_up_on_a_dead_service(server: Scripted, client: Client) -> None:
    server.on("GET /v1/jobs/train_1/events", lambda handler, _: drop(handler))
    with pytest.raises(Unreachable, match="recast up"):
        list(client.events("train_1"))
    assert len(server.calls("GET /v1/jobs/train_1/events")) == client_module.RETRIES + 1


def test_waiting_for_a_job_that_fails_raises_its_error(server: Scripted, client: Client) -> None:
    server.on("GET /v1/jobs/train_1/events", lambda handler, _: sse(handler, ""))
    server.on("GET /v1/jobs/train_1", job("failed", {"type": "non-finite", "detail": "loss at step 3"}))
    with pytest.raises(JobFailed, match=r"training train_1 failed: loss at step 3 \(non-finite\)"):
        client.wait("train_1")


def test_a_problem_document_becomes_an_error_naming_every_field(server: Scripted, client: Client) -> None:
    document = {
        "type": "urn:recast:problem:invalid-request",
        "title": "The request is not valid",
        "status": 422,
        "detail": "two things",
        "errors": [
            {"loc": ["body", "stages", 0, "budgets", "ocr"], "msg": "must not be negative"},
            {"loc": ["body"], "msg": "extra"},
        ],
    }
    server.on(
        "POST /v1/trainings", lambda handler, _: send_json(handler, 422, document, "application/problem+json")
    )
    with pytest.raises(ProblemError) as caught:
        client.create_training({"model": "miniature"})
    assert caught.value.status == 422
    assert caught.value.errors == [("stages.0.budgets.ocr", "must not be negative"), ("", "extra")]
    assert (
        str(caught.value)
        == "The request is not valid (422): stages.0.budgets.ocr: must not be negative; extra"
    )


def test_an_answer_that_is_no_problem_document_still_makes_an_error(server: Scripted, client: Client) -> None:
    def answer(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(404)
        handler.send_header("Content-Length", "4")
        handler.end_headers()
        handler.wfile.write(b"gone")

    server.on("GET /v1/jobs/x", answer)
    with pytest.raises(ProblemError, match=r"Not Found \(404\): gone"):
        client.job("x")


def test_gets_are_repeated_after_connection_errors_and_unavailability(
    server: Scripted, client: Client
) -> None:
    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        if number == 0:
            drop(handler)
        else:
            send_json(handler, 503 if number == 1 else 200, {"status": "running"})

    server.on("GET /v1/jobs/x", answer)
    assert client.job("x") == {"status": "running"}
    assert len(server.calls("GET /v1/jobs/x")) == 3


def test_creating_is_repeated_under_one_idempotency_key(server: Scripted, client: Client) -> None:
    server.on(
        "POST /v1/profiles",
        lambda handler, number: drop(handler) if number == 0 else send_json(handler, 202, {"id": "prof_1"}),
    )
    assert client.create_profile({"rewards": ["ocr"]}) == {"id": "prof_1"}
    first, second = server.calls("POST /v1/profiles")
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
    assert json.loads(second.body) == {"rewards": ["ocr"]}
    assert second.headers["Authorization"] == "Bearer rk_test"


def test_other_posts_are_sent_once(server: Scripted, client: Client) -> None:
    server.on("POST /v1/jobs/x/cancel", lambda handler, _: drop(handler))
    with pytest.raises(Unreachable):
        client.cancel("x")
    assert len(server.calls("POST /v1/jobs/x/cancel")) == 1


def test_a_download_that_breaks_off_leaves_no_file(server: Scripted, client: Client, tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "6")
        handler.end_headers()
        handler.wfile.write(b"abc" if number == 0 else b"abcdef")
        handler.wfile.flush()
        drop(handler)

    server.on("GET /v1/adapters/adapt_1/download", answer)
    target = tmp_path / "weights.safetensors"
    with pytest.raises(Unreachable):
        client.download("/v1/adapters/adapt_1/download", target)
    assert not target.exists()
    client.download("/v1/adapters/adapt_1/download", target)
    assert target.read_bytes() == b"abcdef"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("RECAST_URL", "RECAST_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RECAST_HOME", str(tmp_path))
    return Home.find()


def test_the_service_is_found_in_the_home(home: Home) -> None:
    with pytest.raises(NotConfigured, match="recast up"):
        find_service()
    home.write_record(ServiceRecord("http://127.0.0.1:1", 1, "redis://x"))
    write_private(home.key, "rk_local\n")
    assert find_service() == ("http://127.0.0.1:1", "rk_local")
    assert home.key.stat().st_mode & 0o777 == 0o600


def test_arguments_come_before_the_environment_and_that_before_the_home(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_record(ServiceRecord("http://127.0.0.1:1", 1, "redis://x"))
    write_private(home.key, "rk_local\n")
    monkeypatch.setenv("RECAST_URL", "https://recast.example/")
    with pytest.raises(NotConfigured, match="RECAST_API_KEY"):
        find_service()  # the home's key is not sent to another service
    monkeypatch.setenv("RECAST_API_KEY", "rk_env")
    assert find_service() == ("https://recast.example", "rk_env")
    assert find_service("http://10.0.0.1", "rk_given") == ("http://10.0.0.1", "rk_given")
    assert find_service(home=home.root) == ("http://127.0.0.1:1", "rk_local")
