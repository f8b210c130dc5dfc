"""Profiles: requests resolved, results shown, gains resampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.orm import Session

from api import references
from api.catalogue.service import available_model, known_model, reward_problems
from api.context import Caller, Context
from api.idempotency import Answer, Create, once
from api.jobs import service as jobs_service
from api.jobs.estimates import Work, estimate_view
from api.jobs.schemas import Estimate, Seconds
from api.profiles.estimates import profile_work
from api.profiles.proposals import images_to_buy, proposal_problems
from api.profiles.schemas import CreatedProfile, Gains, ProfileView
from api.refusals import Problems
from recast_engine import config as configs
from recast_engine.backbones.catalogue import ModelInfo
from recast_engine.config import ProfileConfig
from recast_engine.profiling.fingerprint import profile_fingerprint
from recast_engine.prompts import Prompt
from store.models import Job
from store.repositories import jobs, profiles, workspaces

KIND = "profile"


@dataclass(frozen=True)
class Resolved:
    """A request whose names stand for something; without a fingerprint it is never reused."""

    config: ProfileConfig
    prompts: list[Prompt]
    fingerprint: str | None


def resolve(context: Context, caller: Caller, config: ProfileConfig) -> Resolved:
    """The request resolved. Raises Invalid naming everything that is wrong."""
    problems = Problems()
    model: ModelInfo | None = None
    prompts: list[Prompt] | None = None
    adapter_sha256: str | None = None
    with problems.collecting():
        model = available_model(config.model)
    with context.read() as session:
        with problems.collecting():
            row, prompts = references.prompt_set(session, caller, config.prompt_set, config.prompt_set_sha256)
            config = replace(config, prompt_set_sha256=row.sha256)
        if config.adapter is not None:
            with problems.collecting():
                adapter = references.adapter_of(session, caller, config.adapter, config.model, "adapter")
                adapter_sha256 = adapter.sha256
        problems.add(proposal_problems(context, session, config, model, prompts))
    if model is not None:
        problems.add(reward_problems(config.rewards, model, prompts, "rewards"))
    problems.check()
    return Resolved(config, prompts or [], profile_fingerprint(config, adapter_sha256))


def create(
    context: Context, caller: Caller, key: str | None, config: ProfileConfig, *, created: int, reused: int
) -> Answer:
    """Queue a profile, or answer with the one that it would repeat. Raises Invalid, Conflict.

    Looking and queueing are one step: of equal requests at the same time one starts a job.
    """
    request = configs.dump(config)

    def prepare() -> Create:
        resolved = resolve(context, caller, config)
        return lambda session: _reuse_or_queue(session, caller, request, resolved)

    answer = once(
        context,
        caller,
        key,
        (KIND, request),
        lambda body: reused if body["reused"] else created,
        prepare,
    )
    if not answer.repeated and not answer.body["reused"]:
        context.publish(KIND, answer.body["id"])
    return answer


def _reuse_or_queue(
    session: Session, caller: Caller, request: dict[str, Any], resolved: Resolved
) -> CreatedProfile:
    workspaces.lock(session, caller.workspace_id)
    found = _reusable(session, caller, resolved)
    job = found or jobs.create(
        session,
        workspace_id=caller.workspace_id,
        kind=KIND,
        request=request,
        config=configs.dump(resolved.config),
        fingerprint=resolved.fingerprint,
    )
    return CreatedProfile(**_fields(session, job), reused=found is not None)


def _reusable(session: Session, caller: Caller, resolved: Resolved) -> Job | None:
    if not resolved.config.reuse or resolved.fingerprint is None:
        return None
    return jobs.reusable(session, caller.workspace_id, resolved.fingerprint)


def estimate(context: Context, caller: Caller, config: ProfileConfig) -> Estimate:
    """What the profile would cost: nothing where one would be reused. Raises Invalid."""
    resolved = resolve(context, caller, config)
    with context.read() as session:
        found = _reusable(session, caller, resolved)
    if found is not None:
        stored = found.status == "succeeded"
        basis = f"stored profile {found.id}" if stored else f"profile {found.id} is being measured already"
        return Estimate(
            model_evaluations=0,
            reward_calls=0,
            proposal_images=0,
            device_seconds=Seconds(low=0.0, high=0.0),
            basis=basis,
        )
    with context.read() as session:
        images = images_to_buy(session, caller, config, resolved.prompts)
    work: Work = profile_work(config.estimator, config.rewards, resolved.prompts)
    return estimate_view(context, caller, KIND, config.model, work, proposal_images=images)


def get(context: Context, caller: Caller, profile_id: str) -> ProfileView:
    """The profile. Raises NotFound."""
    with context.read() as session:
        job = jobs.get(session, profile_id, caller.workspace_id, kind=KIND)
        return ProfileView(**_fields(session, job))


def _fields(session: Session, job: Job) -> dict[str, Any]:
    row = profiles.find(session, job.id)
    fields = jobs_service.fields(job)
    warnings = [*fields.pop("warnings"), *(row.warnings if row else [])]
    return {
        **fields,
        "levels": row.levels if row else None,
        "curves": row.curves if row else None,
        "warnings": list(dict.fromkeys(warnings)),
        "config": job.config,
    }


def gains(context: Context, caller: Caller, profile_id: str, steps: int, shift: float | None) -> Gains:
    """The profile's gains for a sampler of ``steps`` steps. Raises NotFound, NotReady."""
    with context.read() as session:
        job, profile = references.measured(session, caller, profile_id)
    model = known_model(job.config["model"])
    shift = shift or model.shift
    sigmas = model.sigmas(steps, shift)
    rows = profile.gains(sigmas).tolist()
    return Gains(
        steps=steps,
        shift=shift,
        sigmas=sigmas.tolist(),
        gains=dict(zip(profile.rewards, rows, strict=True)),
    )
