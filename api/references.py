"""What a request names by id, looked up for its owner; anything missing is the request's fault, by field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.orm import Session

from api.context import Caller
from api.refusals import NotReady, invalid
from recast_engine.profiling import Profile
from recast_engine.prompts import Prompt, parse_prompts
from store.errors import NotFound
from store.models import Adapter, Allocation, Job, PromptSet
from store.repositories import adapters, allocations, jobs, profiles, prompt_sets


def prompt_set(
    session: Session, caller: Caller, prompt_set_id: str, sha256: str | None
) -> tuple[PromptSet, list[Prompt]]:
    """The prompt set and its prompts. Raises Invalid when there is none, or not with the hash ``sha256``."""
    with _belongs_to("prompt_set"):
        row = prompt_sets.get(session, prompt_set_id, caller.workspace_id)
    if sha256 not in (None, row.sha256):
        raise invalid("prompt_set_sha256", msg=f"the prompt set's hash is {row.sha256}")
    return row, parse_prompts(row.content)


def adapter(session: Session, caller: Caller, adapter_id: str, *loc: str | int) -> Adapter:
    """The adapter. Raises Invalid at ``loc``."""
    with _belongs_to(*loc):
        return adapters.get(session, adapter_id, caller.workspace_id)


def adapter_of(session: Session, caller: Caller, adapter_id: str, model: str, *loc: str | int) -> Adapter:
    """The adapter of base model ``model``. Raises Invalid at ``loc``."""
    row = adapter(session, caller, adapter_id, *loc)
    if row.base_model != model:
        raise invalid(*loc, msg=f"adapter {row.id} belongs to {row.base_model!r}, not to {model!r}")
    return row


def allocation(session: Session, caller: Caller, allocation_id: str, *loc: str | int) -> Allocation:
    """The allocation. Raises Invalid at ``loc``."""
    with _belongs_to(*loc):
        return allocations.get(session, allocation_id, caller.workspace_id)


def profile(session: Session, caller: Caller, profile_id: str, *loc: str | int) -> tuple[Job, Profile]:
    """The measured profile and its job. Raises Invalid at ``loc``."""
    with _belongs_to(*loc):
        return measured(session, caller, profile_id)


def measured(session: Session, caller: Caller, profile_id: str) -> tuple[Job, Profile]:
    """The measured profile and its job. Raises NotFound, NotReady."""
    job = jobs.get(session, profile_id, caller.workspace_id, kind="profile")
    row = profiles.find(session, profile_id)
    if row is None:
        raise NotReady(f"profile {profile_id} is {job.status} and has not been measured")
    return job, Profile.from_dict(row.extra)


@contextmanager
def _belongs_to(*loc: str | int) -> Iterator[None]:
    try:
        yield
    except (NotFound, NotReady) as error:
        raise invalid(*loc, msg=str(error)[:200]) from None
