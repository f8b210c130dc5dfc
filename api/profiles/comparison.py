"""Two measured profiles side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from api import references
from api.catalogue.service import known_model, resolve_budgets
from api.context import Caller, Context
from api.profiles.schemas import ComparisonRequest, ComparisonView, MeasuredDifference
from api.refusals import FieldError, Invalid, Problems, invalid
from recast_engine.backbones.catalogue import ModelInfo
from recast_engine.errors import EngineError
from recast_engine.profiling import Profile
from recast_engine.profiling import comparison as engine
from store.models import Job

SUBJECT = ("model", "adapter", "prompt_set", "prompt_set_sha256")


def compare(context: Context, caller: Caller, request: ComparisonRequest) -> ComparisonView:
    """What the two profiles agree and disagree on. Raises Invalid."""
    problems = Problems()
    found = []
    with context.read() as session:
        for index, name in enumerate(request.profiles):
            with problems.collecting():
                found.append(references.profile(session, caller, name, "profiles", index))
    problems.check()
    (job_a, a), (job_b, b) = found
    model = known_model(job_a.config["model"])
    budgets = _budgets(request, model, (a, b))
    steps, shift = request.steps or model.default_steps, request.shift or model.shift
    try:
        compared = engine.compare(
            a, b, model.sigmas(steps, shift), budgets=budgets, temperature=request.temperature
        )
    except EngineError as error:
        raise Invalid([FieldError(("body",), str(error))]) from None
    return ComparisonView(
        profiles=request.profiles,
        steps=steps,
        shift=shift,
        temperature=request.temperature,
        **compared.to_dict(),
        differences=list(_differences(_settings(job_a, a), _settings(job_b, b))),
    )


def _budgets(
    request: ComparisonRequest, model: ModelInfo, profiles: tuple[Profile, Profile]
) -> dict[str, float] | None:
    a, b = profiles
    common = [reward for reward in a.rewards if reward in b.rewards]
    if not common:
        raise invalid(
            "profiles",
            msg=f"no common reward: one measured {', '.join(a.rewards)}, the other {', '.join(b.rewards)}",
        )
    if request.budgets is None:
        return None
    budgets, problems = resolve_budgets(request.budgets, model, "budgets")
    problems += [
        FieldError(("body", "budgets"), f"{reward!r} was not measured by both profiles")
        for reward in budgets
        if reward not in common
    ]
    if problems:
        raise Invalid(problems)
    return budgets


def _settings(job: Job, profile: Profile) -> dict[str, Any]:
    """What was measured, and how."""
    return {name: job.config.get(name) for name in SUBJECT} | dict(_flat(profile.config))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[MeasuredDifference]:
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            yield MeasuredDifference(setting=name, a=a.get(name), b=b.get(name))
