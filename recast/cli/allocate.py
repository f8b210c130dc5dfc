"""``recast allocate``: budgets and a profile in, the allocation matrix out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast import heatmap
from recast.cli.app import (
    Budget,
    Home,
    Json,
    Replace,
    Url,
    app,
    cause,
    emit,
    given,
    new_file,
    out,
    parse_budgets,
)
from recast.client import Client
from recast.errors import RecastError


@app.command()
def allocate(
    profile: Annotated[str, typer.Option("--profile", help="Id of a measured profile.")],
    budget: Budget,
    steps: Annotated[int, typer.Option("--steps", help="Denoising steps of the training.")],
    method: Annotated[str | None, typer.Option("--method", help="recast, rowwise or static.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Large: near static.")] = None,
    shift: Annotated[
        float | None, typer.Option("--shift", help="Timestep shift; default: the model's.")
    ] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Store nothing.")] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the matrix into this file.")] = None,
    replace: Replace = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Turn budgets into an allocation matrix: how much of each reward acts at each step."""
    picture = None if png is None else new_file(png, replace, "--png")
    body = given(
        {
            "profile": profile,
            "budgets": parse_budgets(budget),
            "steps": steps,
            "method": method,
            "temperature": temperature,
            "shift": shift,
        }
    )
    with Client(url, home=home) as client:
        allocation = client.preview_allocation(body) if preview else client.create_allocation(body)
    if as_json:
        emit(allocation)
    else:
        heatmap.show(out, allocation)
        if not preview:
            out.print(
                f"allocation {allocation['id']}; CSV: recast download {allocation['id']}", soft_wrap=True
            )
    if picture is not None:  # last: a stored allocation is told whatever becomes of its picture
        _draw(allocation, picture)


def _draw(allocation: dict[str, object], target: Path) -> None:
    from recast_engine.evaluation.heatmap import save_heatmap  # matplotlib is slow to import

    try:
        save_heatmap(allocation, target)
    except (OSError, ValueError) as error:
        raise RecastError(f"cannot draw {target}: {cause(error)}; give another file with --png") from None
