"""The three ways a prompt set arrives: raw text or JSONL, a JSON object, a multipart file."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from api import body
from api.prompt_sets.schemas import Name, PromptSetUpload
from api.refusals import FieldError, Invalid, UnsupportedMediaType, invalid

TEXT_TYPES = frozenset(
    {
        "text/plain",
        "application/jsonl",
        "application/x-jsonlines",
        "application/jsonlines",
        "application/x-ndjson",
    }
)
DEFAULT_NAME = "untitled"
_NAME: TypeAdapter[str] = TypeAdapter(Name)
_UPLOAD = body.adapter_of(PromptSetUpload)


async def _read(request: Request) -> PromptSetUpload:
    """The upload in ``request``. Raises Invalid, UnsupportedMediaType, TooLarge."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type == "application/json":
        return body.parse(_UPLOAD, await request.body())
    if media_type in TEXT_TYPES:
        name = request.query_params.get("name", DEFAULT_NAME)
        return _upload(name, await request.body(), "query")
    if media_type == "multipart/form-data":
        try:
            return await _from_form(request)
        except HTTPException as error:  # how Starlette says that the form cannot be read
            raise Invalid([FieldError(("body",), f"the form cannot be read: {error.detail}")]) from None
    known = ", ".join(("application/json", "multipart/form-data", *sorted(TEXT_TYPES)))
    raise UnsupportedMediaType(f"send one of {known}")


async def _from_form(request: Request) -> PromptSetUpload:
    async with request.form(max_files=1, max_fields=4) as form:
        unknown = sorted(set(form) - {"file", "name"})
        if unknown:
            raise Invalid([FieldError(("body", name), body.UNKNOWN_FIELD) for name in unknown])
        file, name = form.get("file"), form.get("name")
        if not isinstance(file, UploadFile):
            raise invalid("file", msg="send the prompts as a file in this field")
        if name is not None and not isinstance(name, str):
            raise invalid("name", msg="must be text, not a file")
        return _upload(name or file.filename or DEFAULT_NAME, await file.read(), "body")


def _upload(name: str, raw: bytes, place: str) -> PromptSetUpload:
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise Invalid([FieldError((place, "name"), error.errors()[0]["msg"])]) from None
    if "\0" in name:
        raise Invalid([FieldError((place, "name"), "must not contain the NUL character")])
    try:
        return PromptSetUpload(name=name, content=raw.decode("utf-8-sig") or "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise Invalid([FieldError(("body", "line", line), "is not UTF-8 text")]) from None


Upload = Annotated[PromptSetUpload, Depends(_read)]

PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "name",
        "in": "query",
        "required": False,
        "description": "the set's name, where the body is raw text",
        "schema": {"type": "string", "minLength": 1, "maxLength": 120},
    }
]
REQUEST_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/PromptSetUpload"},
            "examples": {
                "inline": {"value": {"name": "two shapes", "content": "a red circle above a blue square\n"}}
            },
        },
        "application/jsonl": {
            "schema": {"type": "string"},
            "example": '{"prompt": "the word \\"CAT\\" in white on blue", "text": "CAT", "tag": "text"}\n',
        },
        "text/plain": {"schema": {"type": "string"}, "example": "a red circle above a blue square\n"},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {"name": {"type": "string"}, "file": {"type": "string", "format": "binary"}},
            }
        },
    },
}
