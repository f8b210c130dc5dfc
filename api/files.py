"""Files over HTTP: strong ETags, conditional requests, byte ranges, streaming in chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from fastapi import Request, Response, status
from fastapi.responses import StreamingResponse

from api.refusals import RangeUnsatisfiable

CHUNK = 256 * 1024
_RANGE = re.compile(r"^bytes=([0-9]{0,18})-([0-9]{0,18})$", re.IGNORECASE)


@dataclass(frozen=True)
class Download:
    """A seekable open file of ``size`` bytes and what to say about it; ``etag`` is quoted."""

    file: IO[bytes]
    size: int
    etag: str
    media_type: str
    filename: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


def serve(request: Request, download: Download) -> Response:
    """The file, or the part that a single Range asks for, or 304. Raises RangeUnsatisfiable.

    Several ranges at once, and ranges that RFC 9110 calls invalid, are answered with the whole file.
    """
    headers = {
        "ETag": download.etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
        **download.headers,
    }
    if download.filename is not None:
        headers["Content-Disposition"] = f'attachment; filename="{download.filename}"'
    if _matches(request.headers.get("if-none-match"), download.etag):
        download.file.close()
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    try:
        span = _span(request, download)
    except RangeUnsatisfiable:
        download.file.close()
        raise
    start, end = span or (0, download.size)
    headers["Content-Length"] = str(end - start)
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{download.size}"
    code = status.HTTP_200_OK if span is None else status.HTTP_206_PARTIAL_CONTENT
    chunks = _chunks(download.file, start, end)
    return StreamingResponse(chunks, status_code=code, headers=headers, media_type=download.media_type)


def _matches(header: str | None, etag: str) -> bool:
    if header is None:
        return False
    listed = [item.strip().removeprefix("W/") for item in header.split(",")]
    return "*" in listed or etag in listed


def _span(request: Request, download: Download) -> tuple[int, int] | None:
    """[start, end) of the requested range; None for the whole file."""
    condition = request.headers.get("if-range")
    if condition is not None and condition != download.etag:
        return None
    match = _RANGE.match(request.headers.get("range", "").replace(" ", ""))
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, end = max(download.size - int(last), 0), download.size
        if int(last) == 0:
            raise RangeUnsatisfiable(download.size)
    else:
        start, end = int(first), min(int(last) + 1 if last else download.size, download.size)
        if last and int(last) < start:
            return None
    if start >= download.size:
        raise RangeUnsatisfiable(download.size)
    return start, end


def _chunks(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(start)
        left = end - start
        while left and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk
