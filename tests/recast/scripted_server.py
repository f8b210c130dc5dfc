"""A scripted HTTP server on a real socket: what it answers, and what it saw."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[BaseHTTPRequestHandler, int], None]
"""Writes the response to the n-th request (from 0) of a method and path."""


@dataclass
class Scripted:
    """The server: ``script["GET /v1/x"]`` answers; everything seen is kept in order."""

    url: str = ""
    script: dict[str, Answer] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    def on(self, call: str, answer: Answer | Any, status: int = 200) -> None:
        """Answer ``call`` with JSON data, or however ``answer`` writes."""
        self.script[call] = (
            answer if callable(answer) else lambda handler, _: send_json(handler, status, answer)
        )

    def calls(self, call: str) -> list[Seen]:
        """The requests of one method and path."""
        return [one for one in self.seen if f"{one.method} {one.path.partition('?')[0]}" == call]


def send_json(
    handler: BaseHTTPRequestHandler, status: int, data: Any, content_type: str = "application/json"
) -> None:
    """A complete JSON response."""
    body = json.dumps(data).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", content_type)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def drop(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()


@contextmanager
def serve() -> Iterator[Scripted]:
    """A running server."""
    scripted = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            call = f"{self.command} {self.path.partition('?')[0]}"
            number = len(scripted.calls(call))
            scripted.seen.append(Seen(self.command, self.path, dict(self.headers), body))
            scripted.script[call](self, number)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, *_: object) -> None: ...

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (OSError, ValueError):  # the script closed the connection
                self.close_connection = True

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    scripted.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield scripted
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
