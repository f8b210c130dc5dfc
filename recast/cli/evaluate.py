"""``recast evaluate``: adapters against each other and the base model, on the same prompts and seeds."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli.app import Estimate, Home, Json, Rewards, Url, Wait, app, emit, given, out, parse_budgets
from recast.cli.jobs import estimated, start
from recast.client import Client
from recast.tables import differences


@app.command()
def evaluate(
    adapter: Annotated[list[str], typer.Argument(metavar="ADAPTER...", help="Adapters to compare.")],
    reward: Rewards,
    base_model: Annotated[str, typer.Option("--base-model", help="The baseline.")] = "miniature",
    prompt_set: Annotated[str, typer.Option("--prompt-set")] = "pset_miniature_heldout",
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", metavar="NAME=WEIGHT", help="Also judge this weighted objective."),
    ] = None,
    images: Annotated[int | None, typer.Option("--images", help="Images per prompt.")] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", help="At most this many prompts.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Denoising steps.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", min=0, help="Repeat it for several seeds.")
    ] = None,
    estimate: Estimate = False,
    wait: Wait = True,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Evaluate adapters against the base model."""
    labels = ["adapter"] if len(adapter) == 1 else [f"adapter {n}" for n in range(1, len(adapter) + 1)]
    body = {
        "subjects": [
            {"base_model": base_model, "label": "base"},
            *({"adapter": one, "label": label} for one, label in zip(adapter, labels, strict=True)),
        ],
        "baseline": "base",
        "rewards": reward,
        "prompt_set": prompt_set,
        **given(
            {
                "images_per_prompt": images,
                "max_prompts": prompts,
                "steps": steps,
                "seeds": seed or None,
                "objective": parse_budgets(budget) if budget else None,
            }
        ),
    }
    with Client(url, home=home) as client:
        if estimate:
            estimated(client.estimate("evaluation", body), as_json)
            return
        job = start(client, client.create_evaluation(body), wait, as_json)
        if job is None:
            return
        full = client.result(job)
    if as_json:
        emit(full)
    else:
        out.print(differences(full["report"]))
        out.print(full["report"]["verdict"], markup=False)
        out.print(f"evaluation {full['id']}; HTML report: recast download {full['id']}", soft_wrap=True)
