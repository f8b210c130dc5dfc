"""``recast keys``: API keys of the workspace."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli.app import Home, Json, Url, app, emit, out
from recast.client import Client
from recast.tables import listing

keys = typer.Typer(help="API keys of the workspace (needs an admin key).", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command("list")
def list_(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List keys; secrets are never shown again."""
    with Client(url, home=home) as client:
        found = client.keys()
    if as_json:
        emit(found)
        return
    rows = [
        [key["id"], key["name"], key["role"], key["prefix"], (key["revoked_at"] or "")[:10]] for key in found
    ]
    out.print(listing(["id", "name", "role", "starts with", "revoked"], rows))


@keys.command()
def create(
    name: str,
    role: Annotated[str, typer.Option("--role", help="viewer, editor or admin.")] = "editor",
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a key and print its secret, this one time."""
    with Client(url, home=home) as client:
        key = client.create_key(name, role)
    if as_json:
        emit(key)
    else:
        out.print(key["key"], markup=False, soft_wrap=True)


@keys.command()
def revoke(key_id: str, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """End a key's validity."""
    with Client(url, home=home) as client:
        client.revoke_key(key_id)
    if as_json:
        emit({"id": key_id, "revoked": True})
    else:
        out.print(f"{key_id} is revoked.", markup=False)
