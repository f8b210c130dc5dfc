"""``recast prompts``: list and upload prompt sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli.app import Home, Json, Url, app, cause, emit, out
from recast.client import Client
from recast.tables import listing

prompts = typer.Typer(help="Prompt sets: list and upload.", no_args_is_help=True)
app.add_typer(prompts, name="prompts")


@prompts.command("list")
def list_(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List prompt sets, built-in and uploaded."""
    with Client(url, home=home) as client:
        found = client.prompt_sets()
    if as_json:
        emit(found)
        return
    rows = [[one["id"], one["name"], str(one["count"]), "yes" if one["builtin"] else ""] for one in found]
    out.print(listing(["id", "name", "prompts", "built in"], rows))


@prompts.command()
def upload(
    file: Annotated[Path, typer.Argument(help="One prompt per line, plain text or JSONL.")],
    name: Annotated[str | None, typer.Option("--name", help="Default: the file's name.")] = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Upload a prompt set."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: {cause(error)}", param_hint="FILE") from None
    with Client(url, home=home) as client:
        created = client.create_prompt_set(name or file.stem, content)
    if as_json:
        emit(created)
    else:
        out.print(f"prompt set {created['id']}: {created['count']} prompts", markup=False)
