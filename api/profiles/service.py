"""Profiles: requests resolved, results shown, gains resampled."""

from __future__ import annotations

from typing import Any

from api import references
from api.catalogue.service import available_model, known_model, reward_problems
from api.context import Caller, Context
from api.idempotency import Answer
from api.jobs import service as jobs_service
from api.jobs.estimates import Work, estimate_view
from api.jobs.schemas import Estimate
from api.profiles.estimates import profile_work
from api.profiles.schemas import Gains, ProfileView
from api.refusals import Problems
from recast_engine import config as configs
from recast_engine.backbones.catalogue import ModelInfo, flow_sigmas
from recast_engine.config import ProfileConfig
from recast_engine.prompts import Prompt
from store.repositories import jobs, profiles

KIND = "profile"


def resolve(context: Context, caller: Caller, config: ProfileConfig) -> tuple[dict[str, Any], list[Prompt]]:
    """The config as it will run, and its prompts. Raises Invalid naming everything that is wrong."""
    problems = Problems()
    model: ModelInfo | None = None
    prompts: list[Prompt] | None = None
    resolved = configs.dump(config)
    with problems.collecting():
        model = available_model(config.model)
    with context.read() as session:
        with problems.collecting():
            row, prompts = references.prompt_set(session, caller, config.prompt_set, config.prompt_set_sha256)
            resolved["prompt_set_sha256"] = row.sha256
        if config.adapter is not None:
            with problems.collecting():
                references.adapter_of(session, caller, config.adapter, config.model, "adapter")
    if model is not None:
        problems.add(reward_problems(config.rewards, model, prompts, "rewards"))
    problems.check()
    return resolved, prompts or []


def create(context: Context, caller: Caller, key: str | None, config: ProfileConfig, status: int) -> Answer:
    """Queue a profile. Raises Invalid, Conflict."""
    return jobs_service.submit(
        context,
        caller,
        key,
        KIND,
        configs.dump(config),
        status,
        lambda: resolve(context, caller, config)[0],
    )


def estimate(context: Context, caller: Caller, config: ProfileConfig) -> Estimate:
    """What the profile would cost. Raises Invalid."""
    _, prompts = resolve(context, caller, config)
    work: Work = profile_work(config.estimator, config.rewards, prompts)
    return estimate_view(context, caller, KIND, config.model, work)


def get(context: Context, caller: Caller, profile_id: str) -> ProfileView:
    """The profile. Raises NotFound."""
    with context.read() as session:
        job = jobs.get(session, profile_id, caller.workspace_id, kind=KIND)
        row = profiles.find(session, profile_id)
        measured = {"levels": row.levels, "curves": row.curves} if row else {"levels": None, "curves": None}
        fields = jobs_service.fields(job)
        warnings = [*fields.pop("warnings"), *(row.warnings if row else [])]
        return ProfileView(**fields, **measured, warnings=list(dict.fromkeys(warnings)), config=job.config)


def gains(context: Context, caller: Caller, profile_id: str, steps: int, shift: float | None) -> Gains:
    """The profile's gains for a sampler of ``steps`` steps. Raises NotFound, NotReady."""
    with context.read() as session:
        job, profile = references.measured(session, caller, profile_id)
    shift = shift or known_model(job.config["model"]).shift
    sigmas = flow_sigmas(steps, shift)
    rows = profile.gains(sigmas).tolist()
    return Gains(
        steps=steps,
        shift=shift,
        sigmas=sigmas.tolist(),
        gains=dict(zip(profile.rewards, rows, strict=True)),
    )
