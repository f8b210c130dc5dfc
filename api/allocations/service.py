"""Allocations: gains and budgets resolved, the matrix computed, stored, shown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from api import references
from api.allocations.schemas import (
    AllocationPage,
    AllocationRequest,
    AllocationResult,
    AllocationSummary,
    AllocationView,
    Diagnostics,
)
from api.catalogue.service import known_model, resolve_budgets
from api.context import Caller, Context
from api.idempotency import Answer, Create, once
from api.refusals import FieldError, Invalid, invalid
from recast_engine.allocation import allocate
from recast_engine.errors import EngineError
from recast_engine.rewards.catalogue import REWARDS
from store.models import Allocation
from store.repositories import allocations


@dataclass(frozen=True)
class _Problem:
    """Rows of gains and their budgets, in the same order; ``sigmas`` where the steps have known levels."""

    gains: dict[str, list[float]]
    budgets: dict[str, float]
    sigmas: list[float] | None


def compute(context: Context, caller: Caller, request: AllocationRequest) -> AllocationResult:
    """The matrix for ``request``. Raises Invalid."""
    if request.profile is not None:
        problem = _from_profile(context, caller, request.profile, request)
    else:
        problem = _from_gains(request.gains or {}, request.budgets)
    rewards = list(problem.budgets)
    try:
        found = allocate(
            [problem.gains[reward] for reward in rewards],
            list(problem.budgets.values()),
            method=request.method,
            temperature=request.temperature,
        )
    except EngineError as error:
        raise Invalid([FieldError(("body",), str(error))]) from None
    return AllocationResult(
        rewards=rewards,
        steps=found.steps,
        budgets=dict(zip(rewards, found.budgets.tolist(), strict=True)),
        method=request.method,
        temperature=found.temperature,
        matrix=found.matrix.tolist(),
        gains=[problem.gains[reward] for reward in rewards],
        sigmas=problem.sigmas,
        diagnostics=Diagnostics(**found.diagnostics()),
    )


def _from_profile(context: Context, caller: Caller, profile_id: str, request: AllocationRequest) -> _Problem:
    with context.read() as session:
        job, profile = references.profile(session, caller, profile_id, "profile")
    model = known_model(job.config["model"])
    budgets, problems = resolve_budgets(request.budgets, model, "budgets")
    absent = [reward for reward in budgets if reward not in profile.rewards]
    problems += [
        FieldError(("body", "budgets"), f"the profile did not measure {reward!r}") for reward in absent
    ]
    if problems:
        raise Invalid(problems)
    sigmas = model.sigmas(request.steps or 0, request.shift)
    rows = dict(zip(profile.rewards, profile.gains(sigmas).tolist(), strict=True))
    return _Problem({reward: rows[reward] for reward in budgets}, budgets, sigmas.tolist())


def _from_gains(gains: Mapping[str, list[float]], budgets: Mapping[str, float]) -> _Problem:
    shares = dict.fromkeys(gains, 0.0)
    named: set[str] = set()
    problems = []
    for name, weight in budgets.items():
        members = [name] if name in gains else _members(name, gains)
        if not members:
            problems.append(FieldError(("body", "budgets", name), "no row of gains belongs to this name"))
        for reward in members:
            shares[reward] += weight / len(members)
            named.add(reward)
    problems += [
        FieldError(("body", "gains", reward), "has no budget; give it one, 0 to silence it")
        for reward in gains
        if reward not in named
    ]
    if problems:
        raise Invalid(problems)
    if not any(shares.values()):
        raise invalid("budgets", msg="at least one budget must be positive")
    return _Problem(dict(gains), shares, None)


def _members(objective: str, gains: Mapping[str, Any]) -> list[str]:
    """Rows of ``gains`` that are rewards of ``objective``."""
    return [name for name in gains if name in REWARDS and REWARDS[name].objective == objective]


def create(
    context: Context, caller: Caller, key: str | None, request: AllocationRequest, status: int
) -> Answer:
    """Compute and store an allocation. Raises Invalid, Conflict."""

    def prepare() -> Create:
        result = compute(context, caller, request).model_dump(mode="json")
        return lambda session: view(
            allocations.create(
                session,
                workspace_id=caller.workspace_id,
                allocation=result,
                profile_id=request.profile,
            )
        )

    return once(context, caller, key, ("allocation", request.model_dump(mode="json")), status, prepare)


def get(context: Context, caller: Caller, allocation_id: str) -> AllocationView:
    """The stored allocation. Raises NotFound."""
    with context.read() as session:
        return view(allocations.get(session, allocation_id, caller.workspace_id))


def page(context: Context, caller: Caller, *, limit: int, cursor: str | None) -> AllocationPage:
    """Allocations of the caller's workspace, newest first. Raises InvalidCursor."""
    with context.read() as session:
        rows, following = allocations.page(session, caller.workspace_id, limit=limit, cursor=cursor)
        return AllocationPage(
            data=[AllocationSummary(**view(row).model_dump(include=_SUMMARY)) for row in rows],
            next_cursor=following,
        )


_SUMMARY = set(AllocationSummary.model_fields)


def view(row: Allocation) -> AllocationView:
    """The allocation as clients see it."""
    return AllocationView(
        **allocations.to_dict(row),
        profile=row.profile_id,
        training=row.training_id,
        stage=row.stage,
        epoch=row.epoch,
        reason=row.reason,
        created_at=row.created_at,
    )


def to_csv(allocation: AllocationView) -> str:
    """One line per reward: its budget, then its weight at each step, at full precision."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(["reward", "budget", *(f"step_{step + 1}" for step in range(allocation.steps))])
    for reward, row in zip(allocation.rewards, allocation.matrix, strict=True):
        writer.writerow([reward, repr(allocation.budgets[reward]), *(repr(weight) for weight in row)])
    return target.getvalue()
