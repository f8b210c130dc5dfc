"""What determines a profile, as one hash: two requests with the same one would measure the same. No torch."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from recast_engine.backbones.catalogue import model_info
from recast_engine.config import ProfileConfig, ProposalConfig, dump
from recast_engine.errors import ConfigError
from recast_engine.rewards.catalogue import reward_info
from recast_engine.weights import weights_identity

ESTIMATOR_VERSION = 7
"""Raised with every change that gives the same request other numbers."""


def profile_fingerprint(config: ProfileConfig, adapter_sha256: str | None) -> str | None:
    """SHA-256 (hex) over everything that a profile's numbers follow from, as far as it can be known here.

    In: the model's weights and how they are sampled, the adapter's bytes, the rewards (in any order) with
    their weights, the content of the prompt set, the estimator's settings and version, the seed. Out: names
    that content stands behind (ids of prompt set and adapter), what only decides who measures (``shards``,
    ``reuse``), and patience and budget of buying proposals. A judge behind an address is known by that alone.

    Returns:
        None for proposals from a folder: whose images they are today is not known here.

    Raises:
        ConfigError: the prompt set's hash is missing, or the adapter's.
        WeightsUnavailable: weights are not on this machine.
    """
    if config.prompt_set_sha256 is None or (config.adapter is None) != (adapter_sha256 is None):
        raise ConfigError("a fingerprint needs the hashes of the prompt set and of the adapter")
    estimator = dump(config.estimator)
    if proposals := estimator.get("proposals"):
        if proposals["source"] == "folder":
            return None
        estimator["proposals"] = {k: v for k, v in proposals.items() if k not in ProposalConfig.COST_ONLY}
    model = model_info(config.model)
    content: dict[str, Any] = {
        "version": ESTIMATOR_VERSION,
        "model": {
            "weights": weights_identity(model.source, model.revision, "model_index.json"),
            **{name: getattr(model, name) for name in ("family", "resolution", "shift", "guidance")},
        },
        "adapter": adapter_sha256,
        "rewards": {name: reward_info(name).identity(model.reward_world) for name in config.rewards},
        "prompt_set": config.prompt_set_sha256,
        "estimator": estimator,
        "seed": config.seed,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
