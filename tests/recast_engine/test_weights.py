"""The identity of weights follows their content, not their place."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import huggingface_hub
import pytest

from recast_engine import weights
from recast_engine.errors import WeightsUnavailable
from recast_engine.weights import folder_digest, weights_identity


def test_a_folder_is_known_by_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        (folder / "vae").mkdir(parents=True)
        (folder / "config.json").write_bytes(b"{}")
        (folder / "vae" / "model.safetensors").write_bytes(b"weights")
    lines = "".join(
        f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        for name, content in (("config.json", b"{}"), ("vae/model.safetensors", b"weights"))
    )
    assert folder_digest(first) == hashlib.sha256(lines.encode()).hexdigest()
    assert weights_identity(str(second), None, "config.json") == f"sha256:{folder_digest(first)}"
    (second / "vae" / "model.safetensors").write_bytes(b"weightS")
    assert folder_digest(second) != folder_digest(first)
    (second / "vae" / "model.safetensors").write_bytes(b"weights")
    (second / "config.json").rename(second / "other.json")
    assert folder_digest(second) != folder_digest(first)


def test_a_huge_file_is_known_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "READ_BYTES", 3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"1234")
    os.utime(path, ns=(5, 5))
    first = folder_digest(tmp_path)
    assert first == hashlib.sha256(b"4 5  model.safetensors\n").hexdigest()
    os.utime(path, ns=(6, 6))
    assert folder_digest(tmp_path) != first


def test_a_repository_is_known_by_its_cached_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    cached = {"config.json": str(snapshot / "config.json")}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda source, name, revision: cached.get(name)
    )
    assert weights_identity("org/model", "main", "config.json") == "commit:0123abc"
    with pytest.raises(WeightsUnavailable, match="hf download org/model"):
        weights_identity("org/model", "main", "model_index.json")
