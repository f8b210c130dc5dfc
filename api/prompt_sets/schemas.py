"""What prompt sets look like to a client."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=120)]


class PromptSetUpload(BaseModel):
    """A prompt set in one JSON object; ``content`` is JSONL or plain text, one prompt per line."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    content: Annotated[str, Field(min_length=1)]


class PromptSetSummary(BaseModel):
    """A prompt set in a list."""

    id: str = Field(examples=["pset_miniature_train"])
    name: str
    builtin: bool = Field(description="shipped with the service; visible to every workspace")
    count: int = Field(description="prompts in the set")
    sha256: str = Field(description="hash of the canonical JSONL; every run records it")
    tags: dict[str, int] = Field(description="prompts by tag; prompts without one count under `untagged`")
    created_at: datetime


class PromptSetView(PromptSetSummary):
    """A prompt set, with what each reward can use of it."""

    usable: dict[str, int] = Field(
        description="for each reward, how many prompts carry the metadata that it needs",
        examples=[{"clipscore": 120, "geneval": 80, "ocr": 40}],
    )


class PromptSetPage(BaseModel):
    """Prompt sets, newest first."""

    data: list[PromptSetSummary]
    next_cursor: str | None
