"""Which weights are here: an identity that changes exactly when the files could be others. No torch."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from recast_engine.errors import WeightsUnavailable

READ_BYTES = 256 * 1024 * 1024


def weights_identity(source: str, revision: str | None, marker: str) -> str:
    """Identity of the weights of ``source``, a local folder or a hub repository.

    A folder's is :func:`folder_digest`; a repository's the commit that ``revision`` stands for in the local
    cache, found by the file ``marker`` that every download has.

    Raises:
        WeightsUnavailable: the weights are not on this machine.
    """
    folder = Path(source)
    if folder.is_dir():
        return f"sha256:{folder_digest(folder)}"
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, marker, revision=revision)
    if not isinstance(cached, str):
        raise WeightsUnavailable(f"weights of {source} are not in the local cache: run hf download {source}")
    return f"commit:{_snapshot(Path(cached), marker)}"


def _snapshot(path: Path, marker: str) -> str:
    """The commit in ``.../snapshots/<commit>/<marker>``."""
    return path.parents[len(Path(marker).parts) - 1].name


def folder_digest(folder: Path) -> str:
    """SHA-256 (hex) over names and contents of the files of a folder, read again only when one changed.

    A file over ``READ_BYTES`` counts by its size and time of change instead: a request cannot wait until tens
    of gigabytes are read.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    stamps = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    return _digest(folder, stamps)


@lru_cache(maxsize=32)
def _digest(folder: Path, stamps: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, size, changed in stamps:
        content = f"{size} {changed}" if size > READ_BYTES else _content(path)
        digest.update(f"{content}  {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
