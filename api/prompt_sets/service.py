"""Prompt sets: parsed and counted when uploaded, built-in ones inserted at start."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.body import NUL_ESCAPE
from api.context import Caller, Context
from api.idempotency import Answer, Create, once
from api.prompt_sets.schemas import PromptSetPage, PromptSetSummary, PromptSetUpload, PromptSetView
from api.refusals import TooLarge
from recast_engine import miniature
from recast_engine.config import MAX_PROMPTS
from recast_engine.prompts import Prompt, PromptSetError, dump_prompts, parse_prompts, prompt_set_hash
from recast_engine.rewards.catalogue import REWARDS, usable_prompts
from store.models import PromptSet
from store.repositories import prompt_sets

LOG = logging.getLogger(__name__)
UNTAGGED = "untagged"


def parse(content: str) -> list[Prompt]:
    """Prompts of an upload. Raises PromptSetError naming every bad line, TooLarge."""
    lines = content.split("\n")
    if sum(1 for line in lines if line.strip()) > MAX_PROMPTS:
        raise TooLarge(f"a prompt set holds at most {MAX_PROMPTS} prompts")
    problems = [
        (number, "contains the NUL character")
        for number, line in enumerate(lines, start=1)
        if "\0" in line or NUL_ESCAPE.search(line.encode("utf-8", "replace"))
    ]
    if problems:
        raise PromptSetError(problems)
    return parse_prompts(content)


def create(context: Context, caller: Caller, key: str | None, upload: PromptSetUpload, status: int) -> Answer:
    """Store an uploaded prompt set. Raises PromptSetError, TooLarge, Conflict."""

    def prepare() -> Create:
        prompts = parse(upload.content)
        return lambda session: _view(_insert(session, caller.workspace_id, upload.name, prompts), prompts)

    return once(context, caller, key, ("prompt-set", upload.model_dump()), status, prepare)


def get(context: Context, caller: Caller, prompt_set_id: str) -> PromptSetView:
    """The prompt set. Raises NotFound."""
    with context.read() as session:
        row = prompt_sets.get(session, prompt_set_id, caller.workspace_id)
        return _view(row, parse_prompts(row.content))


def content(context: Context, caller: Caller, prompt_set_id: str) -> str:
    """The prompts as canonical JSONL. Raises NotFound."""
    with context.read() as session:
        return prompt_sets.get(session, prompt_set_id, caller.workspace_id).content


def page(context: Context, caller: Caller, *, limit: int, cursor: str | None) -> PromptSetPage:
    """Prompt sets that the caller sees, newest first. Raises InvalidCursor."""
    with context.read() as session:
        rows, following = prompt_sets.page(session, caller.workspace_id, limit=limit, cursor=cursor)
        return PromptSetPage(data=[_summary(row) for row in rows], next_cursor=following)


def insert_builtin(context: Context) -> None:
    """Store the built-in prompt sets under their fixed ids, or bring them up to this version's."""
    for split in miniature.SPLITS:
        path = miniature.prompt_file(split)
        if not path.is_file():
            LOG.warning("built-in prompt set %s is not packaged", path.name)
            continue
        prompts = parse_prompts(path.read_text(encoding="utf-8"))
        try:
            with context.write.begin() as session:
                _insert_or_update(session, f"pset_miniature_{split}", f"miniature {split}", prompts)
        except IntegrityError:
            LOG.info("built-in prompt set %s was inserted by another process", path.name)


def _insert_or_update(session: Session, prompt_set_id: str, name: str, prompts: Sequence[Prompt]) -> None:
    row = session.get(PromptSet, prompt_set_id)
    if row is None:
        _insert(session, None, name, prompts, prompt_set_id)
    elif row.sha256 != prompt_set_hash(prompts):
        row.sha256, row.count, row.tags = prompt_set_hash(prompts), len(prompts), _tags(prompts)
        row.content = dump_prompts(prompts)


def _insert(
    session: Session,
    workspace_id: str | None,
    name: str,
    prompts: Sequence[Prompt],
    prompt_set_id: str | None = None,
) -> PromptSet:
    return prompt_sets.create(
        session,
        workspace_id=workspace_id,
        name=name,
        sha256=prompt_set_hash(prompts),
        count=len(prompts),
        tags=_tags(prompts),
        content=dump_prompts(prompts),
        id=prompt_set_id,
    )


def _tags(prompts: Sequence[Prompt]) -> dict[str, int]:
    return dict(sorted(Counter(prompt.tag or UNTAGGED for prompt in prompts).items()))


def _summary(row: PromptSet) -> PromptSetSummary:
    return PromptSetSummary(
        id=row.id,
        name=row.name,
        builtin=row.workspace_id is None,
        count=row.count,
        sha256=row.sha256,
        tags=row.tags,
        created_at=row.created_at,
    )


def _view(row: PromptSet, prompts: Sequence[Prompt]) -> PromptSetView:
    usable = {reward: usable_prompts(reward, prompts) for reward in REWARDS}
    return PromptSetView(**_summary(row).model_dump(), usable=usable)
