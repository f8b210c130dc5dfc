"""A LoRA file in the diffusers format, rewritten for PEFT and for ComfyUI, without loading its tensors.

Only names and the header change: the tensors' bytes are copied. Safetensors layout: 8 bytes little-endian
header length, JSON header (name -> dtype, shape, data_offsets), tensor bytes.

Sources: the safetensors format description; PEFT's ``adapter_config.json``; ComfyUI's ``comfy/lora.py``,
which for SD3 maps ``transformer.<module>`` with ``lora_up``/``lora_down`` and reads the scale from ``.alpha``
(without it the scale would be 1, whatever alpha / rank is).
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

PREFIX = "transformer."
LORA_METADATA = "lora_adapter_metadata"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
VERSION = 1  # part of the ETag: raise it when the bytes of a rewritten format change
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a zip of the same adapter is the same bytes whenever it is made


@dataclass(frozen=True)
class Shape:
    """What the target formats record about an adapter."""

    base_model: str
    rank: int
    alpha: float


def to_peft(source: IO[bytes], shape: Shape) -> tuple[IO[bytes], int]:
    """A zip with ``adapter_config.json`` and ``adapter_model.safetensors``, and its size in bytes.

    ``PeftModel.from_pretrained`` loads the unpacked folder onto the transformer.
    """
    header, data = _read(source)
    modules = sorted({_module(name) for name in header if name != "__metadata__"})
    config = {
        "base_model_name_or_path": shape.base_model,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": shape.rank,
        "target_modules": modules,
        "task_type": None,
    }
    target = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("adapter_config.json", _EPOCH), json.dumps(config, indent=2))
        entry = zipfile.ZipInfo("adapter_model.safetensors", _EPOCH)
        with archive.open(entry, "w", force_zip64=True) as file:
            _write(
                file, header, source, data, lambda name: f"base_model.model.{name.removeprefix(PREFIX)}", {}
            )
    return _rewound(target)


def to_comfyui(source: IO[bytes], shape: Shape) -> tuple[IO[bytes], int]:
    """A safetensors file with ``lora_down``, ``lora_up`` and ``alpha`` per module, and its size in bytes."""
    header, data = _read(source)
    modules = sorted({_module(name) for name in header if name != "__metadata__"})
    alphas = {f"{PREFIX}{module}.alpha": shape.alpha for module in modules}

    def rename(name: str) -> str:
        part = ".lora_down.weight" if name.endswith(DOWN) else ".lora_up.weight"
        return f"{PREFIX}{_module(name)}{part}"

    target = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    _write(target, header, source, data, rename, alphas)
    return _rewound(target)


def _read(source: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The header, and where tensor bytes begin."""
    (length,) = struct.unpack("<Q", source.read(8))
    header: dict[str, Any] = json.loads(source.read(length))
    return header, 8 + length


def _module(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)


def _write(
    target: IO[bytes],
    header: Mapping[str, Any],
    source: IO[bytes],
    data: int,
    rename: Callable[[str], str],
    scalars: Mapping[str, float],
) -> None:
    """The tensors of ``source`` under new names, float32 ``scalars`` before them."""
    metadata = {key: value for key, value in header.get("__metadata__", {}).items() if key != LORA_METADATA}
    written: dict[str, Any] = {"__metadata__": metadata}
    for index, name in enumerate(scalars):
        written[name] = {"dtype": "F32", "shape": [], "data_offsets": [4 * index, 4 * index + 4]}
    shift = 4 * len(scalars)
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            written[rename(name)] = {**entry, "data_offsets": [start + shift, end + shift]}
    raw = json.dumps(written, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    target.write(struct.pack("<Q", len(raw)) + raw)
    target.write(struct.pack(f"<{len(scalars)}f", *scalars.values()))
    source.seek(data)
    shutil.copyfileobj(source, target, 1024 * 1024)


def _rewound(target: IO[bytes]) -> tuple[IO[bytes], int]:
    size = target.seek(0, 2)
    target.seek(0)
    return target, size
