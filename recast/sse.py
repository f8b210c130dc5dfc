"""Server-sent events, as far as this service sends them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event of a job.

    Attributes:
        seq: increases over the events of a job; what ``Last-Event-ID`` carries.
        type: status, progress, metrics, finding, file or warning.
        data: the event's JSON object.
    """

    seq: int
    type: str
    data: dict[str, Any]


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """Events from the lines of a ``text/event-stream``; comments and a cut-off last event are dropped."""
    fields: dict[str, list[str]] = {}
    for line in lines:
        if line == "":
            if "data" in fields:
                yield _event(fields)
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))


def _event(fields: dict[str, list[str]]) -> Event:
    data = json.loads("\n".join(fields["data"]))
    return Event(int(fields.get("id", ["0"])[-1]), fields.get("event", ["message"])[-1], data)
