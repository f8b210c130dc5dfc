"""Proposals that somebody made already: files of a folder, matched to prompts by manifest or by name."""

from __future__ import annotations

import json
import re
import unicodedata
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from recast_engine.errors import ConfigError
from recast_engine.proposals.images import SUFFIXES

MANIFEST = "manifest.jsonl"
_MAX_NAME_BYTES = 200
_NAMED = 5  # prompts named in an error


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore")
    file: str = Field(min_length=1)
    prompt: str = Field(min_length=1)


def file_stem(prompt: str) -> str:
    """What files of a prompt are called: lower case, everything but letters and digits a hyphen.

    "A red circle!" is found as ``a-red-circle.png`` or, several, ``a-red-circle.0.png``,
    ``a-red-circle.1.png``.
    """
    text = unicodedata.normalize("NFKC", prompt).casefold()
    stem = re.sub(r"\W+", "-", text).strip("-")
    return stem.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")


def find_images(name: str, folder: Path, prompts: Sequence[str], per_prompt: int) -> dict[str, list[Path]]:
    """``per_prompt`` files for each of the distinct ``prompts``, in order of manifest or number.

    Args:
        name: of the folder, for people.

    Raises:
        ConfigError: no such folder, a malformed manifest, a file that lies outside the folder, or prompts
            without enough images; the text names them and the files that would do.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"folder: the worker has no folder {name!r} in its folder of proposals (RECAST_PROPOSALS)"
        )
    root = folder.resolve()
    manifest = _file_in(root, MANIFEST, f"folder {name!r}")
    found = _by_manifest(root, manifest, prompts) if manifest else _by_name(name, root, prompts)
    short = [prompt for prompt in prompts if len(found[prompt]) < per_prompt]
    if short:
        wanted = "; ".join(
            f"{prompt!r} has {len(found[prompt])}"
            + ("" if manifest else f" ({file_stem(prompt)}.0.png and so on)")
            for prompt in short[:_NAMED]
        )
        more = f"; and {len(short) - _NAMED} more" if len(short) > _NAMED else ""
        raise ConfigError(
            f"folder {name!r}: {len(short)} of {len(prompts)} prompts have less than {per_prompt} images: "
            f"{wanted}{more}"
        )
    return {prompt: files[:per_prompt] for prompt, files in found.items()}


def _file_in(root: Path, name: str, where: str) -> Path | None:
    """The file that ``name`` leads to in the folder ``root``, links followed; None when there is none.

    Raises:
        ConfigError: it leads out of the folder or can be no file; the text begins with ``where``.
    """
    try:
        path = (root / name).resolve()
        there = path.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, links in a circle, a NUL character
        raise ConfigError(f"{where}: {name[:_MAX_NAME_BYTES]!r} cannot be a file") from None
    if not path.is_relative_to(root):
        raise ConfigError(f"{where}: {name!r} lies outside the folder")
    return path if there else None


def _by_manifest(root: Path, manifest: Path, prompts: Sequence[str]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {prompt: [] for prompt in prompts}
    for number, line in enumerate(manifest.read_bytes().removeprefix(BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{MANIFEST}, line {number}"
        try:
            entry = _Entry.model_validate(json.loads(line.decode("utf-8")))
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text") from None
        except (ValueError, RecursionError):
            raise ConfigError(f'{where}: wanted {{"file": "name.png", "prompt": "..."}}') from None
        path = _file_in(root, entry.file, where)
        if path is None:
            raise ConfigError(f"{where}: there is no file {entry.file!r}")
        if entry.prompt in found:
            found[entry.prompt].append(path)
    return found


def _by_name(name: str, root: Path, prompts: Sequence[str]) -> dict[str, list[Path]]:
    by_stem: dict[str, str] = {}
    for prompt in prompts:
        other = by_stem.setdefault(file_stem(prompt), prompt)
        if other != prompt:
            raise ConfigError(
                f"folder: the prompts {other!r} and {prompt!r} have the same file name; "
                f"tell them apart in a {MANIFEST}"
            )
    numbered: dict[str, list[tuple[int, str, Path]]] = {prompt: [] for prompt in prompts}
    for path in root.iterdir():
        stem, number = _parts(path)
        if path.suffix.lower() not in SUFFIXES or stem not in by_stem:
            continue
        if (file := _file_in(root, path.name, f"folder {name!r}")) is not None:
            numbered[by_stem[stem]].append((number, path.name, file))
    return {prompt: [path for _, _, path in sorted(files)] for prompt, files in numbered.items()}


def _parts(path: Path) -> tuple[str, int]:
    """``a-cat.3.png`` -> ("a-cat", 3); without a number -1."""
    stem, dot, number = unicodedata.normalize("NFC", path.stem).rpartition(".")
    if dot and number.isascii() and number.isdigit():
        return stem.casefold(), int(number)
    return path.stem.casefold(), -1
