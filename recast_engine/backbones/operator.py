"""Models that the operator adds: a TOML or JSON file of catalogue entries.

    [models.our-sd35]                        # {"models": {"our-sd35": {...}}} in JSON
    family = "sd3"
    source = "./weights/our-sd35"            # a folder: starts with /, ./, ../ or ~; else a hub repository id
    resolution = 512

``ModelInfo`` says what the fields mean; ``docs/models.md`` has a longer example.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from recast_engine.backbones.catalogue import FAMILIES, MAX_RESOLUTION, VARIABLE, ModelInfo
from recast_engine.errors import ConfigError

DEFAULTS: Mapping[str, Any] = {"licence": "not stated", "default_steps": 40, "memory_gib": 40.0}


def read_models(file: Path) -> list[ModelInfo]:
    """The entries of ``file`` (an absolute path); one with a built-in id takes that one's place.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong; the text names file and fields.
    """
    if not file.is_absolute():
        raise ConfigError(f"{VARIABLE}: {file}: give an absolute path")
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # both parsers' errors are ValueErrors
        raise ConfigError(f"{VARIABLE}: {file}: {error}") from None
    entries = data.get("models") if isinstance(data, dict) and set(data) == {"models"} else None
    if not isinstance(entries, dict):
        raise ConfigError(f"{VARIABLE}: {file}: expected one table 'models' of entries by id")
    return [_entry(file, name, entry) for name, entry in entries.items()]


def _entry(file: Path, name: str, entry: Any) -> ModelInfo:
    where = f"{VARIABLE}: {file}: models.{name}"
    if not isinstance(entry, dict) or "id" in entry:
        raise ConfigError(f"{where}: expected a table of fields without 'id', which is its name")
    fields = {**DEFAULTS, "id": name, **entry}
    source = fields.get("source")
    if isinstance(source, str) and source.startswith(("./", "../", "~")):
        fields["source"] = str(file.parent / Path(source).expanduser())
    resolution = fields.get("resolution")
    family = next((info for known, info in FAMILIES.items() if known == fields.get("family")), None)
    if "shift" not in fields and family and isinstance(resolution, int) and resolution <= MAX_RESOLUTION:
        fields["shift"] = family.default_shift(resolution)
    try:
        return TypeAdapter(ModelInfo).validate_python(fields)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise ConfigError(f"{where}: {'; '.join(problems)}") from None
