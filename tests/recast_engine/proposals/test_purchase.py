"""Buying images from both providers, through their SDKs, over a real socket."""

from __future__ import annotations

import json
import logging
import struct
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recast_engine.config import ProposalConfig
from recast_engine.errors import ConfigError, ProposalFailure
from recast_engine.observer import Stopped
from recast_engine.prompts import Prompt
from recast_engine.proposals import http
from recast_engine.proposals.collection import Proposals, collect
from recast_engine.proposals.http import retry_after
from recast_engine.proposals.keys import image_key, prompt_key
from tests.recast_engine.proposals import image_server
from tests.recast_engine.proposals.heard import Heard
from tests.recast_engine.proposals.image_server import GOOGLE_KEY, OPENAI_KEY, ImageServer, picture, status

PROMPTS = [Prompt("a red circle"), Prompt("two cats"), Prompt('the word "CAT"')]
SOURCES = ("openai", "google")
Buy = Callable[..., Proposals]


def config(source: str, **fields: Any) -> ProposalConfig:
    size = {"size": 64} if source == "openai" else {}
    return ProposalConfig(source=source, **{**size, "concurrency": 2, "request_seconds": 5.0, **fields})


@pytest.fixture
def buy(server: ImageServer, heard: Heard, tmp_path: Path) -> Buy:
    """``collect`` two images of each of three prompts into one cache."""

    def call(asked: ProposalConfig, prompts: list[Prompt] = PROMPTS, observer: Heard = heard) -> Proposals:
        return collect(asked, prompts, 2, cache=tmp_path / "cache", resolution=48, observer=observer)

    return call


def file_name(asked: ProposalConfig, prompt: Prompt, number: int) -> str:
    return f"{image_key(prompt_key(asked, prompt.prompt), number)}.png"


def colour(prompt: str, number: int) -> np.ndarray:
    """Of the image that the server draws for the ``number``-th question (from 1) about a prompt."""
    with Image.open(BytesIO(picture(f"{prompt} {number}", 1))) as drawn:
        return np.asarray(drawn)[0, 0]


@pytest.mark.parametrize("source", SOURCES)
def test_every_image_is_bought_once_and_stored_at_once(
    source: str, buy: Buy, server: ImageServer, heard: Heard
) -> None:
    asked = config(source)
    proposals = buy(asked)
    assert server.prompts() == {prompt.prompt: 2 for prompt in PROMPTS}
    assert heard.phases == [("proposals", 6)]
    assert heard.done == sorted(heard.done)
    assert heard.done[-1] == 6
    assert heard.bought == 6
    keys = {file_name(asked, prompt, number) for prompt in PROMPTS for number in range(2)}
    assert set(heard.files) == keys
    for prompt in PROMPTS:
        images = proposals.images(prompt)
        assert images.shape == (2, 48, 48, 3)
        drawn = {tuple(image[20, 30]) for image in images}
        assert drawn == {tuple(colour(prompt.prompt, number)) for number in (1, 2)}


def test_openai_is_asked_as_the_images_api_wants_it(buy: Buy, server: ImageServer) -> None:
    buy(config("openai", quality="low"))
    request = server.asked[0]
    assert request.path == "/v1/images/generations"
    assert request.headers["authorization"] == f"Bearer {OPENAI_KEY}"
    assert request.body == {
        "model": "gpt-image-1.5",
        "n": 1,
        "prompt": PROMPTS[0].prompt,
        "quality": "low",
        "size": "64x64",
    }


def test_google_is_asked_as_generate_content_wants_it(buy: Buy, server: ImageServer) -> None:
    server.faults = deque([image_server.image(picture("big", 1024))] * 6)
    buy(config("google", model="gemini-x-image", size=1024))
    request = server.asked[0]
    assert request.path == "/v1beta/models/gemini-x-image:generateContent"
    assert request.headers["x-goog-api-key"] == GOOGLE_KEY
    assert GOOGLE_KEY not in request.path
    assert request.body["generationConfig"]["responseModalities"] == ["IMAGE"]
    assert request.body["generationConfig"]["imageConfig"] == {"aspectRatio": "1:1", "imageSize": "1K"}


def test_requests_run_at_once_up_to_the_cap(buy: Buy, server: ImageServer) -> None:
    server.seconds = 0.1
    began = time.monotonic()
    buy(config("openai", concurrency=3))
    assert server.most_at_once == 3
    assert time.monotonic() - began < 6 * 0.1 + 5  # two rounds of 0.1 s; the SDK's import is in it


def bomb() -> bytes:
    """A PNG of 30,000 x 30,000 pixels in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))


def gif() -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, format="GIF")
    return buffer.getvalue()


BAD_ANSWERS = {
    "status 500": (status(500, "boom"), 0),
    "status 503, no JSON": (lambda handler, asked: handler.send_bytes(503, b"<html>"), 0),
    "connection cut": (image_server.truncated, 1),
    "half of the JSON": (image_server.cut_json, 1),
    "not JSON": (image_server.body(b"<html>hello</html>", "text/html"), 1),
    "JSON of another kind": (image_server.data([1, 2]), 1),
    "no image": (image_server.data({"data": [], "candidates": []}), 1),
    "an address": (image_server.data({"data": [{"url": "http://127.0.0.1:1/x.png"}]}), 1),
    "not an image": (image_server.image(b"hello, I am no image"), 1),
    "half of an image": (image_server.image(picture("x", 64)[:-40]), 1),
    "a GIF": (image_server.image(gif()), 1),
    "too few pixels": (image_server.image(picture("x", 32)), 1),
    "a decompression bomb": (image_server.image(bomb()), 1),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_bad_answer_is_asked_for_again(
    source: str, name: str, buy: Buy, server: ImageServer, heard: Heard
) -> None:
    fault, charged = BAD_ANSWERS[name]
    server.faults.append(fault)
    proposals = buy(config(source))
    assert len(server.asked) == 7
    assert heard.bought == 6 + charged
    assert all(len(proposals.images(prompt)) == 2 for prompt in PROMPTS)


def test_openai_must_keep_the_size_that_was_asked_for(buy: Buy, server: ImageServer) -> None:
    server.faults.extend([image_server.image(picture("x", 128))] * 2)
    with pytest.raises(ProposalFailure, match=r"128 x 128 pixels instead of 64 x 64.*asked 2 times"):
        buy(config("openai", attempts=2, concurrency=1))


@pytest.mark.parametrize("source", SOURCES)
def test_an_answer_over_the_limit_is_cut_off(
    source: str, buy: Buy, server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 2**20)
    server.faults.append(image_server.endless(2**26))
    with pytest.raises(ProposalFailure, match="too large"):
        buy(config(source, attempts=1))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "fault", [image_server.silent(1.0), image_server.dripping(20.0)], ids=["silent", "slow"]
)
def test_a_slow_answer_is_given_up(
    source: str, fault: image_server.Fault, buy: Buy, server: ImageServer, heard: Heard
) -> None:
    server.faults.append(fault)
    buy(config(source, request_seconds=0.4))
    assert time.monotonic() - server.asked[0].at < 10
    assert len(server.asked) == 7
    assert heard.bought == 7  # whether the lost one is charged cannot be known: it counts


@pytest.mark.parametrize("source", SOURCES)
def test_rate_limits_are_waited_for_and_are_no_tries(source: str, buy: Buy, server: ImageServer) -> None:
    server.faults.extend([status(429, "slow down", {"retry-after": "0.3"})] * 2)
    began = time.monotonic()
    buy(config(source, attempts=1, concurrency=1))
    assert time.monotonic() - began >= 0.6
    assert len(server.asked) == 8


def test_one_limited_request_holds_the_others_back(buy: Buy, server: ImageServer) -> None:
    server.faults.append(status(429, "slow down", {"retry-after": "1.0"}))
    buy(config("openai", concurrency=2))
    after = [asked.at - server.asked[0].at for asked in server.asked]
    assert len([moment for moment in after if moment >= 1.0]) >= 5  # one other may have been under way


def test_a_wait_beyond_the_deadline_is_not_begun(buy: Buy, server: ImageServer) -> None:
    server.faults.append(status(429, "slow down", {"retry-after": "3600"}))
    began = time.monotonic()
    with pytest.raises(ProposalFailure, match=r"deadline_seconds.*status 429: slow down"):
        buy(config("openai", concurrency=1, deadline_seconds=30.0))
    assert time.monotonic() - began < 10


def test_what_was_bought_before_a_failure_is_kept(buy: Buy, server: ImageServer, heard: Heard) -> None:
    def always(handler: image_server.Handler, asked: image_server.Asked) -> None:
        handler.send_json(500, {"error": {"message": "broken"}})

    server.faults.extend([image_server.image(picture("x", 64))] * 3 + [always] * 3)
    with pytest.raises(ProposalFailure, match=r"status 500: broken \(asked 3 times"):
        buy(config("openai", attempts=3, concurrency=1))
    assert len(heard.files) == heard.bought == 3
    before = len(server.asked)
    again = Heard()
    buy(config("openai", attempts=3, concurrency=1), observer=again)
    assert len(server.asked) - before == again.bought == 3
    assert not set(again.files) & set(heard.files)


@pytest.mark.parametrize("source", SOURCES)
def test_stopping_waits_for_what_is_paid_and_goes_on_later(
    source: str, buy: Buy, server: ImageServer
) -> None:
    server.seconds = 0.05
    stopped = Heard(stop_after=1)
    with pytest.raises(Stopped):
        buy(config(source), observer=stopped)
    assert 1 <= len(stopped.files) < 6
    assert len(server.asked) == len(stopped.files) == stopped.bought
    rest = Heard()
    buy(config(source), observer=rest)
    assert len(server.asked) == 6
    assert len(rest.files) + len(stopped.files) == 6
    assert rest.done[0] == len(stopped.files)


def test_other_seeds_models_and_qualities_are_other_images(buy: Buy, server: ImageServer) -> None:
    for change in ({}, {"seed": 1}, {"model": "gpt-image-1"}, {"quality": "low"}, {"size": 80}):
        before = len(server.asked)
        buy(config("openai", **change))
        assert len(server.asked) - before == 6
        buy(config("openai", **change, concurrency=1, attempts=9, max_images=77))
        assert len(server.asked) - before == 6


def test_the_budget_is_checked_before_anything_is_bought(buy: Buy, server: ImageServer) -> None:
    with pytest.raises(ConfigError, match="max_images: 6 images are needed and 5 are allowed"):
        buy(config("openai", max_images=5))
    assert not server.asked


def test_unusable_answers_count_against_the_budget(buy: Buy, server: ImageServer, heard: Heard) -> None:
    server.faults.extend([image_server.image(b"junk")] * 3)
    with pytest.raises(ProposalFailure, match="the budget of 7 images is spent"):
        buy(config("openai", max_images=7, concurrency=1))
    assert len(server.asked) == heard.bought == 7
    assert len(heard.files) == 4


@pytest.mark.parametrize("source", SOURCES)
def test_a_refused_prompt_is_left_out_and_told(
    source: str, buy: Buy, server: ImageServer, heard: Heard
) -> None:
    server.refuse = {"two cats"}
    proposals = buy(config(source, concurrency=1))
    assert len(proposals.images(PROMPTS[1])) == 0
    assert [len(proposals.images(PROMPTS[k])) for k in (0, 2)] == [2, 2]
    assert server.prompts()["two cats"] == 1  # its second image was not asked for
    assert heard.warnings == ["proposals: moderation refused 1 of 3 prompts, which are left out ('two cats')"]
    assert heard.done[-1] == 6
    assert heard.bought == 4


def test_google_blocking_the_prompt_itself_is_a_refusal(buy: Buy, server: ImageServer) -> None:
    server.faults.append(image_server.data({"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}))
    assert len(buy(config("google", concurrency=1)).images(PROMPTS[0])) == 0


def test_a_model_that_only_talks_has_refused(buy: Buy, server: ImageServer, heard: Heard) -> None:
    words = {"content": {"role": "model", "parts": [{"text": "I would rather not."}]}, "finishReason": "STOP"}
    server.faults.extend([image_server.data({"candidates": [words]})] * 2)
    proposals = buy(config("google", concurrency=1, attempts=2))
    assert len(proposals.images(PROMPTS[0])) == 0
    assert len(heard.warnings) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_refusing_everything_leaves_nothing(source: str, buy: Buy, server: ImageServer, heard: Heard) -> None:
    server.refuse = {prompt.prompt for prompt in PROMPTS}
    assert not buy(config(source))
    assert "moderation refused 3 of 3 prompts" in heard.warnings[0]
    server.refuse = {PROMPTS[0].prompt}
    assert buy(config(source))


FATAL = [
    ("openai", status(401, f"Incorrect API key provided: {OPENAI_KEY[:6]}***AI", code="invalid_api_key")),
    ("openai", status(403, f"key {OPENAI_KEY} has no access")),
    ("openai", status(400, f"unknown parameter, sent with {OPENAI_KEY}")),
    ("openai", status(429, "You exceeded your current quota", code="insufficient_quota")),
    ("openai", status(302, "", {"location": "http://127.0.0.1:1/"})),
    ("google", status(400, f"API key not valid: {GOOGLE_KEY}", name="INVALID_ARGUMENT")),
    ("google", status(403, f"{GOOGLE_KEY} is not allowed")),
    ("google", status(404, f"models/x is not found for {GOOGLE_KEY}")),
]


@pytest.mark.parametrize(("source", "fault"), FATAL)
def test_what_cannot_be_mended_is_not_asked_again_and_the_key_is_nowhere(
    source: str,
    fault: image_server.Fault,
    buy: Buy,
    server: ImageServer,
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server.faults.append(fault)
    with caplog.at_level(logging.DEBUG), pytest.raises(ProposalFailure) as caught:
        buy(config(source, concurrency=1))
    assert len(server.asked) == 1
    assert heard.bought == 0
    told = "".join(traceback.format_exception(caught.value)) + caplog.text + "".join(capfd.readouterr())
    told += json.dumps([str(value) for value in heard.metadata.values()])
    for secret in (OPENAI_KEY, GOOGLE_KEY, OPENAI_KEY[:6]):
        assert secret not in told


def test_the_key_is_nowhere_when_all_goes_well(
    buy: Buy, server: ImageServer, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults.extend([status(500, f"with {OPENAI_KEY}"), status(429, f"and {OPENAI_KEY}")])
    with caplog.at_level(logging.DEBUG):
        buy(config("openai"))
    assert "status 500: with [key]" in caplog.text
    kept = caplog.text.encode() + b"".join(heard.files.values()) + repr(heard.metadata).encode()
    assert OPENAI_KEY.encode() not in kept


@pytest.mark.parametrize(
    ("source", "variables", "named"),
    [
        ("openai", {}, "OPENAI_API_KEY"),
        ("openai", {"OPENAI_API_KEY": "  "}, "OPENAI_API_KEY"),
        ("google", {}, "GEMINI_API_KEY or GOOGLE_API_KEY"),
        ("openai", {"OPENAI_API_KEY": "sk-te st"}, "OPENAI_API_KEY: not an API key"),
        ("openai", {"OPENAI_API_KEY": "sk-te\nst"}, "OPENAI_API_KEY: not an API key"),
    ],
)
def test_a_missing_or_broken_key_names_the_remedy(
    source: str,
    variables: dict[str, str],
    named: str,
    buy: Buy,
    server: ImageServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProposalFailure, match=named) as caught:
        buy(config(source))
    assert "sk-te" not in str(caught.value)
    assert not server.asked


def test_google_takes_either_variable(buy: Buy, server: ImageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMINI_API_KEY")
    monkeypatch.setenv("GOOGLE_API_KEY", "AIzaOther")
    buy(config("google"))
    assert server.asked[0].headers["x-goog-api-key"] == "AIzaOther"


def test_prompts_of_the_same_text_share_their_images(buy: Buy, server: ImageServer) -> None:
    proposals = buy(
        config("openai"), prompts=[PROMPTS[0], PROMPTS[0], Prompt(PROMPTS[0].prompt, tag="other")]
    )
    assert len(server.asked) == 2
    assert proposals.images(Prompt(PROMPTS[0].prompt, tag="other")).shape == (2, 48, 48, 3)


def test_a_damaged_image_in_the_cache_is_bought_again(buy: Buy, server: ImageServer, tmp_path: Path) -> None:
    asked = config("openai")
    buy(asked)
    path = tmp_path / "cache" / file_name(asked, PROMPTS[1], 1)
    path.write_bytes(path.read_bytes()[:-30])
    again = Heard()
    buy(asked, observer=again)
    assert set(again.files) == {path.name}
    assert len(server.asked) == 7


def test_a_size_below_the_models_is_refused(buy: Buy, server: ImageServer) -> None:
    with pytest.raises(ConfigError, match="size: 32 is less than the model's 48"):
        buy(config("openai", size=32))
    assert not server.asked


def test_retry_after_is_read_in_both_forms() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert retry_after({"retry-after": "2.5"}) == 2.5
    assert retry_after({"retry-after": date}) == pytest.approx(100, abs=2)
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0
    for text in ("", "soon", "inf", "nan"):
        assert retry_after({"retry-after": text}) is None
