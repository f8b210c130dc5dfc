"""The adapter that a training ends with: the policy's average, with what made it in the header."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

from recast_engine import __version__
from recast_engine import config as configs
from recast_engine.prompts import prompt_set_hash
from recast_engine.training.adapters import ALLOCATIONS_KEY, EMA, save_adapter
from recast_engine.training.state import TrainingState

_ALLOCATION_FACTS = (
    "stage",
    "epoch",
    "reason",
    "method",
    "temperature",
    "rewards",
    "budgets",
    "sigmas",
    "matrix",
)


def export_adapter(state: TrainingState) -> tuple[Path, str]:
    """Write and report the final adapter; returns its file and the file's SHA-256, on every device."""
    path = state.workdir / "final.safetensors"
    return path, state.devices.lead(lambda: _write_adapter(state, path))


def _write_adapter(state: TrainingState, path: Path) -> str:
    lora, position = state.config.lora, state.position
    save_adapter(path, state.adapters.state(EMA), alpha=lora.alpha, provenance=provenance(state))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    facts = {
        "epoch": position.epoch,
        "step": position.step,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "base_model": state.config.model,
        "final": True,
        "sha256": digest,
    }
    state.observer.file("adapter", path.name, path, facts)
    return digest


def provenance(state: TrainingState) -> dict[str, str]:
    """Header entries that say how the adapter was made."""
    packages = ("torch", "diffusers", "transformers", "peft", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    position, config = state.position, state.config
    return {
        "recast.version": __version__,
        "recast.base_model": config.model,
        ALLOCATIONS_KEY: json.dumps(
            [{key: a[key] for key in _ALLOCATION_FACTS if key in a} for a in position.allocations]
        ),
        "recast.config": json.dumps(configs.dump(config), sort_keys=True),
        "recast.position": json.dumps({"epoch": position.epoch, "step": position.step}),
        "recast.prompt_set_sha256": prompt_set_hash(state.prompts),
        "recast.seed": str(config.seed),
        "recast.versions": json.dumps(versions, sort_keys=True),
    }
