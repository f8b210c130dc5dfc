"""What the service refuses, said without HTTP: small picklable errors that ``api.errors`` gives a status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Location = tuple[str | int, ...]


@dataclass(frozen=True)
class FieldError:
    """One offending field: where it is in the request, and what is wrong with it."""

    loc: Location
    msg: str


class Refused(Exception):
    """Base of everything the service refuses on purpose."""

    def __init__(self, detail: str):
        self.detail = detail
        super().__init__(detail)


class Unauthenticated(Refused):
    """No key, or a key that is unknown or revoked."""


class Forbidden(Refused):
    """The key's role does not allow the call."""


class TooLarge(Refused):
    """The request is over a limit."""


class UnsupportedMediaType(Refused):
    """The body's content type is not one the call reads."""


class NotReady(Refused):
    """The result that the call needs is not there yet."""


class RangeUnsatisfiable(Refused):
    """A Range that lies outside the file of ``size`` bytes."""

    def __init__(self, size: int):
        self.size = size
        super().__init__(f"the range lies outside the file's {size} bytes")

    def __reduce__(self) -> tuple[type[RangeUnsatisfiable], tuple[int]]:
        return type(self), (self.size,)


class Invalid(Refused):
    """A request that cannot work as written; ``errors`` names every offending field."""

    def __init__(self, errors: Sequence[FieldError], detail: str | None = None):
        self.errors = list(errors)
        super().__init__(detail or _summary(self.errors))

    def __reduce__(self) -> tuple[type[Invalid], tuple[list[FieldError], str]]:
        return type(self), (self.errors, self.detail)


def invalid(*loc: str | int, msg: str) -> Invalid:
    """An :class:`Invalid` for the single field ``loc`` of the body."""
    return Invalid([FieldError(("body", *loc), msg)])


def _summary(errors: Sequence[FieldError]) -> str:
    first = errors[0]
    where = ".".join(str(part) for part in first.loc if part != "body")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {first.msg}{more}" if where else f"{first.msg}{more}"


class Problems:
    """Collects what is wrong with a request, so that one answer can name it all."""

    def __init__(self) -> None:
        self.found: list[FieldError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep the field errors of an Invalid raised inside, and go on."""
        try:
            yield
        except Invalid as error:
            self.found += error.errors

    def add(self, problems: Iterable[FieldError]) -> None:
        """Add ``problems``."""
        self.found += problems

    def check(self) -> None:
        """Raises Invalid if there are any."""
        if self.found:
            raise Invalid(self.found)
