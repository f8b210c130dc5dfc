"""Rewards on other machines, over real sockets: slow, failing, malformed, and well-behaved servers."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
import time

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from recast_engine.errors import ConfigError, InvalidArgument, RewardFailure, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards import http_config, unifiedreward, wire
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.http import HttpReward
from recast_engine.rewards.scoring import Scorer
from tests.recast.scripted_server import Scripted, drop, send_json, serve

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 12, 10, 3), dtype=np.uint8)
PROMPTS = [Prompt(f"prompt {i}", text="GO", include=({"class": "cat", "count": i + 1},)) for i in range(5)]
TABLE = {"objective": "appearance", "range": [0, 255], "licence": "MIT"}


@pytest.fixture
def server():
    with serve() as scripted:
        yield scripted


def reward(server: Scripted, **table) -> HttpReward:
    config = {"url": f"{server.url}/score", "retries": 0, "timeout_seconds": 5.0, **TABLE, **table}
    info = http_config.info("mine", config)
    return HttpReward("mine", info.loader.args[1], first_pause=0.01)


def mean_red(handler, body: bytes):
    request = wire.decode_request(body, handler.headers["Content-Type"])
    send_json(handler, 200, {"scores": request.images[..., 0].mean(axis=(1, 2)).tolist()})


@pytest.mark.parametrize("format", ["png", "webp", "safetensors"])
def test_pixels_and_prompts_arrive_unchanged_and_scores_in_order(server, format):
    asked = []

    def answer(handler, number):
        body = server.seen[-1].body
        request = wire.decode_request(body, handler.headers["Content-Type"])
        asked.append(request)
        mean_red(handler, body)

    server.on("POST /score", answer)
    scores = reward(server, format=format, batch=2, concurrency=1, reward="theirs").score(IMAGES, PROMPTS)
    np.testing.assert_allclose(scores, IMAGES[..., 0].mean(axis=(1, 2)))
    assert [len(request.images) for request in asked] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([request.images for request in asked]), IMAGES)
    assert [p.to_json() for request in asked for p in request.prompts] == [p.to_json() for p in PROMPTS]
    assert {request.reward for request in asked} == {"theirs"}


def test_the_documented_json_can_be_written_by_hand(server):
    server.on("POST /score", {"scores": [0.5, None, 1, 2, 3]})
    scores = reward(server).score(IMAGES, PROMPTS)
    np.testing.assert_array_equal(scores, [0.5, np.nan, 1, 2, 3])
    sent = json.loads(server.seen[0].body)
    assert set(sent) == {"reward", "images", "prompts"}
    assert sent["prompts"][0] == {
        "prompt": "prompt 0", "text": "GO", "include": [{"class": "cat", "count": 1}],
    }  # fmt: skip
    picture = Image.open(io.BytesIO(base64.b64decode(sent["images"][3]["data"])))
    np.testing.assert_array_equal(np.asarray(picture), IMAGES[3])


def test_a_failing_server_is_asked_again_and_then_given_up(server):
    def answer(handler, number):
        if number < 2:
            send_json(handler, 503, {})
        else:
            mean_red(handler, server.seen[-1].body)

    server.on("POST /score", answer)
    assert np.isfinite(reward(server, retries=2).score(IMAGES, PROMPTS)).all()
    assert len(server.seen) == 3
    server.on("POST /score", {}, status=500)
    with pytest.raises(RewardFailure, match=r"'mine': the server answered 500"):
        reward(server, retries=1).score(IMAGES, PROMPTS)
    assert len(server.seen) == 5


@pytest.mark.parametrize("status", [302, 400, 401, 404])
def test_what_will_not_get_better_is_not_asked_again(server, status):
    server.on("POST /score", {}, status=status)
    with pytest.raises(RewardFailure, match=f"answered {status}"):
        reward(server, retries=3).score(IMAGES, PROMPTS)
    assert len(server.seen) == 1


def test_a_slow_server_times_out_and_a_dropped_connection_fails(server):
    server.on("POST /score", lambda handler, _: time.sleep(3.0))
    started = time.monotonic()
    with pytest.raises(RewardFailure, match="did not answer in time"):
        reward(server, timeout_seconds=0.2).score(IMAGES, PROMPTS)
    assert time.monotonic() - started < 3.0
    server.on("POST /score", lambda handler, _: drop(handler))
    with pytest.raises(RewardFailure, match="cannot be reached"):
        reward(server).score(IMAGES, PROMPTS)


@pytest.mark.parametrize("start", [b"X-Slow: ", b"Content-Length: 400\r\n\r\n"])
def test_an_answer_in_drops_times_out_as_a_whole(server, start):
    """Whether its headers or its body never come to an end."""

    def drip(handler, _):
        with contextlib.suppress(ConnectionError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + start)
            for _ in range(400):  # 20 s, never 0.3 s without a byte
                handler.wfile.write(b" ")
                time.sleep(0.05)

    server.on("POST /score", drip)
    started = time.monotonic()
    with pytest.raises(RewardFailure, match="did not answer in time"):
        reward(server, timeout_seconds=0.3).score(IMAGES, PROMPTS)
    assert time.monotonic() - started < 10.0


def test_what_the_server_says_about_a_missing_score_is_told(server):
    def answer(handler, number):
        request = wire.decode_request(server.seen[-1].body, handler.headers["Content-Type"])
        scores = request.images[..., 0].mean(axis=(1, 2)).tolist()
        error = (
            {"error": "out \x1b[2Jof\nmemory\u202e " + "x" * 999}
            if request.prompts[0].prompt == "prompt 2"
            else {}
        )
        send_json(handler, 200, {"scores": [None if error else scores[0], *scores[1:]], **error})

    server.on("POST /score", answer)
    with pytest.raises(PartialFailure, match=r"the reward server says: out \[2Jof memory x+$") as caught:
        reward(server, batch=2, concurrency=1).score(IMAGES, PROMPTS)
    expected = IMAGES[..., 0].mean(axis=(1, 2))
    expected[2] = np.nan  # the other image of that request has its score
    np.testing.assert_allclose(caught.value.values, expected)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "not JSON"),
        (b"[1, 2, 3, 4, 5]", "no list of scores"),
        (b'{"scores": [1, 2]}', "2 scores for 5 images"),
        (b'{"scores": ["1", 2, 3, 4, 5]}', "neither numbers nor null"),
        (b'{"scores": [true, 2, 3, 4, 5]}', "neither numbers nor null"),
        (b'{"scores": [1' + b"0" * 400 + b", 2, 3, 4, 5]}", "too large for a number"),
        (b'{"scores": [1, 2, 3, 4, 5]}' + b" " * 5_000_000, "larger than 4194304 bytes"),
    ],
)
def test_malformed_answers_are_failures_that_say_so(server, body, message):
    def answer(handler, _):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        with contextlib.suppress(ConnectionError):  # nobody reads the long one to its end
            handler.wfile.write(body)

    server.on("POST /score", answer)
    with pytest.raises(RewardFailure, match=message):
        reward(server).score(IMAGES, PROMPTS)


def test_nan_and_null_are_masked_and_counted_by_the_scorer(server):
    def answer(handler, _):
        body = b'{"scores": [NaN, Infinity, null, 1.5, 2]}'
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    server.on("POST /score", answer)
    judge = reward(server)
    judge.id = "clipscore"  # the scorer asks the catalogue about its rewards
    scores = Scorer([judge])(IMAGES, PROMPTS)
    np.testing.assert_array_equal(scores.values, [[np.nan, np.nan, np.nan, 1.5, 2]])
    assert scores.failed.sum() == 3


def test_a_failed_batch_costs_its_own_scores_only(server):
    def answer(handler, number):
        request = wire.decode_request(server.seen[-1].body, handler.headers["Content-Type"])
        if request.prompts[0].prompt == "prompt 2":
            send_json(handler, 400, {})
        else:
            mean_red(handler, server.seen[-1].body)

    server.on("POST /score", answer)
    with pytest.raises(PartialFailure, match="answered 400") as caught:
        reward(server, batch=2, concurrency=1).score(IMAGES, PROMPTS)
    expected = IMAGES[..., 0].mean(axis=(1, 2))
    expected[2:4] = np.nan
    np.testing.assert_allclose(caught.value.values, expected)


def test_no_more_requests_at_once_than_allowed(server):
    under_way, most, lock = 0, 0, threading.Lock()

    def answer(handler, number):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.05)
        with lock:
            under_way -= 1
        send_json(handler, 200, {"scores": [1.0]})

    server.on("POST /score", answer)
    images, prompts = np.concatenate([IMAGES] * 2), PROMPTS * 2
    reward(server, batch=1, concurrency=3).score(images, prompts)
    assert most == 3
    assert len(server.seen) == 10


def test_the_key_comes_from_the_environment_and_stays_out_of_errors(server, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", "sesame-1234")
    server.on("POST /score", {}, status=401)
    with pytest.raises(RewardFailure) as caught:
        reward(server, key_env="JUDGE_KEY").score(IMAGES, PROMPTS)
    assert server.seen[0].headers["Authorization"] == "Bearer sesame-1234"
    for text in (str(caught.value), caplog.text):
        assert "sesame" not in text
        assert server.url not in text
    info = http_config.info("mine", {"url": server.url, "key_env": "JUDGE_KEY", **TABLE})
    assert info.missing("public") is None
    monkeypatch.delenv("JUDGE_KEY")
    assert "set JUDGE_KEY" in str(info.missing("public"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "file:///etc/passwd"}, "http.mine.url"),
        ({"url": "http://host:port/"}, "http.mine.url"),
        ({"url": "http://user:secret@host/"}, "key_env"),
        ({"range": [1, 0]}, "http.mine.range"),
        ({"batch": 0}, "http.mine.batch"),
        ({"retrys": 3}, "http.mine.retrys"),
        ({"needs_metadata": ["mask"]}, "http.mine.needs_metadata"),
        ({"licence": None}, "http.mine.licence"),
    ],
)
def test_a_wrong_table_names_its_field(change, message):
    table = {"url": "http://host/", **TABLE, **change}
    with pytest.raises(ConfigError, match=message):
        http_config.info("mine", {key: value for key, value in table.items() if value is not None})


def json_request(**change) -> bytes:
    image = {"format": "png", "data": wire.encode_image(IMAGES[0], "png")}
    data = {"reward": "ocr", "images": [image], "prompts": [{"prompt": "x"}]} | change
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (json_request(images=[]), "between 1 and 256"),
        (json_request(images=[{"format": "gif", "data": ""}]), r"images\.0\.format"),
        (json_request(images=[{"format": "png", "data": "!!"}]), r"images\.0\.data"),
        (json_request(images=[{"format": "png", "data": base64.b64encode(b"hello").decode()}]), "png image"),
        (json_request(images=[{"format": "png", "data": "é"}]), r"images\.0\.data"),
        (json_request(images=[{"format": "png", "data": 3}]), r"images\.0\.data"),
        (json_request(prompts=[]), "as many prompts"),
        (json_request(prompts=[{"prompt": "x", "colour": 1}]), r"prompts\.0\.colour"),
        (json_request(reward=3), "reward"),
    ],
)
def test_a_wrong_request_names_its_field(body, message):
    with pytest.raises(InvalidArgument, match=message):
        wire.decode_request(body, "application/json; charset=utf-8")


def test_images_that_would_unpack_to_gigabytes_are_refused_unopened():
    for size in ((5000, 1), (20_000, 20_000)):
        buffer = io.BytesIO()
        Image.new("1", size).save(buffer, "PNG")
        image = {"format": "png", "data": base64.b64encode(buffer.getvalue()).decode()}
        with pytest.raises(InvalidArgument, match="4096 pixels"):
            wire.decode_request(json_request(images=[image]), wire.JSON)
    with pytest.raises(InvalidArgument, match="Content-Type"):
        wire.decode_request(b"", "application/x-pickle")
    with pytest.raises(InvalidArgument, match="not safetensors"):
        wire.decode_request(b"\x80\x04N.", wire.SAFETENSORS)


def test_tensors_that_are_no_images_are_refused():
    flat = np.zeros((1, 0, 5, 3), np.uint8)
    body = safetensors.numpy.save({"images": flat}, {"reward": "ocr", "prompts": '[{"prompt": "x"}]'})
    with pytest.raises(InvalidArgument, match="images: 1 to 256"):
        wire.decode_request(body, wire.SAFETENSORS)
    body = safetensors.numpy.save({"images": flat}, {"reward": "ocr", "prompts": "[" * 100_000})
    with pytest.raises(InvalidArgument, match="not safetensors"):
        wire.decode_request(body, wire.SAFETENSORS)


CHAT = "POST /v1/chat/completions"


@pytest.fixture
def judge(server, monkeypatch):
    monkeypatch.setenv("RECAST_UNIFIEDREWARD_URL", f"{server.url}/v1/")
    monkeypatch.setenv("RECAST_UNIFIEDREWARD_KEY", "sesame-1234")
    return unifiedreward.load("public", "cpu", concurrency=2, retries=1, timeout_seconds=5, first_pause=0.01)


def chat(text) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_unifiedreward_asks_with_image_and_caption_and_reads_the_final_score(server, judge):
    server.on(CHAT, chat("cat (object): 1\nred (color): 0\n**Final Score:** 3.5"))
    np.testing.assert_array_equal(judge.score(IMAGES[:2], PROMPTS[:2]), [3.5, 3.5])
    sent = json.loads(server.seen[0].body)
    assert server.seen[0].headers["Authorization"] == "Bearer sesame-1234"
    assert (sent["model"], sent["temperature"]) == ("UnifiedReward", 0)
    image, question = sent["messages"][0]["content"]
    assert question["text"].endswith(("Text Caption: [prompt 0]", "Text Caption: [prompt 1]"))
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    which = int(question["text"][-2])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), IMAGES[which])


@pytest.mark.parametrize(
    ("text", "score"),
    [("Final Score: 4", 4.0), ("final score = 2.25.", 2.25), ("Final Score: 1\nFinal Score: 5", 5.0)],
)
def test_final_scores_are_read(text, score):
    assert unifiedreward.parse_score(text) == score


@pytest.mark.parametrize("text", ["", "The image is good, 4 of 5", "Final Score: 9", "Final Score: none"])
def test_answers_without_a_final_score_are_failures_and_not_low_scores(text):
    with pytest.raises(RewardFailure):
        unifiedreward.parse_score(text)


def test_unifiedrewards_failures_are_masked(server, judge):
    def answer(handler, number):
        text = json.loads(server.seen[-1].body)["messages"][0]["content"][1]["text"]
        if "prompt 1" in text:
            send_json(handler, 200, {"choices": []})
        elif "prompt 2" in text:
            send_json(handler, 200, chat("no idea"))
        else:
            send_json(handler, 200, chat("Final Score: 2"))

    server.on(CHAT, answer)
    judge._concurrency = 1
    with pytest.raises(PartialFailure, match="no chat completion") as caught:
        judge.score(IMAGES, PROMPTS)
    np.testing.assert_array_equal(caught.value.values, [2, np.nan, np.nan, 2, 2])
    server.on(CHAT, {}, status=500)
    with pytest.raises(RewardFailure, match="answered 500"):
        judge.score(IMAGES, PROMPTS)


def test_unifiedreward_needs_an_endpoint_and_a_question_with_the_prompt(monkeypatch):
    monkeypatch.delenv("RECAST_UNIFIEDREWARD_URL", raising=False)
    with pytest.raises(WeightsUnavailable, match="RECAST_UNIFIEDREWARD_URL"):
        unifiedreward.load("public", "cpu")
    monkeypatch.setenv("RECAST_UNIFIEDREWARD_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="prompt"):
        unifiedreward.load("public", "cpu", question="How good is it?")
    for wrong in ({"concurrency": 0}, {"retries": -1}, {"timeout_seconds": 0.0}):
        with pytest.raises(ConfigError, match=r"options\.unifiedreward"):
            unifiedreward.load("public", "cpu", **wrong)
