"""Artifact bytes in a local folder or an object store, through fsspec."""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from store.errors import ArtifactDamaged, ArtifactMissing, StorageError, StoreError

CHUNK = 1024 * 1024
_DRAFT = re.compile(r"\.[0-9a-f]{16}\.part")  # the name of a file that is being written


@dataclass(frozen=True)
class StoredFile:
    """What was written: size in bytes and SHA-256 (hex) of the content."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredFolder:
    """A folder that was written file by file; ``sha256`` is over its sorted list of hashes and names."""

    bytes: int
    sha256: str
    files: tuple[tuple[str, StoredFile], ...]


class ArtifactStore:
    """Files under keys like ``jobs/<job>/<attempt>/<kind>/<name>``.

    A file appears under its key whole or not at all: locally it is written under a temporary name, synced and
    renamed; object stores make an upload visible when it completes.
    """

    def __init__(self, url: str):
        """``url`` is a local folder or anything fsspec opens, such as ``s3://bucket/prefix``."""
        filesystem, root = fsspec.core.url_to_fs(url)
        self._fs: Any = filesystem
        self._root: str = root.rstrip("/")
        self._local = isinstance(filesystem, LocalFileSystem)

    def put_file(self, key: str, path: Path) -> StoredFile:
        """Store the file at ``path``. Raises StorageError, after which nothing is under ``key``."""
        with self._translated(), path.open("rb") as source:
            return self._put(key, source)

    def put_bytes(self, key: str, data: bytes) -> StoredFile:
        """Store ``data``. Raises StorageError, after which nothing is under ``key``."""
        with self._translated():
            return self._put(key, io.BytesIO(data))

    def put_folder(self, key: str, folder: Path) -> StoredFolder:
        """Store every file under ``folder`` at its relative name under ``key``. Raises StorageError."""
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        files = tuple((name, self.put_file(f"{key}/{name}", folder / name)) for name in names)
        return _folder_of(files)

    def open(self, key: str) -> IO[bytes]:
        """A seekable binary file to read. Raises ArtifactMissing or StorageError."""
        with self._translated(missing=key):
            opened: IO[bytes] = self._fs.open(self._path(key), "rb")
            return opened

    def fetch(self, key: str, path: Path, sha256: str) -> StoredFile:
        """Copy the file to the local ``path``, where nothing is left of one that is not ``sha256``'s.

        Raises ArtifactMissing, ArtifactDamaged or StorageError.
        """
        fetched = self._fetch(key, path)
        if fetched.sha256 != sha256:
            path.unlink()
            raise ArtifactDamaged(key)
        return fetched

    def fetch_folder(self, key: str, folder: Path, names: Iterable[str], sha256: str) -> StoredFolder:
        """:meth:`fetch` for what ``put_folder`` stored."""
        files = tuple((name, self._fetch(f"{key}/{name}", folder / name)) for name in names)
        fetched = _folder_of(files)
        if fetched.sha256 != sha256:
            shutil.rmtree(folder)
            raise ArtifactDamaged(key)
        return fetched

    def _fetch(self, key: str, path: Path) -> StoredFile:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            self._translated(missing=key),
            self._fs.open(self._path(key), "rb") as source,
            path.open("wb") as target,
        ):
            return _copy(source, target)

    def size(self, key: str) -> int:
        """Bytes under ``key``. Raises ArtifactMissing or StorageError."""
        with self._translated(missing=key):
            return int(self._fs.size(self._path(key)))

    def delete_prefix(self, prefix: str) -> None:
        """Delete everything under ``prefix``; nothing there is fine. Raises StorageError."""
        path = self._path(prefix)
        with self._translated():
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def drop_drafts(self, unwritten_seconds: float) -> None:
        """Delete what writers that were killed left half written, and wrote to no more for so long.

        Object stores never show an upload that did not complete. Raises StorageError.
        """
        if not self._local:
            return
        with self._translated():
            for folder, _, names in os.walk(self._root):
                for draft in (Path(folder, name) for name in names if _DRAFT.fullmatch(name)):
                    with suppress(FileNotFoundError):  # complete by now, or deleted by another worker
                        if time.time() - draft.stat().st_mtime > unwritten_seconds:
                            draft.unlink()

    def _path(self, key: str) -> str:
        """Raises ValueError for a key that could leave the store's folder."""
        parts = PurePosixPath(key).parts
        if not parts or key != "/".join(parts) or ".." in parts or key.startswith("/"):
            raise ValueError(f"not an artifact key: {key!r}")
        if any(character in key for character in "\\\0\n") or "://" in key:
            raise ValueError(f"not an artifact key: {key!r}")
        return f"{self._root}/{key}"

    def _put(self, key: str, source: IO[bytes]) -> StoredFile:
        path = self._path(key)
        return self._write_file(Path(path), source) if self._local else self._upload(path, source)

    def _upload(self, path: str, source: IO[bytes]) -> StoredFile:
        target = self._fs.open(path, "wb", autocommit=False)
        try:
            stored = _copy(source, target)
            target.close()
        except BaseException:
            target.discard()
            raise
        target.commit()
        return stored

    def _write_file(self, final: Path, source: IO[bytes]) -> StoredFile:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with temporary.open("xb") as target:
                stored = _copy(source, target)
                target.flush()
                os.fsync(target.fileno())
            temporary.replace(final)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(final.parent)
        return stored

    @contextmanager
    def _translated(self, missing: str | None = None) -> Iterator[None]:
        """Failures as StorageError, a missing file under the key ``missing`` as ArtifactMissing.

        An object store's client may raise anything for a network that is down.
        """
        expected = OSError if self._local else Exception
        try:
            yield
        except (StoreError, ValueError):
            raise
        except expected as error:
            if missing is not None and isinstance(error, FileNotFoundError):
                raise ArtifactMissing(missing) from None
            raise StorageError(_reason(error)) from error


def _copy(source: IO[bytes], target: IO[bytes]) -> StoredFile:
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        target.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    return StoredFile(size, digest.hexdigest())


def _folder_of(files: tuple[tuple[str, StoredFile], ...]) -> StoredFolder:
    listing = "".join(f"{stored.sha256}  {name}\n" for name, stored in files)
    total = sum(stored.bytes for _, stored in files)
    return StoredFolder(total, hashlib.sha256(listing.encode()).hexdigest(), files)


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """What went wrong, without the path or address that its text would tell."""
    return getattr(error, "strerror", None) or type(error).__name__
