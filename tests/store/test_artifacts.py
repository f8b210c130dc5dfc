"""Artifact bytes: whole or not at all, hashed on the way, and never outside the store's folder."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
from pathlib import Path

import pytest

from store.artifacts import ArtifactStore, StoredFile
from store.errors import ArtifactDamaged, ArtifactMissing, NotFound, StaleAttempt, StorageError

DATA = bytes(range(256)) * 10_000


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    """A local folder, and an object store without renames (fsspec's memory file system)."""
    if request.param == "local":
        return ArtifactStore(str(tmp_path / "artifacts"))
    return ArtifactStore(f"memory://{tmp_path.name}")


def test_what_is_put_comes_back(store: ArtifactStore, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(DATA)
    expected = StoredFile(len(DATA), hashlib.sha256(DATA).hexdigest())
    assert store.put_file("jobs/j/1/adapter/final.safetensors", source) == expected
    assert store.size("jobs/j/1/adapter/final.safetensors") == len(DATA)
    with store.open("jobs/j/1/adapter/final.safetensors") as file:
        file.seek(300)
        assert file.read(10) == DATA[300:310]
    target = tmp_path / "deep" / "target.bin"
    assert store.fetch("jobs/j/1/adapter/final.safetensors", target, expected.sha256) == expected
    assert target.read_bytes() == DATA


def test_a_key_put_again_holds_the_new_bytes(store: ArtifactStore) -> None:
    store.put_bytes("a/b", b"old and long")
    assert store.put_bytes("a/b", b"new") == StoredFile(3, hashlib.sha256(b"new").hexdigest())
    with store.open("a/b") as file:
        assert file.read() == b"new"


def test_a_folder_is_stored_file_by_file(store: ArtifactStore, tmp_path: Path) -> None:
    folder = tmp_path / "epoch-000005"
    (folder / "inner").mkdir(parents=True)
    (folder / "state.json").write_bytes(b"{}")
    (folder / "inner" / "weights.bin").write_bytes(b"123")
    stored = store.put_folder("jobs/j/1/checkpoint/epoch-000005", folder)
    assert [name for name, _ in stored.files] == ["inner/weights.bin", "state.json"]
    assert stored.bytes == 5
    lines = "".join(f"{file.sha256}  {name}\n" for name, file in stored.files)
    assert stored.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    with store.open("jobs/j/1/checkpoint/epoch-000005/inner/weights.bin") as file:
        assert file.read() == b"123"


def test_what_a_killed_writer_left_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    store.drop_drafts(0.0)  # nothing is stored yet
    store.put_bytes("jobs/j/1/checkpoint/epoch-1/state.json", b"{}")
    kept = tmp_path / "jobs/j/1/checkpoint/epoch-1/state.json"
    left, writing = (kept.with_name(f".{digit * 16}.part") for digit in "0a")
    foreign = tmp_path / "notes.part"
    for path in (left, writing, foreign):
        path.write_bytes(b"half")
    for path in (kept, left, foreign):
        os.utime(path, (1e9, 1e9))
    store.drop_drafts(60.0)
    assert sorted(kept.parent.iterdir()) == [writing, kept]
    assert foreign.exists()


def test_damaged_bytes_are_never_handed_out(store: ArtifactStore, tmp_path: Path) -> None:
    whole = store.put_bytes("jobs/j/1/adapter/final.safetensors", DATA)
    store.put_bytes("jobs/j/1/adapter/final.safetensors", DATA[:-1] + b"!")
    target = tmp_path / "fetched"
    with pytest.raises(ArtifactDamaged, match="does not match its checksum"):
        store.fetch("jobs/j/1/adapter/final.safetensors", target, whole.sha256)
    assert not target.exists()
    folder = tmp_path / "epoch-000005"
    (folder / "inner").mkdir(parents=True)
    (folder / "state.json").write_bytes(b"{}")
    (folder / "inner" / "weights.bin").write_bytes(b"123")
    stored = store.put_folder("jobs/j/1/checkpoint", folder)
    names = [name for name, _ in stored.files]
    assert store.fetch_folder("jobs/j/1/checkpoint", target, names, stored.sha256) == stored
    assert (target / "inner" / "weights.bin").read_bytes() == b"123"
    store.put_bytes("jobs/j/1/checkpoint/state.json", b"{")
    with pytest.raises(ArtifactDamaged):
        store.fetch_folder("jobs/j/1/checkpoint", target, names, stored.sha256)
    assert not target.exists()


def test_missing_bytes_are_told_as_such(store: ArtifactStore, tmp_path: Path) -> None:
    for read in (
        lambda: store.open("jobs/none"),
        lambda: store.size("jobs/none"),
        lambda: store.fetch("jobs/none", tmp_path / "x", ""),
    ):
        with pytest.raises(ArtifactMissing, match="no artifact under 'jobs/none'"):
            read()


def test_delete_prefix_deletes_that_prefix_only(store: ArtifactStore) -> None:
    for key in ("jobs/j/1/a", "jobs/j/2/b", "jobs/k/1/a"):
        store.put_bytes(key, b"x")
    store.delete_prefix("jobs/j")
    store.delete_prefix("jobs/never")
    with pytest.raises(ArtifactMissing):
        store.size("jobs/j/2/b")
    assert store.size("jobs/k/1/a") == 1


@pytest.mark.parametrize(
    "key",
    ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "a/", "a\\b", "a\0b", "s3://b/x"],
)
def test_a_key_cannot_leave_the_store(store: ArtifactStore, tmp_path: Path, key: str) -> None:
    for use in (
        lambda: store.put_bytes(key, b"x"),
        lambda: store.open(key),
        lambda: store.fetch(key, tmp_path / "x", ""),
        lambda: store.delete_prefix(key),
    ):
        with pytest.raises(ValueError, match="not an artifact key"):
            use()


class _FullDisk(io.BytesIO):
    """Gives some bytes and then fails like a disk that is full."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 0:
            raise OSError(errno.ENOSPC, "No space left on device", "/secret/path")
        return super().read(1000)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    store.put_bytes("jobs/j/kept", b"kept")
    monkeypatch.setattr("store.artifacts.io.BytesIO", lambda data: _FullDisk(data))
    with pytest.raises(StorageError, match=r"^No space left on device$"):
        store.put_bytes("jobs/j/kept", DATA)
    with pytest.raises(StorageError):
        store.put_bytes("jobs/j/new", DATA)
    files = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["kept"]
    assert files[0].read_bytes() == b"kept"


def test_a_missing_source_is_a_storage_error(store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^No such file or directory$"):
        store.put_file("a/b", tmp_path / "none")


@pytest.mark.parametrize(
    "error",
    [NotFound("job", "train_1"), StaleAttempt("train_1", 2), ArtifactMissing("a/b"), StorageError("disk")],
)
def test_errors_survive_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
