"""From a training request to the config that will run, or everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sqlalchemy.orm import Session

from api import references
from api.catalogue.service import available_model, metadata_problem, resolve_budgets
from api.context import Caller, Context
from api.refusals import FieldError, Invalid, Problems
from recast_engine.backbones.catalogue import FAMILIES, ModelInfo
from recast_engine.config import StageAllocation, StageConfig, TrainingConfig
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import REWARDS

BUDGET_TOLERANCE = 1e-6


def resolve(context: Context, caller: Caller, config: TrainingConfig) -> tuple[TrainingConfig, list[Prompt]]:
    """The config with budgets, shift and prompt-set hash filled in, and the prompts. Raises Invalid."""
    problems = Problems()
    model: ModelInfo | None = None
    prompts: list[Prompt] | None = None
    sha256: str | None = None
    with problems.collecting():
        model = available_model(config.model)
    with context.read() as session:
        with problems.collecting():
            row, prompts = references.prompt_set(session, caller, config.prompt_set, config.prompt_set_sha256)
            sha256 = row.sha256
        if config.adapter is not None:
            with problems.collecting():
                problems.add(_adapter_problems(session, caller, config.adapter, config))
        if model is None:
            raise Invalid(problems.found)
        problems.add(_target_problems(config, model))
        problems.add(_held_out_problems(config, model, prompts))
        stages = [
            _stage(session, caller, config, index, model, prompts, problems)
            for index in range(len(config.stages))
        ]
    problems.check()
    sampling = replace(config.sampling, shift=config.sampling.shift or model.shift)
    resolved = replace(config, stages=tuple(stages), sampling=sampling, prompt_set_sha256=sha256)
    return resolved, prompts or []


def _adapter_problems(
    session: Session, caller: Caller, adapter_id: str, config: TrainingConfig
) -> Iterator[FieldError]:
    """A training that starts from an adapter goes on with that adapter's shape."""
    row = references.adapter_of(session, caller, adapter_id, config.model, "adapter")
    if row.rank != config.lora.rank:
        yield FieldError(("body", "lora", "rank"), f"adapter {row.id} has rank {row.rank}")
    if row.alpha != config.lora.alpha:
        yield FieldError(("body", "lora", "alpha"), f"adapter {row.id} has alpha {row.alpha:g}")


def _target_problems(config: TrainingConfig, model: ModelInfo) -> Iterator[FieldError]:
    known = FAMILIES[model.family].lora_layers
    targets = config.lora.targets
    if targets is not None and not targets:
        yield FieldError(("body", "lora", "targets"), "name at least one layer, or leave it out")
    for index, target in enumerate(targets or ()):
        if target not in known:
            message = f"{target[:80]!r} is no layer of {model.id}; there are {', '.join(known)}"
            yield FieldError(("body", "lora", "targets", index), message)


def _held_out_problems(
    config: TrainingConfig, model: ModelInfo, prompts: Sequence[Prompt] | None
) -> Iterator[FieldError]:
    name, where = config.collapse.held_out, ("body", "collapse", "held_out")
    if name is None:
        return
    if name not in REWARDS:
        yield FieldError(where, f"unknown reward {name!r}; there are {', '.join(sorted(REWARDS))}")
    elif any(name in stage.budgets for stage in config.stages):
        yield FieldError(where, f"{name!r} has a budget; a held-out reward is one that no stage trains on")
    elif reason := REWARDS[name].missing(model.reward_world):
        yield FieldError(where, f"reward {name!r} is not available: {reason}")
    elif prompts is not None and (problem := metadata_problem(name, prompts, model.reward_world)):
        yield FieldError(where, problem)


def _stage(
    session: Session,
    caller: Caller,
    config: TrainingConfig,
    index: int,
    model: ModelInfo,
    prompts: Sequence[Prompt] | None,
    problems: Problems,
) -> StageConfig:
    stage = config.stages[index]
    budgets, wrong = resolve_budgets(stage.budgets, model, "stages", index, "budgets")
    problems.add(wrong)
    world = model.reward_world
    for reward, share in budgets.items():
        if share > 0 and prompts is not None and (problem := metadata_problem(reward, prompts, world)):
            problems.add([FieldError(("body", "stages", index, "budgets"), problem)])
    if not budgets:
        return stage
    loc = ("stages", index, "allocation")
    with problems.collecting():
        if isinstance(stage.allocation, StageAllocation):
            problems.add(_profile_problems(session, caller, stage.allocation, config, budgets, loc))
        else:
            problems.add(_allocation_problems(session, caller, stage.allocation, config, budgets, loc))
    return replace(stage, budgets=budgets)


def _profile_problems(
    session: Session,
    caller: Caller,
    allocation: StageAllocation,
    config: TrainingConfig,
    budgets: dict[str, float],
    loc: tuple[str | int, ...],
) -> Iterator[FieldError]:
    if allocation.profile is None:
        return
    where = ("body", *loc, "profile")
    job, profile = references.profile(session, caller, allocation.profile, *loc, "profile")
    if job.config["model"] != config.model:
        yield FieldError(where, f"the profile is of {job.config['model']!r}, not of {config.model!r}")
    kind = profile.config.get("kind", "self_tilted")
    if allocation.refresh != "frozen" and kind != "self_tilted":
        yield FieldError(where, f"refresh compares with a self-tilted profile, and this one is {kind}")
    absent = [reward for reward in budgets if reward not in profile.rewards]
    if absent:
        yield FieldError(where, f"the profile did not measure {', '.join(absent)}")


def _allocation_problems(
    session: Session,
    caller: Caller,
    allocation_id: str,
    config: TrainingConfig,
    budgets: dict[str, float],
    loc: tuple[str | int, ...],
) -> Iterator[FieldError]:
    where = ("body", *loc)
    row = references.allocation(session, caller, allocation_id, *loc)
    if row.steps != config.sampling.steps:
        yield FieldError(where, f"it has {row.steps} steps, but sampling.steps is {config.sampling.steps}")
    if set(row.rewards) != set(budgets):
        yield FieldError(
            where, f"its rewards are {', '.join(row.rewards)}, but the stage's are {', '.join(budgets)}"
        )
    elif any(abs(row.budgets[reward] - share) > BUDGET_TOLERANCE for reward, share in budgets.items()):
        yield FieldError(where, "its budgets differ from the stage's")
