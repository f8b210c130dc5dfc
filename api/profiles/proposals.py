"""External proposals of a profile: what keeps them from being had, and how many are still to be bought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy.orm import Session

from api.catalogue.service import usable_proposal_sources
from api.context import Caller, Context
from api.refusals import FieldError
from recast_engine.backbones.catalogue import ModelInfo, models
from recast_engine.config import ProfileConfig
from recast_engine.profiling.plan import Plan
from recast_engine.prompts import Prompt
from recast_engine.proposals.environment import remedy
from recast_engine.proposals.keys import prompt_key
from store.repositories import proposals


def proposal_problems(
    context: Context,
    session: Session,
    config: ProfileConfig,
    model: ModelInfo | None,
    prompts: Sequence[Prompt] | None,
) -> Iterator[FieldError]:
    """What is known now to keep the proposals of ``config`` from being had; the rest shows when it runs."""
    asked = config.estimator.proposals
    if asked is None:
        return
    where = ("body", "estimator", "proposals")
    usable = usable_proposal_sources(context, session)
    if usable is not None and asked.source not in usable:
        yield FieldError((*where, "source"), remedy(asked.source))
    drawn_by = models().get(str(asked.model)) if asked.source == "diffusers" else None
    if drawn_by is not None and (reason := drawn_by.missing()):
        yield FieldError((*where, "model"), f"model {drawn_by.id!r} is not available: {reason}")
    if model is not None and asked.size is not None and asked.size < model.resolution:
        yield FieldError(
            (*where, "size"), f"{asked.size} is less than the {model.resolution} pixels of {model.id!r}"
        )
    if prompts is not None and asked.source != "folder":
        images = min(config.estimator.prompts, len(prompts)) * config.estimator.images_per_prompt
        if images > asked.max_images:
            yield FieldError(
                (*where, "max_images"),
                f"{images} images are needed; raise it, or lower prompts or images_per_prompt",
            )


def images_to_buy(session: Session, caller: Caller, config: ProfileConfig, prompts: Sequence[Prompt]) -> int:
    """Images that the profile asks for and the workspace does not have yet."""
    asked = config.estimator.proposals
    if asked is None or asked.source == "folder":
        return 0
    plan = Plan.of(config.estimator, config.rewards, prompts, config.seed)
    texts = dict.fromkeys(prompt.prompt for prompt in plan.prompts_of(prompts, None))
    keys = [prompt_key(asked, text) for text in texts]
    per_prompt = config.estimator.images_per_prompt
    return len(keys) * per_prompt - proposals.count_known(session, caller.workspace_id, keys, per_prompt)
