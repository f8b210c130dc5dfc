"""Evaluations: requests resolved, reports shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import IO

from sqlalchemy.orm import Session

from api import references
from api.catalogue.service import available_model, known_model, resolve_budgets, reward_problems
from api.context import Caller, Context
from api.evaluations.estimates import evaluation_work
from api.evaluations.schemas import EvaluationView
from api.idempotency import Answer
from api.jobs import service as jobs_service
from api.jobs.estimates import estimate_view
from api.jobs.schemas import Estimate
from api.refusals import FieldError, Invalid, NotReady, Problems
from recast_engine import config as configs
from recast_engine.backbones.catalogue import ModelInfo
from recast_engine.config import EvaluationConfig, Subject
from recast_engine.prompts import Prompt
from store.models import Artifact
from store.repositories import evaluations, jobs

KIND = "evaluation"


def resolve(
    context: Context, caller: Caller, config: EvaluationConfig
) -> tuple[EvaluationConfig, list[Prompt]]:
    """The config with model, objective and prompt-set hash filled in, and the prompts. Raises Invalid."""
    problems = Problems()
    model: ModelInfo | None = None
    prompts: list[Prompt] | None = None
    sha256: str | None = None
    with context.read() as session:
        with problems.collecting():
            model = _model(session, caller, config)
        with problems.collecting():
            row, prompts = references.prompt_set(session, caller, config.prompt_set, config.prompt_set_sha256)
            sha256 = row.sha256
    if model is None:
        raise Invalid(problems.found)
    problems.add(reward_problems(config.rewards, model, prompts, "rewards"))
    objective = config.objective
    if objective is not None:
        objective, wrong = resolve_budgets(objective, model, "objective")
        problems.add(wrong)
        problems.add(_objective_problems(config, objective))
    problems.check()
    resolved = replace(config, model=model.id, objective=objective, prompt_set_sha256=sha256)
    return resolved, prompts or []


def _model(session: Session, caller: Caller, config: EvaluationConfig) -> ModelInfo:
    """The base model that all subjects share. Raises Invalid naming the subjects that do not exist or fit."""
    problems = Problems()
    bases: list[tuple[int, str]] = []
    for index, subject in enumerate(config.subjects):
        with problems.collecting():
            bases.append((index, _base(session, caller, subject, index)))
    problems.check()
    expected = config.model or bases[0][1]
    problems.add(
        FieldError(("body", "subjects", index), f"its base model is {base!r}, not {expected!r}")
        for index, base in bases
        if base != expected
    )
    problems.check()
    return available_model(expected)


def _base(session: Session, caller: Caller, subject: Subject, index: int) -> str:
    if subject.adapter is not None:
        return references.adapter(session, caller, subject.adapter, "subjects", index, "adapter").base_model
    assert subject.base_model is not None  # the config requires exactly one of the two
    return known_model(subject.base_model, "subjects", index, "base_model").id


def _objective_problems(config: EvaluationConfig, objective: dict[str, float]) -> Iterator[FieldError]:
    absent = [reward for reward in objective if reward not in config.rewards]
    if absent:
        yield FieldError(("body", "objective"), f"{', '.join(absent)} must be among the rewards measured")


def create(
    context: Context, caller: Caller, key: str | None, config: EvaluationConfig, status: int
) -> Answer:
    """Queue an evaluation. Raises Invalid, Conflict."""
    return jobs_service.submit(
        context,
        caller,
        key,
        KIND,
        configs.dump(config),
        status,
        lambda: configs.dump(resolve(context, caller, config)[0]),
    )


def estimate(context: Context, caller: Caller, config: EvaluationConfig) -> Estimate:
    """What the evaluation would cost. Raises Invalid."""
    resolved, prompts = resolve(context, caller, config)
    assert resolved.model is not None
    return estimate_view(context, caller, KIND, resolved.model, evaluation_work(resolved, prompts))


def get(context: Context, caller: Caller, evaluation_id: str) -> EvaluationView:
    """The evaluation. Raises NotFound."""
    with context.read() as session:
        job = jobs.get(session, evaluation_id, caller.workspace_id, kind=KIND)
        row = evaluations.find(session, evaluation_id)
        report = row.report if row is not None else None
        return EvaluationView(**jobs_service.fields(job), config=job.config, report=report)


def html(context: Context, caller: Caller, evaluation_id: str) -> tuple[Artifact, IO[bytes]]:
    """The HTML report's row and its open file. Raises NotFound, NotReady, ArtifactMissing."""
    with context.read() as session:
        job = jobs.get(session, evaluation_id, caller.workspace_id, kind=KIND)
        row = evaluations.html(session, evaluation_id)
    if row is None:
        raise NotReady(f"evaluation {evaluation_id} is {job.status} and has no report")
    return row, context.artifacts.open(row.key)
