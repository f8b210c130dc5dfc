"""What the operator of an installation says about rewards: where weights lie, options, HTTP endpoints.

Everything here comes from the environment and from a file on this machine, never from a client of the API:
whoever may start a job must not be able to make a worker call an address of their choosing.

| variable | default | for |
| --- | --- | --- |
| RECAST_REWARDS | rewards.toml in RECAST_HOME | options of rewards and HTTP rewards (docs/rewards.md) |
| RECAST_REWARD_WEIGHTS | rewards/ in RECAST_HOME | checkpoints that `recast rewards convert` wrote |
| RECAST_REWARD_DEVICE | the model's device | device of local rewards, for example cuda:1 or cpu |
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recast_engine.errors import ConfigError

FILE = "RECAST_REWARDS"
WEIGHTS = "RECAST_REWARD_WEIGHTS"
DEVICE = "RECAST_REWARD_DEVICE"


@dataclass(frozen=True)
class RewardsFile:
    """The operator's file: ``options`` by reward id, ``http`` tables by the id of the reward they add."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    http: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def home() -> Path:
    """Folder of this installation: RECAST_HOME, or ~/.recast."""
    return Path(os.environ.get("RECAST_HOME") or Path.home() / ".recast").expanduser()


def weights_folder(reward: str) -> Path:
    """Where the converted checkpoint of ``reward`` lies, or will lie."""
    root = os.environ.get(WEIGHTS)
    return (Path(root).expanduser() if root else home() / "rewards") / reward


def device(default: str) -> str:
    """Device of local rewards: RECAST_REWARD_DEVICE, else ``default``."""
    return os.environ.get(DEVICE) or default


def read_rewards_file() -> RewardsFile:
    """The operator's file; empty where there is none.

    Raises:
        ConfigError: the file that RECAST_REWARDS names is missing, or is no TOML of the two tables
            ``options`` and ``http``.
    """
    named = os.environ.get(FILE)
    path = Path(named).expanduser() if named else home() / "rewards.toml"
    if not named and not path.is_file():
        return RewardsFile()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{FILE}: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if unknown := sorted(set(data) - {"options", "http"}):
        raise ConfigError(f"{path}: unknown {', '.join(unknown)}; there are options.<reward> and http.<id>")
    for name in ("options", "http"):
        tables = data.get(name, {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise ConfigError(f"{path}: {name} holds one table per reward, as in [{name}.my_reward]")
    return RewardsFile(data.get("options", {}), data.get("http", {}))
