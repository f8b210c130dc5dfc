"""``recast rewards``: what this machine can score with, and conversion; ``recast serve-rewards``."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from recast.cli.app import Json, Rewards, app, emit, out
from recast.errors import CannotStart
from recast.tables import listing
from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import EngineError
from recast_engine.rewards.catalogue import REWARDS

rewards = typer.Typer(help="Rewards of this machine: list, convert checkpoints.", no_args_is_help=True)
app.add_typer(rewards, name="rewards")


@rewards.command("list")
def list_(as_json: Json = False) -> None:
    """List the rewards that this machine knows, and what full-size images still need."""
    rows = [
        {
            "id": info.id,
            "objective": info.objective,
            "role": info.role,
            "range": list(info.range),
            "higher_is_better": info.higher_is_better,
            "needs_metadata": list(info.needs_metadata),
            "licence": info.licence,
            "memory_gib": info.memory_gib,
            "weights": info.weights,
            "missing": info.missing("public"),
        }
        for info in REWARDS.values()
    ]
    if as_json:
        emit(rows)
        return
    table = [
        [
            info.id,
            info.objective,
            info.role,
            "{:g} to {:g}".format(*info.range),
            f"{info.memory_gib:g}",
            ", ".join(info.needs_metadata),
        ]
        for info in REWARDS.values()
    ]
    out.print(listing(["id", "objective", "role", "range", "GiB", "needs"], table))
    out.print("\nFull-size images, and the licence of the weights:")
    for row in rows:  # not in the table: a remedy is there to be copied, so it is never cut
        text = f"{row['id']}: {row['missing'] or 'ready'} [{row['licence']}]"
        out.print(text, markup=False, soft_wrap=True)


@rewards.command()
def convert(
    reward: Annotated[str, typer.Argument(help="hpsv2, aesthetic, imagereward, hpsv3 or geneval.")],
    source: Annotated[
        Path, typer.Argument(help="The published checkpoint; for geneval the snapshot's folder.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The folder to write.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or cached hub repository of the tokenizer.")
    ] = None,
    instruction: Annotated[
        Path | None, typer.Option(help="hpsv3: text file with the instruction it was trained with.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an earlier conversion.")] = False,
    as_json: Json = False,
) -> None:
    """Turn a published checkpoint into safetensors, once. Only tensors are read, never code."""
    from recast_engine.rewards.convert import convert as run

    given = {"tokenizer": tokenizer, "instruction": str(instruction) if instruction else None}
    extra = {name: value for name, value in given.items() if value is not None}
    folder = run(reward, source, target=output, extra=extra, replace=replace)
    if as_json:
        emit({"reward": reward, "folder": str(folder)})
    else:
        out.print(f"{reward}: {folder}", markup=False, soft_wrap=True)


@app.command("serve-rewards")
def serve(
    reward: Rewards,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8700,
    device: Annotated[str, typer.Option(help="Device of the rewards, such as cuda:0.")] = "cpu",
    miniature: Annotated[bool, typer.Option("--miniature", help="Judge the miniature's images.")] = False,
) -> None:
    """Serve rewards of this machine to workers elsewhere.

    RECAST_REWARD_SERVER_KEY is the key that callers must send; without one only this machine may call.
    """
    import uvicorn

    from recast.reward_server import KEY, load_app

    key = os.environ.get(KEY) or None
    if key is None and not _loopback(host):
        raise CannotStart(f"set {KEY} before other machines may call {host}")
    world: RewardWorld = "miniature" if miniature else "public"
    try:
        server = load_app(reward, world, device, key)
        listener = socket.create_server((host, port))
    except EngineError as error:
        raise CannotStart(str(error)) from None
    except OSError as error:
        raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror}") from None
    out.print(f"Serving {', '.join(reward)} at http://{host}:{listener.getsockname()[1]}/v1/score")
    config = uvicorn.Config(server, server_header=False, access_log=False, log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
