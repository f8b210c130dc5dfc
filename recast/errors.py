"""Errors that people see: one line each, with the remedy, and the exit code they end a command with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class RecastError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class JobFailed(RecastError):
    """A job ended in ``failed`` or ``cancelled``."""

    exit_code = 1

    def __init__(self, job: Mapping[str, Any]):
        self.job = dict(job)
        error = job.get("error") or {}
        reason = f": {error['detail']} ({error['type']})" if error else ""
        super().__init__(f"{job['kind']} {job['id']} {job['status']}{reason}")


class NotConfigured(RecastError):
    """No address or no key was given, and no local service left one."""

    exit_code = 3


class Unreachable(RecastError):
    """The service does not answer."""

    exit_code = 3


class ProblemError(RecastError):
    """The service refused a request or failed on it: an RFC 9457 problem document.

    Attributes:
        status: HTTP status.
        type, title, detail: the document's members.
        errors: offending fields, ``(dotted location, message)`` each.
    """

    exit_code = 4

    def __init__(self, status: int, document: Mapping[str, Any]):
        self.status = status
        self.type = str(document.get("type", "about:blank"))
        self.title = str(document.get("title", f"HTTP {status}"))
        self.detail = str(document.get("detail", ""))
        self.errors: Sequence[tuple[str, str]] = [
            (".".join(str(part) for part in item["loc"] if part != "body"), str(item["msg"]))
            for item in document.get("errors") or ()
        ]
        super().__init__(self._text())

    def _text(self) -> str:
        if not self.errors:
            return (
                f"{self.title} ({self.status}): {self.detail}"
                if self.detail
                else f"{self.title} ({self.status})"
            )
        listed = "; ".join(f"{loc}: {msg}" if loc else msg for loc, msg in self.errors)
        return f"{self.title} ({self.status}): {listed}"


class HomeLost(RecastError):
    """The folder of a running service was moved or deleted."""

    exit_code = 5


class CannotStart(RecastError):
    """The embedded service cannot start; the text says why and what to do."""

    exit_code = 5
