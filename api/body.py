"""JSON bodies, read strictly: no coercion, no NaN, no key twice, every offending field named at once."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

from fastapi import Depends, Request
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from api.refusals import FieldError, Invalid, Location, UnsupportedMediaType
from recast_engine import strict_json

T = TypeVar("T")

NUL_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
UNKNOWN_FIELD = "unknown field"
_UNKNOWN = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_SCHEMAS: dict[str, TypeAdapter[Any]] = {}


def json_body(kind: type[T]) -> Any:
    """A dependency that reads the request body as ``kind`` (a pydantic model or dataclass).

    Strict: ``"3"`` is no integer and ``true`` no number. NaN and infinities are refused by the bounds of
    ``kind`` itself, so the answer names the field. Raises Invalid, UnsupportedMediaType, TooLarge.
    """
    adapter = adapter_of(kind)

    async def read(request: Request) -> T:
        media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise UnsupportedMediaType(f"send application/json, not {media_type}")
        return parse(adapter, await request.body())

    reader: Callable[[Request], Awaitable[T]] = read
    return Depends(reader)


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """The reader of ``kind``, whose schema is then part of the OpenAPI document."""
    adapter = TypeAdapter(kind)
    _SCHEMAS[kind.__name__] = adapter
    return adapter


def parse(adapter: TypeAdapter[T], raw: bytes) -> T:
    """``raw`` JSON as the adapter's type. Raises Invalid naming every offending field."""
    if NUL_ESCAPE.search(raw):
        raise Invalid([FieldError(("body",), "text must not contain the NUL character")])
    try:
        value = adapter.validate_json(raw, strict=True)
        strict_json.loads(raw)
    except ValidationError as error:
        raise Invalid(field_errors(error, raw)) from None
    except strict_json.RepeatedKey as error:
        raise Invalid([FieldError(("body", error.key), str(error))]) from None
    return value


def field_errors(error: ValidationError, raw: bytes) -> list[FieldError]:
    """The offending fields of ``raw``, below ``body``, without consequences of other errors."""
    items = error.errors(include_url=False, include_context=False, include_input=False)
    if any(item["type"] == "json_invalid" for item in items):
        return [FieldError(("body",), item["msg"]) for item in items]
    sent = from_json(raw)
    found = [(_sent(tuple(item["loc"]), item["type"], sent), item["type"], item["msg"]) for item in items]
    return [
        FieldError(("body", *loc), UNKNOWN_FIELD if kind in _UNKNOWN else msg.removeprefix("Value error, "))
        for loc, kind, msg in found
        if not (kind == "too_short" and _has_child(loc, [other for other, _, _ in found]))
    ]


def _sent(loc: Location, kind: str, value: Any) -> Location:
    """``loc`` as a path in the body ``value``: without pydantic's names for the members of a union.

    Kept are a missing field's name, and ``[key]`` where a name is wrong, not its value.
    """
    path: list[str | int] = []
    for place, part in enumerate(loc, start=1):
        if part in _keys(value):
            value = value[part]
        elif part != "[key]" and not (kind == "missing" and place == len(loc)):
            continue
        path.append(part)
    return tuple(path)


def _keys(value: Any) -> Collection[str | int]:
    if isinstance(value, list):
        return range(len(value))
    return value if isinstance(value, dict) else ()


def _has_child(loc: Location, others: Sequence[Location]) -> bool:
    return any(len(other) > len(loc) and other[: len(loc)] == loc for other in others)


def describes(kind: type[Any], **examples: Any) -> dict[str, Any]:
    """OpenAPI's ``requestBody`` for :func:`json_body` of ``kind``, for an endpoint's ``openapi_extra``."""
    media: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    if examples:
        media["examples"] = {name: {"value": value} for name, value in examples.items()}
    return {"requestBody": {"required": True, "content": {"application/json": media}}}


def schemas() -> dict[str, Any]:
    """JSON schemas of every type that some endpoint reads, for OpenAPI's components."""
    inputs = [(name, "validation", adapter) for name, adapter in sorted(_SCHEMAS.items())]
    _, document = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    definitions: dict[str, Any] = document.get("$defs", {})
    return definitions
