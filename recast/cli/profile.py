"""``recast profile``: measure when, along the trajectory, each reward can be told apart."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli.app import Estimate, Home, Json, Rewards, Seed, Url, Wait, app, emit, err, given, out
from recast.cli.jobs import estimated, start
from recast.client import Client
from recast.tables import curves


@app.command()
def profile(
    reward: Rewards,
    model: Annotated[str, typer.Option("--model")] = "miniature",
    prompt_set: Annotated[str, typer.Option("--prompt-set")] = "pset_miniature_train",
    adapter: Annotated[
        str | None, typer.Option("--adapter", help="Profile the model with this adapter.")
    ] = None,
    levels: Annotated[int | None, typer.Option("--levels", help="Noise levels.")] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", help="Prompts used.")] = None,
    images: Annotated[int | None, typer.Option("--images", help="Images per prompt.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps of each sampling.")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="Order of the Rényi divergence.")] = None,
    proposals: Annotated[
        str | None,
        typer.Option("--proposals", help="Measure on images of openai, google, folder or diffusers."),
    ] = None,
    proposals_model: Annotated[
        str | None, typer.Option("--proposals-model", help="Model of the proposals.")
    ] = None,
    proposals_folder: Annotated[
        str | None, typer.Option("--proposals-folder", help="Folder of the proposals, by its name.")
    ] = None,
    seed: Seed = 0,
    shards: Annotated[
        int | None, typer.Option("--shards", min=1, help="Parts that workers measure at once.")
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse/--no-reuse", help="Take the same profile where there is one.")
    ] = True,
    estimate: Estimate = False,
    wait: Wait = True,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Measure a Rényi profile of a model."""
    source = given({"source": proposals, "model": proposals_model, "folder": proposals_folder})
    estimator = given(
        {
            "kind": "external_proposal" if source else None,
            "proposals": source or None,
            "levels": levels,
            "prompts": prompts,
            "images_per_prompt": images,
            "sampling_steps": steps,
            "alpha": alpha,
        }
    )
    body = given(
        {
            "model": model,
            "rewards": reward,
            "prompt_set": prompt_set,
            "adapter": adapter,
            "estimator": estimator,
            "seed": seed,
            "shards": shards,
            "reuse": None if reuse else False,
        }
    )
    with Client(url, home=home) as client:
        if estimate:
            estimated(client.estimate("profile", body), as_json)
            return
        asked = client.create_profile(body)
        if asked["reused"]:
            state = "stored" if asked["status"] == "succeeded" else "being measured"
            err.print(f"reused: this profile is {state} already (--no-reuse measures again)")
        job = start(client, asked, wait, as_json)
        if job is None:
            return
        full = client.result(job)
    if as_json:
        emit({**full, "reused": asked["reused"]})
    else:
        out.print(curves(full))
        out.print(
            f"profile {full['id']}; next: recast allocate --profile {full['id']} --steps 10 -b ...",
            soft_wrap=True,
        )
