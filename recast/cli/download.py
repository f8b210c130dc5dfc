"""``recast download``: an adapter, an allocation's CSV or an evaluation's report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from recast.cli.app import Home, Json, Replace, Url, app, emit, new_file, out
from recast.client import Client
from recast.errors import RecastError

Format = Literal["diffusers", "comfyui", "peft"]


@app.command()
def download(
    what: Annotated[str, typer.Argument(metavar="ID", help="An adapter, allocation or evaluation.")],
    format: Annotated[
        Format | None, typer.Option("--format", help="Of an adapter; diffusers unless given.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
    replace: Replace = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Download an adapter (safetensors), an allocation (CSV) or an evaluation (HTML report)."""
    path, name = _source(what, format)
    query = {} if format is None else {"format": format}
    target = new_file(output or Path(name), replace, "--output")
    with Client(url, home=home) as client:
        try:
            client.download(path, target, **query)
        except OSError as error:
            raise RecastError(
                f"cannot write {target}: {error.strerror}; give another file with --output"
            ) from None
    if as_json:
        emit({"id": what, "path": str(target.resolve()), "bytes": target.stat().st_size})
    else:
        out.print(f"{target} ({target.stat().st_size:,} bytes)", markup=False, soft_wrap=True)


def _source(what: str, format: Format | None) -> tuple[str, str]:
    """API path and file name of the id ``what``. Raises typer.BadParameter for an id without such a file."""
    names = {
        "diffusers": "pytorch_lora_weights.safetensors",
        "comfyui": f"{what}-comfyui.safetensors",
        "peft": f"{what}-peft.zip",
    }
    sources = {
        "adapt": (f"/v1/adapters/{what}/download", names[format or "diffusers"]),
        "alloc": (f"/v1/allocations/{what}.csv", f"{what}.csv"),
        "eval": (f"/v1/evaluations/{what}/report", f"{what}.html"),
    }
    kind = what.partition("_")[0]
    if format is not None and kind != "adapt":
        raise typer.BadParameter(f"--format is for adapters (adapt_), {what!r} is none")
    try:
        return sources[kind]
    except KeyError:
        raise typer.BadParameter(
            f"{what!r} is no id of an adapter (adapt_), allocation (alloc_) or evaluation (eval_)"
        ) from None
