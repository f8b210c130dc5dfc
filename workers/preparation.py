"""A job row becomes a work folder with everything the engine reads: the request and its local files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from store.database import transact
from store.errors import ArtifactMissing
from store.models import Artifact, Job
from store.repositories import (
    adapters,
    allocations,
    artifacts,
    jobs,
    profiles,
    prompt_sets,
    trainings,
)
from store.repositories.attempts import Claim
from workers.runtime import Runtime
from workers.workdirs import remove, workdir_of

log = logging.getLogger(__name__)

CHECKPOINTS = 2
"""Checkpoints put beside the request: the newest, and one to fall back to; more where these are damaged."""


def prepare(runtime: Runtime, claim: Claim) -> Path:
    """Make the work folder of an attempt and fill it with bytes that are those once stored.

    Raises:
        NotFound: something that the config names is gone.
        ArtifactMissing: the bytes of an adapter or checkpoint are gone or damaged.
        StorageError: they cannot be read.
        OSError: the folder cannot be written.
    """
    workdir = workdir_of(runtime, claim)
    remove(workdir)
    workdir.mkdir(parents=True)
    request, files, saved = transact(runtime.sessions, lambda session: _request(session, claim, workdir))
    for artifact, target in files:
        try:
            _fetch(runtime, artifact, target)
        except ArtifactMissing as error:
            if artifact.kind != "proposal":
                raise
            log.warning("%s: %s; it will be bought again", claim.job_id, error)
    _fetch_checkpoints(runtime, saved)
    _link_proposals(runtime, request)
    (workdir / "request.json").write_text(json.dumps(request), encoding="utf-8")
    return workdir


Fetched = list[tuple[Artifact, Path]]


def _request(session: Session, claim: Claim, workdir: Path) -> tuple[dict[str, Any], Fetched, Fetched]:
    """``recast_engine.run.Request`` as JSON data, the artifacts to put beside it, and the checkpoints."""
    job = jobs.get(session, claim.job_id)
    config, workspace = job.config, job.workspace_id
    prompts = workdir / "prompts.jsonl"
    prompts.write_text(prompt_sets.get(session, config["prompt_set"], workspace).content, encoding="utf-8")
    adapter_rows = [adapters.get(session, name, workspace) for name in _adapter_ids(config)]
    files = [(adapters.artifact(session, row), _adapter_path(workdir, row.id)) for row in adapter_rows]
    request: dict[str, Any] = {
        "kind": job.kind,
        "config": config,
        "prompts": str(prompts),
        "adapters": {row.id: str(_adapter_path(workdir, row.id)) for row in adapter_rows},
        "allocations": {
            name: allocations.to_dict(allocations.get(session, name, workspace))
            for name in _allocation_ids(config)
        },
        "profiles": {name: profiles.get(session, name, workspace).extra for name in _profile_ids(config)},
        "resume_from": None,
        "work": job.request.get("work"),
        "proposals": str(workdir / "proposals"),
    }
    saved = [(row, workdir / "resume" / row.name) for row in _checkpoints(session, job)]
    if saved:
        request["resume_from"] = str(saved[0][1])
    files += [(artifact, workdir / "proposals" / name) for name, artifact in _proposals(session, job)]
    return request, files, saved


def _proposals(session: Session, job: Job) -> list[tuple[str, Artifact]]:
    """Images that the workspace has of those that a profile asks of another generator, with their names."""
    if (job.config.get("estimator") or {}).get("proposals") is None:
        return []
    from workers.proposals import known_images  # it loads scipy, which most workers never need

    return known_images(session, job)


def _link_proposals(runtime: Runtime, request: Mapping[str, Any]) -> None:
    """Source ``folder``: the operator's folder appears, by its name, among the proposals."""
    asked = (request["config"].get("estimator") or {}).get("proposals") or {}
    if asked.get("folder") is None:
        return
    link = Path(request["proposals"]) / asked["folder"]
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(Path(runtime.settings.proposals).expanduser().absolute() / asked["folder"])


def _checkpoints(session: Session, job: Job) -> Sequence[Artifact]:
    """What a training goes on from: its own checkpoints, newest first, or the one it was made to resume."""
    if job.kind != "training":
        return []
    own = trainings.newest_checkpoints(session, job.id)
    if not own and job.resume_from is not None:
        return [artifacts.get(session, job.resume_from, job.workspace_id)]
    return own


def _fetch_checkpoints(runtime: Runtime, saved: Fetched) -> None:
    """Of one whose bytes are gone an empty folder stays: the engine passes over it, and says so.

    Raises:
        ArtifactMissing: there is none to go on from.
    """
    gone: list[ArtifactMissing] = []
    for looked_at, (artifact, target) in enumerate(saved):
        if looked_at >= CHECKPOINTS and len(gone) < looked_at:
            return
        try:
            _fetch(runtime, artifact, target)
        except ArtifactMissing as error:
            log.warning("checkpoint %s of %s cannot be used: %s", artifact.name, artifact.job_id, error)
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            gone.append(error)
    if gone and len(gone) == len(saved):
        raise gone[0]


def _fetch(runtime: Runtime, artifact: Artifact, target: Path) -> None:
    """Copy an artifact to ``target``, a file or a folder like the one that was stored."""
    if "files" in artifact.meta:
        runtime.artifacts.fetch_folder(artifact.key, target, artifact.meta["files"], artifact.sha256)
    else:
        runtime.artifacts.fetch(artifact.key, target, artifact.sha256)


def _adapter_path(workdir: Path, adapter_id: str) -> Path:
    return workdir / "adapters" / f"{adapter_id}.safetensors"


def _adapter_ids(config: Mapping[str, Any]) -> list[str]:
    named = [config.get("adapter"), *(subject.get("adapter") for subject in config.get("subjects", ()))]
    return list(dict.fromkeys(name for name in named if name is not None))


def _stage_allocations(config: Mapping[str, Any]) -> Iterator[Any]:
    return (stage["allocation"] for stage in config.get("stages", ()))


def _allocation_ids(config: Mapping[str, Any]) -> set[str]:
    return {asked for asked in _stage_allocations(config) if isinstance(asked, str)}


def _profile_ids(config: Mapping[str, Any]) -> set[str]:
    measured = (asked for asked in _stage_allocations(config) if isinstance(asked, Mapping))
    return {asked["profile"] for asked in measured if asked.get("profile") is not None}
