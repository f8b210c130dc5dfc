"""``recast up``, ``down`` and ``status``: the embedded service."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from recast.cli.app import Home, Json, app, emit, err, out
from recast.errors import NotConfigured
from recast.home import Home as HomeFolder
from recast.home import ServiceRecord

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
            _emit_record(folder, record)
        else:
            out.print(f"ReCAST is running at {record.url} (home: {folder.root}); `recast down` stops it.")
        return
    say = _tell if as_json else _say
    service.serve(folder, port, ready=partial(_announce, folder, as_json), say=say)


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
def init(home: Home = None, as_json: Json = False) -> None:
    """Prepare what a service needs: database schema, workspace, first admin key. `up` does it by itself."""
    from recast import service

    folder = HomeFolder.find(home)
    folder.create()
    service.prepare(folder, service.settings_of(folder))
    if as_json:
        emit({"home": str(folder.root), "key_file": str(folder.key)})
    else:
        out.print(f"Ready; the admin key is in {folder.key}.", markup=False, soft_wrap=True)


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
        out.print(
            f"{'Ready' if ready else 'Not ready'}: {record.url} (process {record.pid}, home: {folder.root})"
        )


def _announce(folder: HomeFolder, as_json: bool, record: ServiceRecord) -> None:
    if as_json:
        _emit_record(folder, record)
        return
    _say("ReCAST is running.")
    _say(f"  API        {record.url}/v1 (described by {record.url}/openapi.json)")
    _say(f"  Admin key  {folder.key}")
    _say(f"  Data       {folder.root}")
    _say(f"  Logs       {folder.logs}")
    _say("Ctrl-C stops it.")


def _emit_record(folder: HomeFolder, record: ServiceRecord) -> None:
    emit({"url": record.url, "pid": record.pid, "home": str(folder.root), "key_file": str(folder.key)})


def _tell(line: str) -> None:
    err.print(line, markup=False, soft_wrap=True)


def _say(line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)
