"""Prompts with the metadata that rewards need, and the JSONL/text format they come in.

The metadata is GenEval's published form (``include``, ``exclude``, ``tag``) plus ``text`` for text rendering.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from recast_engine import strict_json
from recast_engine.errors import ConfigError

MAX_PROMPT_CHARACTERS = 4000

Relation = Literal["left of", "right of", "above", "below"]
"""Positions of GenEval's clauses."""

# Pairs in reading order: a mark that opens in one language and closes in another is what stands first.
# A straight mark right after a digit is an inch; a typographic opening may be closed by a straight mark.
_DOUBLE_QUOTED = re.compile(
    r"""(?<!\d)["＂]([^"＂]*)["＂]"""
    r"""|“([^“”]*)”|“([^“”"]*)"|„([^„“”"]*)[“”"]|”([^“”]*)”"""
    r"""|«([^«»]*)»|»([^«»]*)«|「([^「」]*)」|『([^『』]*)』"""
)
# A single quote opens after no letter and closes before none; between letters, and before a decade, it is an
# apostrophe.
_SINGLE_QUOTED = re.compile(r"""(?<!\w)['‘](?!\d0s)(?=\S)((?:[^'‘’]|(?<=\w)['’](?=\w))+)(?<=\S)['’](?!\w)""")


class PromptSetError(ValueError):
    """A malformed prompt set. ``problems`` lists (line number from 1, message)."""

    def __init__(self, problems: Sequence[tuple[int, str]]):
        self.problems = list(problems)
        super().__init__("; ".join(f"line {line}: {message}" for line, message in self.problems[:20]))

    def __reduce__(self) -> tuple[type[PromptSetError], tuple[list[tuple[int, str]]]]:
        return type(self), (self.problems,)


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``text`` is what the image should spell; ``include``/``exclude`` are GenEval's clauses."""

    prompt: str
    text: str | None = None
    include: tuple[Mapping[str, Any], ...] = ()
    exclude: tuple[Mapping[str, Any], ...] = ()
    tag: str | None = None

    @property
    def target(self) -> str | None:
        """What the image should spell: ``text``, or else the first quoted span of the prompt, if any."""
        if self.text is not None:
            return self.text
        return next(iter(quoted_spans(self.prompt)), None)

    def has(self, metadata: str) -> bool:
        """Whether the prompt carries the metadata field ``metadata`` ("text", "include", ...).

        A quoted span in the prompt counts as "text".
        """
        return bool(self.target if metadata == "text" else getattr(self, metadata))

    def to_json(self) -> dict[str, Any]:
        """The prompt as one JSONL object, empty fields left out."""
        fields = {
            "prompt": self.prompt,
            "text": self.text,
            "include": [dict(clause) for clause in self.include],
            "exclude": [dict(clause) for clause in self.exclude],
            "tag": self.tag,
        }
        return {key: value for key, value in fields.items() if value}


def quoted_spans(prompt: str) -> list[str]:
    """What stands between quotes in ``prompt``, in order, blank spans left out.

    Straight and typographic double quotes count; single quotes only in a prompt without double-quoted spans,
    since there they may be apostrophes.
    """
    found = ["".join(groups).strip() for groups in _DOUBLE_QUOTED.findall(prompt)]
    spans = [span for span in found if span]
    return spans or [span.strip() for span in _SINGLE_QUOTED.findall(prompt)]


class _Clause(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    label: str = Field(alias="class", min_length=1)
    count: int = Field(ge=1, le=100)
    color: str | None = None
    position: tuple[Relation, int] | None = None


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)
    text: str | None = None
    include: list[_Clause] = []
    exclude: list[_Clause] = []
    tag: str | None = Field(default=None, max_length=80)

    @field_validator("prompt", "text")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be blank")
        return value

    @field_validator("include")
    @classmethod
    def _positions_point_back(cls, clauses: list[_Clause]) -> list[_Clause]:
        for index, clause in enumerate(clauses):
            if clause.position is not None and not 0 <= clause.position[1] < index:
                raise ValueError(f"include[{index}].position must refer to a clause before it, as in GenEval")
        return clauses

    def to_prompt(self) -> Prompt:
        def clauses(items: list[_Clause]) -> tuple[Mapping[str, Any], ...]:
            return tuple(item.model_dump(by_alias=True, exclude_none=True, mode="json") for item in items)

        return Prompt(self.prompt, self.text, clauses(self.include), clauses(self.exclude), self.tag)


def prompt_from_json(data: Any) -> Prompt:
    """One prompt from its JSON object. Raises ``pydantic.ValidationError`` naming the field."""
    return _Line.model_validate(data).to_prompt()


def _parse_line(line: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return _Line(prompt=line.strip()).to_prompt()
    return prompt_from_json(strict_json.loads(line))


def parse_prompts(content: str) -> list[Prompt]:
    """Parse a prompt set: one plain prompt or one JSON object per line, blank lines skipped.

    Raises:
        PromptSetError: every malformed line with its number, or an empty set.
    """
    prompts: list[Prompt] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(content.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse_line(line))
        except json.JSONDecodeError as error:
            problems.append((number, f"not valid JSON: {error.msg} at column {error.colno}"))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            problems.append((number, f"{where}: {first['msg']}"))
        except RecursionError:
            problems.append((number, "not valid JSON: nested too deeply"))
        except strict_json.RepeatedKey as error:
            problems.append((number, str(error)))
        except ValueError:  # an integer of thousands of digits, which Python refuses to read
            problems.append((number, "not valid JSON: a number is too long"))
    if problems:
        raise PromptSetError(problems)
    if not prompts:
        raise PromptSetError([(1, "the prompt set has no prompts")])
    return prompts


def checked_prompts(content: str, sha256: str | None) -> list[Prompt]:
    """``content`` parsed, held to the hash that a job recorded when it was submitted.

    Raises:
        ConfigError: it is another set.
    """
    prompts = parse_prompts(content)
    if sha256 is not None and prompt_set_hash(prompts) != sha256:
        raise ConfigError("prompt_set: its content is not what it was when the job was submitted")
    return prompts


def dump_prompts(prompts: Iterable[Prompt]) -> str:
    """Canonical JSONL of ``prompts``; ``parse_prompts`` inverts it."""
    return "".join(json.dumps(prompt.to_json(), ensure_ascii=False) + "\n" for prompt in prompts)


def prompt_set_hash(prompts: Iterable[Prompt]) -> str:
    """SHA-256 (hex) of the canonical JSONL: what a run records to be repeatable."""
    return hashlib.sha256(dump_prompts(prompts).encode()).hexdigest()
