"""A runner on several devices that does what the request says under ``do``, through the real launcher."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recast_engine.errors import NonFinite
from recast_engine.observer import Observer, Stopped
from recast_engine.training.devices import joined


def run(workdir: Path, observer: Observer) -> Mapping[str, Any]:
    """Run on as many ranks as the request has ``devices``."""
    request = json.loads((workdir / "request.json").read_text())
    if request["do"] == "lack":  # as on a machine with a single GPU
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    with joined(request["devices"]) as devices:
        (workdir / f"pid-{devices.rank}").write_text(str(os.getpid()))
        observer.phase(f"of rank {devices.rank}", devices.size)
        total = devices.add(torch.tensor(float(devices.rank + 1)))
        if request["do"] == "add":
            return {"total": float(total), "threads": os.environ["OMP_NUM_THREADS"]}
        while not devices.agree(observer.should_stop()):
            time.sleep(0.02)
            if devices.leads or request["do"] == "loop":
                continue
            if request["do"] == "raise":
                raise NonFinite("loss is not finite at optimiser step 3")
            os.kill(os.getpid(), signal.SIGKILL)
        raise Stopped
