"""The command tree's root and the options that commands share."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from recast.errors import RecastError

app = typer.Typer(
    name="recast",
    help=(
        "Train image-generation models for several objectives at once: budgets kept, timing measured. "
        "Start with `recast quickstart`. Exit codes: 0 done, 1 the job failed, 2 wrong usage, "
        "3 no service reached, 4 refused by the service, 5 the service cannot start."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Home = Annotated[
    Path | None,
    typer.Option("--home", help="Folder of the service (default: RECAST_HOME, ~/.recast)."),
]
Url = Annotated[
    str | None,
    typer.Option("--url", help="Address of the service (default: RECAST_URL, the one in the home)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job to its end, or only start it.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Say what it would cost; start nothing.")]
Budget = Annotated[
    list[str],
    typer.Option("--budget", "-b", metavar="NAME=WEIGHT", help="Weight of a reward or objective; repeat it."),
]
Rewards = Annotated[list[str], typer.Option("--reward", "-r", help="A reward; repeat it.")]
Replace = Annotated[bool, typer.Option("--replace", help="Overwrite the file if it is there.")]
Seed = Annotated[int, typer.Option("--seed", min=0)]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def emit(data: Any) -> None:
    """Machine output: one JSON document on standard output."""
    json.dump(data, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def new_file(target: Path, replace: bool, option: str) -> Path:
    """``target``, checked before anything is asked of the service. Raises RecastError naming ``option``."""
    folder = target.parent
    if os.path.isdir(target):
        reason = "it is a folder"
    elif os.path.exists(target) and not replace:
        reason = "it is there already; --replace overwrites it"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        reason = f"the folder {folder} is not writable"
    else:
        return target
    raise RecastError(f"cannot write {target}: {reason}, or give another file with {option}")


def parse_budgets(pairs: Sequence[str]) -> dict[str, float]:
    """``NAME=WEIGHT`` pairs as a mapping. Raises typer.BadParameter naming the pair that is wrong."""
    budgets: dict[str, float] = {}
    for pair in pairs:
        name, _, weight = pair.partition("=")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value):
            raise typer.BadParameter(f"{pair!r} is not NAME=WEIGHT, as in ocr=0.3", param_hint="--budget")
        if name in budgets:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint="--budget")
        budgets[name] = value
    return budgets


def read_body(file: Path) -> dict[str, Any]:
    """A request body from a JSON file (``-``: standard input). Raises typer.BadParameter."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        body = json.loads(text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file}: {cause(error)}", param_hint="--file") from None
    if not isinstance(body, dict):
        raise typer.BadParameter(f"{file}: not a JSON object", param_hint="--file")
    return body


def cause(error: Exception) -> str:
    """Why a file could not be used, without its name and a number."""
    return getattr(error, "strerror", None) or str(error)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without those that were not given: defaults are the service's to fill in."""
    return {name: value for name, value in values.items() if value is not None}
