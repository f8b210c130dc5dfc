"""``recast quickstart``: the whole main job on the built-in miniature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recast.cli.app import Json, app, emit, err, out


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where the service and the results go.")] = Path(
        "recast-quickstart"
    ),
    as_json: Json = False,
) -> None:
    """Run the whole main job on the built-in miniature: about ten minutes on two cores."""
    from recast import quickstart as job

    summary = job.quickstart(folder, err if as_json else out)
    if as_json:
        emit(summary)
