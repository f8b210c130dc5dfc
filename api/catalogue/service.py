"""The engine's catalogues as views, and the checks of models and rewards that every request shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches

from sqlalchemy.orm import Session

from api.catalogue.schemas import ModelView, ProposalSourceView, RewardView
from api.context import Context
from api.refusals import FieldError, Invalid, Location, invalid
from recast_engine.backbones import catalogue
from recast_engine.backbones.catalogue import ModelInfo, RewardWorld
from recast_engine.config import PROPOSAL_MODELS
from recast_engine.errors import ConfigError
from recast_engine.prompts import Prompt
from recast_engine.proposals.environment import SOURCES, remedy
from recast_engine.rewards import catalogue as rewards_catalogue
from recast_engine.rewards.catalogue import REWARDS, usable_prompts
from recast_engine.rewards.info import RewardInfo
from recast_engine.rewards.vocabulary import unknown_names
from store import queue
from store.repositories import workers
from store.types import utcnow


def models() -> list[ModelView]:
    """Every model of the catalogue."""
    return [_model_view(info) for info in catalogue.models().values()]


def rewards(model: str | None = None) -> list[RewardView]:
    """Every reward; with ``model``, as it stands for that model. Raises Invalid for an unknown one."""
    known = catalogue.models()
    if model is not None and model not in known:
        raise Invalid([FieldError(("query", "model"), _unknown("model", model, known))])
    return [_reward_view(info, [known[model]] if model else known.values()) for info in REWARDS.values()]


def proposal_sources(context: Context) -> list[ProposalSourceView]:
    """Every source of proposals, as the live workers can use it."""
    with context.read() as session:
        usable = usable_proposal_sources(context, session)
    return [
        ProposalSourceView(
            id=source,
            summary=summary,
            default_model=PROPOSAL_MODELS.get(source),
            available=None if usable is None else source in usable,
            reason=None if usable is None or source in usable else remedy(source),
        )
        for source, summary in SOURCES.items()
    ]


def usable_proposal_sources(context: Context, session: Session) -> set[str] | None:
    """Sources that every live worker for profiles can use; None when there is no live one to say."""
    since = utcnow() - timedelta(seconds=context.settings.lease_seconds)
    return workers.proposal_sources(session, queue.QUEUES["profile"], since)


def known_model(name: str, *loc: str | int) -> ModelInfo:
    """The catalogue entry of a model. Raises Invalid at ``loc`` (``model`` by default)."""
    known = catalogue.models()
    if name not in known:
        raise invalid(*(loc or ("model",)), msg=_unknown("model", name, known))
    return known[name]


def available_model(name: str) -> ModelInfo:
    """The catalogue entry of a model that can be run here. Raises Invalid naming the field ``model``."""
    info = known_model(name)
    if reason := info.missing():
        raise invalid("model", msg=f"model {name!r} is not available: {reason}")
    return info


def reward_problems(
    rewards: Sequence[str], model: ModelInfo, prompts: Sequence[Prompt] | None, *loc: str | int
) -> Iterator[FieldError]:
    """What keeps ``rewards`` from scoring ``prompts`` (if known) of ``model``, at ``loc`` and their index."""
    for index, reward in enumerate(rewards):
        where: Location = ("body", *loc, index)
        if reward not in REWARDS:
            yield FieldError(where, _unknown("reward", reward, REWARDS))
        elif reward in rewards[:index]:
            yield FieldError(where, f"{reward!r} is named twice")
        elif reason := REWARDS[reward].missing(model.reward_world):
            yield FieldError(where, f"reward {reward!r} is not available: {reason}")
        elif prompts is not None and (problem := metadata_problem(reward, prompts, model.reward_world)):
            yield FieldError(where, problem)


def resolve_budgets(
    budgets: Mapping[str, float], model: ModelInfo, *loc: str | int
) -> tuple[dict[str, float], list[FieldError]]:
    """Normalised budgets over rewards, or every name that keeps them from being resolved, at ``loc``."""
    where: Location = ("body", *loc)
    problems = []
    for name in budgets:
        try:
            rewards_catalogue.resolve_budgets({name: 1.0}, model.id)
        except ConfigError as error:
            problems.append(FieldError((*where, name), _short(str(error))))
    if problems:
        return {}, problems
    try:
        return rewards_catalogue.resolve_budgets(budgets, model.id), []
    except ConfigError as error:
        return {}, [FieldError(where, str(error))]


def metadata_problem(reward: str, prompts: Sequence[Prompt], world: RewardWorld) -> str | None:
    """Why ``reward`` can score none of ``prompts``, or would score some wrong; None otherwise."""
    if usable_prompts(reward, prompts):
        return _vocabulary_problem(reward, prompts, world)
    wanted = REWARDS[reward].needs_metadata
    fields = " and ".join(repr(name) for name in wanted)
    quotes = "text" in wanted
    return (
        f"reward {reward!r} needs prompts with {fields}{' (or a quoted span)' if quotes else ''}, and the "
        f"prompt set has none: {'put the words to spell in quotes, ' if quotes else ''}use a prompt set "
        f"whose JSON lines have {fields}, or leave the reward out"
    )


def _vocabulary_problem(reward: str, prompts: Sequence[Prompt], world: RewardWorld) -> str | None:
    vocabulary = REWARDS[reward].vocabulary.get(world)
    wrong = list(unknown_names(prompts, vocabulary)) if vocabulary else []
    if not vocabulary or not wrong:
        return None
    index, place, name = wrong[0]
    known = vocabulary.classes if place.endswith("class") else vocabulary.colors
    near: Sequence[str] = get_close_matches(name, known, n=3) or known[:12]
    others = ", ..." if len(near) < len(known) else ""
    more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
    return (
        f"reward {reward!r} cannot find {name[:80]!r} in this model's images "
        f"(prompt {index + 1}, {place}{more}); it knows {', '.join(near)}{others}: "
        "upload the prompt set with names it knows, or leave the reward out"
    )


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    return f"unknown {what} {name[:80]!r}; known: {', '.join(sorted(known))}"


def _model_view(info: ModelInfo) -> ModelView:
    reason = info.missing()
    return ModelView(
        id=info.id,
        family=info.family,
        repository=info.repository,
        revision=info.revision,
        resolution=info.resolution,
        default_steps=info.default_steps,
        shift=info.shift,
        licence=info.licence,
        gated=info.gated,
        memory_gib=info.memory_gib,
        available=reason is None,
        reason=reason,
    )


def _reward_view(info: RewardInfo, considered: Collection[ModelInfo]) -> RewardView:
    reasons = {model.id: model.missing() or info.missing(model.reward_world) for model in considered}
    usable = [model for model, reason in reasons.items() if reason is None]
    own = [info.missing(model.reward_world) for model in considered if model.reward_world in info.worlds]
    remedies = [reason for reason in (*own, *reasons.values()) if reason is not None]
    return RewardView(
        id=info.id,
        objective=info.objective,
        summary=info.summary,
        range=info.range,
        higher_is_better=info.higher_is_better,
        needs_metadata=list(info.needs_metadata),
        role=info.role,
        licence=info.licence,
        memory_gib=info.memory_gib,
        weights=info.weights,
        available=bool(usable),
        available_for=usable,
        reason=None if usable else remedies[0],
    )
