"""``recast train``: DiffusionNFT with a timed reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recast.cli.app import (
    Estimate,
    Home,
    Json,
    Seed,
    Url,
    Wait,
    app,
    emit,
    given,
    out,
    parse_budgets,
    read_body,
)
from recast.cli.jobs import estimated, start
from recast.client import Client

BESIDE_FILE = frozenset({"file", "estimate", "wait", "url", "home", "as_json"})
"""Options that say nothing about the request: those that a whole request leaves room for."""


@app.command()
def train(
    context: typer.Context,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget", "-b", metavar="NAME=WEIGHT", help="Weight of a reward or objective; repeat it."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The whole request as JSON (-: standard input).")
    ] = None,
    model: Annotated[str, typer.Option("--model")] = "miniature",
    prompt_set: Annotated[str, typer.Option("--prompt-set")] = "pset_miniature_train",
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 20,
    allocation: Annotated[
        str | None, typer.Option("--allocation", help="A stored allocation; else one is measured first.")
    ] = None,
    method: Annotated[str | None, typer.Option("--method", help="recast, rowwise or static.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="Start from this adapter.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Denoising steps.")] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", help="Prompts per epoch.")] = None,
    images: Annotated[int | None, typer.Option("--images", help="Images per prompt.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of the adapter.")] = None,
    seed: Seed = 0,
    estimate: Estimate = False,
    wait: Wait = True,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Train a LoRA adapter for budgets over several rewards."""
    if file is not None:
        _refuse_beside_file(context)
    elif not budget:
        raise typer.BadParameter("give budgets, or the whole request with --file", param_hint="--budget")
    if allocation and method:
        raise typer.BadParameter("a stored allocation already has its method", param_hint="--method")
    if file is not None:
        body = read_body(file)
    else:
        stage = {"budgets": parse_budgets(budget or []), "epochs": epochs}
        timing: Any = allocation or given({"method": method})
        sampling = {"steps": steps, "prompts_per_epoch": prompts, "images_per_prompt": images}
        body = {
            "model": model,
            "prompt_set": prompt_set,
            "stages": [{**stage, "allocation": timing} if timing else stage],
            "sampling": given(sampling),
            "lora": given({"rank": rank, "alpha": None if rank is None else 2.0 * rank}),
            "seed": seed,
            **given({"adapter": adapter}),
        }
    with Client(url, home=home) as client:
        if estimate:
            estimated(client.estimate("training", body), as_json)
            return
        job = start(client, client.create_training(body), wait, as_json)
        if job is None:
            return
        made = client.adapters(job["id"])
        full = client.result(job)
    if as_json:
        emit({**full, "adapters": made})
    else:
        out.print(f"training {job['id']}; adapter: recast download {made[0]['id']}", soft_wrap=True)


def _refuse_beside_file(context: typer.Context) -> None:
    """Raises typer.BadParameter where an option was given that the file has already said."""
    beside = sorted(
        "--" + name.replace("_", "-")
        for name in context.params
        if name not in BESIDE_FILE
        and (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    )
    if beside:
        raise typer.BadParameter(
            f"the file is the whole request: say there what {', '.join(beside)} would", param_hint="--file"
        )
