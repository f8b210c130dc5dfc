"""``recast profiles compare``: do two profiles say the same?"""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli.app import Home, Json, Url, app, emit, given, out, parse_budgets
from recast.client import Client
from recast.tables import comparison

profiles = typer.Typer(help="Measured profiles: compare two.", no_args_is_help=True)
app.add_typer(profiles, name="profiles")

ProfileId = Annotated[str, typer.Argument(metavar="PROFILE", help="Id of a measured profile.")]


@profiles.command()
def compare(
    a: ProfileId,
    b: ProfileId,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget", "-b", metavar="NAME=WEIGHT", help="Budgets of the allocations; default: equal."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Denoising steps; default: the model's.")
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Large: near static.")] = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Compare two profiles: timing, totals, and the allocations they lead to."""
    budgets = parse_budgets(budget) if budget else None
    body = given({"profiles": [a, b], "budgets": budgets, "steps": steps, "temperature": temperature})
    with Client(url, home=home) as client:
        found = client.compare_profiles(body)
    if as_json:
        emit(found)
        return
    out.print(comparison(found))
    for reward in found["rewards"].values():
        out.print(reward["verdict"])
    out.print(
        f"Weights change by at most {found['largest_weight_change']:.3f} ({found['reward']}, step "
        f"{found['at_step']} of {found['steps']}), by {found['mean_weight_change']:.3f} on average."
    )
    for entry in found["differences"]:
        out.print(f"Measured differently: {entry['setting']} {entry['a']} against {entry['b']}")
