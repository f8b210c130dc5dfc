"""Which trackers there are, and whether those that the operator wants can be used on this machine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from store.settings import Settings
from workers.tracking.base import Tracker

OFFLINE = ("offline", "disabled")
"""Values of WANDB_MODE that need no key."""


class TrackerUnavailable(ValueError):
    """A tracker that RECAST_TRACKERS names cannot be used; the text says how to mend it."""


@dataclass(frozen=True)
class Entry:
    """A tracker.

    Attributes:
        package: that must be installed, and is named like its extra.
        module: of the class ``Connection``.
        missing: what the environment lacks; None: nothing.
    """

    package: str
    module: str
    missing: Callable[[Mapping[str, str]], str | None]


def _mlflow_missing(environ: Mapping[str, str]) -> str | None:
    if environ.get("MLFLOW_TRACKING_URI"):
        return None
    return "set MLFLOW_TRACKING_URI (such as http://host:5000)"


def _wandb_missing(environ: Mapping[str, str]) -> str | None:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE") in OFFLINE:
        return None
    return "set WANDB_API_KEY, or WANDB_MODE=offline"


TRACKERS = {
    "tensorboard": Entry("tensorboard", "workers.tracking.tensorboard", lambda _: None),
    "mlflow": Entry("mlflow", "workers.tracking.mlflow", _mlflow_missing),
    "wandb": Entry("wandb", "workers.tracking.wandb", _wandb_missing),
}


def wanted(settings: Settings, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The trackers of ``settings``, in order and once each; imports none of them.

    Raises:
        TrackerUnavailable: one is unknown, not installed or not set up.
    """
    names = tuple(dict.fromkeys(name for part in settings.trackers.split(",") if (name := part.strip())))
    for name in names:
        if name not in TRACKERS:
            raise TrackerUnavailable(f"RECAST_TRACKERS: {name!r} is unknown; known: {', '.join(TRACKERS)}")
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise TrackerUnavailable(
                f"RECAST_TRACKERS: {name} needs the package {package}: pip install 'recast[{name}]'"
            )
        if missing := TRACKERS[name].missing(environ):
            raise TrackerUnavailable(f"RECAST_TRACKERS: {name}: {missing}")
    return names


def connections(settings: Settings) -> dict[str, Callable[[], Tracker]]:
    """What connects to each tracker of ``settings``; their libraries are imported here.

    Raises:
        TrackerUnavailable: one is unknown, not set up, or cannot be imported.
    """
    found: dict[str, Callable[[], Tracker]] = {}
    for name in wanted(settings):
        try:
            module = importlib.import_module(TRACKERS[name].module)
        except ImportError as error:
            raise TrackerUnavailable(f"RECAST_TRACKERS: {name} cannot be imported: {error}") from None
        found[name] = partial(module.Connection, settings)
    return found
