"""A local HTTP server that speaks the two image APIs, and misbehaves on request.

``/v1/images/generations`` is OpenAI's, ``/v1beta/models/<model>:generateContent`` Google's. Every request is
kept; the next answer is taken from ``faults``, and when there is none it is an image.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

from PIL import Image

OPENAI_KEY = "sk-test-Zq8kSecretOpenAI"
GOOGLE_KEY = "AIzaTestSecretGoogle77"


@dataclass
class Asked:
    """One request: its path, JSON body, headers (lower case), prompt, and when it came (monotonic)."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    prompt: str
    at: float = field(default_factory=time.monotonic)


Fault = Callable[["Handler", Asked], None]


@dataclass
class ImageServer:
    """What the server was asked and what it does next.

    Attributes:
        refuse: prompts that moderation declines.
        seconds: how long an answer takes.
        most_at_once: the largest number of requests under way together.
    """

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    refuse: set[str] = field(default_factory=set)
    seconds: float = 0.0
    most_at_once: int = 0
    under_way: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead both SDKs here."""
        return {
            "OPENAI_API_KEY": OPENAI_KEY,
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "GEMINI_API_KEY": GOOGLE_KEY,
            "GOOGLE_GEMINI_BASE_URL": self.url,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def prompts(self) -> Counter[str]:
        """How often each prompt was asked for."""
        return Counter(asked.prompt for asked in self.asked)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: ImageServer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        google = ":generateContent" in self.path
        prompt = body["contents"][0]["parts"][0]["text"] if google else body["prompt"]
        asked = Asked(self.path, body, {name.lower(): value for name, value in self.headers.items()}, prompt)
        with self.state.lock:
            self.state.asked.append(asked)
            self.state.under_way += 1
            self.state.most_at_once = max(self.state.most_at_once, self.state.under_way)
            fault = self.state.faults.popleft() if self.state.faults else None
            number = self.state.prompts()[prompt]
        try:
            if self.state.seconds:
                time.sleep(self.state.seconds)
            if fault is not None:
                fault(self, asked)
            elif prompt in self.state.refuse:
                self.send_json(*refusal(google))
            else:
                self.send_json(200, answer(asked, picture(f"{prompt} {number}", side_of(asked))))
                with self.state.lock:
                    self.state.answered[prompt] += 1
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.state.lock:
                self.state.under_way -= 1

    def send_json(self, status: int, data: Any, headers: Mapping[str, str] | None = None) -> None:
        self.send_bytes(status, json.dumps(data).encode(), headers)

    def send_bytes(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def is_google(asked: Asked) -> bool:
    return ":generateContent" in asked.path


def side_of(asked: Asked) -> int:
    return 64 if is_google(asked) else int(asked.body["size"].partition("x")[0])


def picture(text: str, side: int, format: str = "PNG") -> bytes:
    """A square of one colour, which follows from ``text``."""
    colour = tuple(hashlib.sha256(text.encode()).digest()[:3])
    buffer = BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, format=format)
    return buffer.getvalue()


def answer(asked: Asked, image: bytes) -> dict[str, Any]:
    """The JSON of a good answer that holds ``image``."""
    encoded = base64.b64encode(image).decode()
    if not is_google(asked):
        return {"created": 1, "data": [{"b64_json": encoded}]}
    part = {"inlineData": {"mimeType": "image/png", "data": encoded}}
    return {"candidates": [{"content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}]}


def refusal(google: bool) -> tuple[int, dict[str, Any]]:
    if google:
        return 200, {"candidates": [{"finishReason": "IMAGE_SAFETY", "content": {"role": "model"}}]}
    text = "Your request was rejected by the safety system."
    return 400, {
        "error": {"message": text, "type": "image_generation_user_error", "code": "moderation_blocked"}
    }


def status(
    number: int,
    message: str = "",
    headers: Mapping[str, str] | None = None,
    *,
    code: str | int | None = None,
    name: str = "ERROR",
) -> Fault:
    """An error answer as both providers word it; ``code`` is OpenAI's, ``name`` Google's."""

    def send(handler: Handler, asked: Asked) -> None:
        error = {"message": message, "code": number if code is None else code, "status": name}
        handler.send_json(number, {"error": error}, headers)

    return send


def image(content: bytes) -> Fault:
    """A good answer around any bytes."""
    return lambda handler, asked: handler.send_json(200, answer(asked, content))


def body(content: bytes, content_type: str = "application/json") -> Fault:
    """Any body with status 200."""
    return lambda handler, asked: handler.send_bytes(200, content, {"content-type": content_type})


def data(value: Any) -> Fault:
    """Any JSON with status 200."""
    return lambda handler, asked: handler.send_json(200, value)


def truncated(handler: Handler, asked: Asked) -> None:
    """Half of a good answer, then the connection ends."""
    whole = json.dumps(answer(asked, picture(asked.prompt, 64))).encode()
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(whole)))
    handler.end_headers()
    handler.wfile.write(whole[: len(whole) // 2])
    handler.wfile.flush()
    handler.close_connection = True


def cut_json(handler: Handler, asked: Asked) -> None:
    """Half of a good answer that claims to be whole."""
    whole = json.dumps(answer(asked, picture(asked.prompt, 64))).encode()
    handler.send_bytes(200, whole[: len(whole) // 2])


def silent(seconds: float) -> Fault:
    """No answer for a while, then one that nobody waits for any more."""

    def wait(handler: Handler, asked: Asked) -> None:
        time.sleep(seconds)
        handler.close_connection = True

    return wait


def dripping(seconds: float, pieces: int = 100) -> Fault:
    """An answer that comes byte by byte and never ends in time."""

    def drip(handler: Handler, asked: Asked) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(pieces))
        handler.end_headers()
        for _ in range(pieces):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(seconds / pieces)

    return drip


def endless(size: int) -> Fault:
    """A body of ``size`` bytes."""

    def send(handler: Handler, asked: Asked) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(size))
        handler.end_headers()
        for _ in range(size // 65536):
            handler.wfile.write(b" " * 65536)

    return send


@contextmanager
def serving() -> Iterator[ImageServer]:
    """A server on a free port of the loopback interface."""
    state = ImageServer()
    handler = type("BoundHandler", (Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
