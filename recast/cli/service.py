"""``recast up``, ``down`` and ``status``: the embedded service."""

from __future__ import annotations

from typing import Annotated

import typer

from recast.cli.app import Home, Json, app, emit, out
from recast.errors import NotConfigured
from recast.home import Home as HomeFolder

Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="TCP port of the API; 0: any free one.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Return once the service is ready.")]


@app.command()
def up(home: Home = None, port: Port = 8321, detach: Detach = False, as_json: Json = False) -> None:
    """Start the service: broker, API and worker, all on this machine."""
    from recast import service

    folder = HomeFolder.find(home)
    if detach:
        record = service.start_in_background(folder, port, bound=False)
        if as_json:
            emit({"url": record.url, "pid": record.pid, "home": str(folder.root), "key_file": str(folder.key)})
        else:
            out.print(f"ReCAST is running at {record.url} (home: {folder.root}); `recast down` stops it.")
        return
    service.serve(folder, port, (lambda line: None) if as_json else _say)


@app.command()
def down(home: Home = None, as_json: Json = False) -> None:
    """Stop the service; what it stored stays."""
    from recast import service

    folder = HomeFolder.find(home)
    stopped = service.stop_running(folder)
    if as_json:
        emit({"stopped": stopped, "home": str(folder.root)})
    else:
        out.print("Stopped." if stopped else f"No service runs on {folder.root}.")


@app.command()
def status(home: Home = None, as_json: Json = False) -> None:
    """Say whether the service runs, and where."""
    from recast import service

    folder = HomeFolder.find(home)
    record = service.running(folder)
    if record is None:
        raise NotConfigured(f"no service runs on {folder.root}: `recast up` starts one")
    ready = service.answers(record.url, "/readyz")
    if as_json:
        emit({"url": record.url, "pid": record.pid, "ready": ready, "home": str(folder.root)})
    else:
        out.print(f"{'Ready' if ready else 'Not ready'}: {record.url} (process {record.pid}, home: {folder.root})")


def _say(line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)
