"""Adapter files for other programs: pure conversions of a diffusers LoRA file, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

PREFIX = "transformer."
METADATA_KEY = "lora_adapter_metadata"


def to_peft(source: Path, folder: Path) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which PEFT loads onto the transformer.

    Args:
        source: a diffusers LoRA file (``pytorch_lora_weights.safetensors``).
        folder: created if need be; also returned.
    """
    tensors, metadata = _read(source)
    rank, alpha = _scale(tensors, metadata)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": metadata.get("recast.base_model"),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _modules(tensors),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    renamed = {f"base_model.model.{name}": value for name, value in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors", metadata=_provenance(metadata))
    return folder


def to_comfyui(source: Path, target: Path) -> Path:
    """Write the file that ComfyUI's LoRA loader takes for Stable Diffusion 3; returns ``target``.

    ComfyUI knows the diffusers names (``transformer.<module>.lora_A.weight``), and scales by alpha / rank
    with alpha from a tensor ``transformer.<module>.alpha``; it does not read the header.
    """
    tensors, metadata = _read(source)
    _, alpha = _scale(tensors, metadata)
    named = {PREFIX + name: value for name, value in tensors.items()}
    named |= {f"{PREFIX}{module}.alpha": np.array(alpha, dtype=np.float32) for module in _modules(tensors)}
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(named, target, metadata=_provenance(metadata))
    return target


def _read(source: Path) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    with safe_open(source, framework="numpy") as file:
        tensors = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


def _scale(tensors: dict[str, NDArray[np.float32]], metadata: dict[str, str]) -> tuple[int, float]:
    rank = next(len(value) for name, value in tensors.items() if name.endswith(".lora_A.weight"))
    scale = json.loads(metadata.get(METADATA_KEY, "{}"))
    return rank, float(scale.get(f"{PREFIX}lora_alpha", rank))


def _modules(tensors: dict[str, NDArray[np.float32]]) -> list[str]:
    return sorted({name.rsplit(".lora_", 1)[0] for name in tensors})


def _provenance(metadata: dict[str, str]) -> dict[str, str]:
    return {"format": "pt", **{key: value for key, value in metadata.items() if key.startswith("recast.")}}
