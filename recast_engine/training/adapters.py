"""LoRA adapters on a backbone: attach, switch, save in the diffusers format, load.

File format: safetensors with keys ``transformer.<module>.lora_A.weight`` (rank, in) and ``lora_B`` (out,
rank). Rank and alpha stand in the header under ``lora_adapter_metadata``, which is where diffusers reads the
scale alpha / rank from; without it diffusers would assume a scale of 1.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from recast_engine.backbones.base import Backbone
from recast_engine.config import LoRAConfig
from recast_engine.errors import ConfigError, NonFinite

POLICY, OLD, EMA = "policy", "old", "ema"
TRAINING_ADAPTERS = (POLICY, OLD, EMA)

PREFIX = "transformer."
METADATA_KEY = "lora_adapter_metadata"
ALLOCATIONS_KEY = "recast.allocations"
"""Header entry of a trained adapter: a JSON list of every allocation that it was trained with, in order."""


@dataclass(frozen=True)
class AdapterFile:
    """A loaded adapter file.

    Attributes:
        weights: ``<module>.lora_A.weight`` / ``<module>.lora_B.weight`` -> tensor, without the prefix.
        rank: of every module.
        alpha: the output of lora_B lora_A is scaled by alpha / rank.
        metadata: the header: provenance and the adapter metadata, string to string.
    """

    weights: dict[str, Tensor]
    rank: int
    alpha: float
    metadata: dict[str, str]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(sorted({name.rsplit(".lora_", 1)[0] for name in self.weights}))


class AdapterSet:
    """Named LoRA adapters of one shape on a backbone's transformer.

    All are float32 and frozen except ``trainable``. No adapter is active outside ``using``: the backbone then
    computes the base model.
    """

    def __init__(
        self,
        backbone: Backbone,
        config: LoRAConfig,
        names: Sequence[str] = TRAINING_ADAPTERS,
        *,
        trainable: str | None = POLICY,
        seed: int = 0,
        modules: Sequence[str] | None = None,
    ) -> None:
        """Attach; all adapters start with the same Gaussian A (std 1 / rank) and B = 0.

        ``modules`` names the layers exactly, in place of the config's or the backbone's targets.

        Raises:
            ConfigError: no layer matches the targets, or adapters are attached already.
        """
        if any(isinstance(module, BaseTunerLayer) for module in backbone.transformer.modules()):
            raise ConfigError("the model already carries adapters")
        self.backbone = backbone
        self.config = config
        self.names = tuple(names)
        self.trainable = trainable
        targets = list(modules or config.targets or backbone.lora_targets)
        shape: dict[str, Any] = {"r": config.rank, "lora_alpha": config.alpha}
        lora = LoraConfig(**shape, target_modules=targets, init_lora_weights="gaussian")
        for name in self.names:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                try:
                    inject_adapter_in_model(lora, backbone.transformer, name)
                except ValueError as error:
                    raise ConfigError(f"lora.targets {targets}: {error}") from None
                finally:
                    vars(backbone.transformer).pop("peft_config", None)  # the layers hold all there is
        self._layers: dict[str, Any] = {
            name: module
            for name, module in backbone.transformer.named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        for name in self.names:
            for parameter in self.parameters(name):
                parameter.data = parameter.data.float()
        self._activate(None)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted modules, sorted."""
        return tuple(sorted(self._layers))

    def state(self, name: str) -> dict[str, Tensor]:
        """``<module>.lora_A.weight`` and ``<module>.lora_B.weight`` of adapter ``name``, in a fixed order."""
        state: dict[str, Tensor] = {}
        for module in self.modules:
            layer = self._layers[module]
            state[f"{module}.lora_A.weight"] = layer.lora_A[name].weight
            state[f"{module}.lora_B.weight"] = layer.lora_B[name].weight
        return state

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters of adapter ``name``, in the order of ``state``."""
        return [parameter for parameter in self.state(name).values() if isinstance(parameter, nn.Parameter)]

    @torch.no_grad()
    def load_state(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Overwrite adapter ``name``. Raises ConfigError when modules or shapes differ."""
        state = self.state(name)
        if set(state) != set(weights) or any(state[key].shape != weights[key].shape for key in state):
            raise ConfigError("the adapter's modules or rank do not fit the ones configured")
        for key, parameter in state.items():
            parameter.copy_(weights[key])

    @torch.no_grad()
    def blend(self, target: str, source: str, decay: float) -> None:
        """target <- decay * target + (1 - decay) * source."""
        ends, starts = list(self.state(source).values()), list(self.state(target).values())
        torch._foreach_lerp_(starts, ends, weight=1.0 - decay)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Compute with adapter ``name`` (None: the base model) inside the block; restores what was before."""
        before = self.active
        self._activate(name)
        try:
            yield
        finally:
            self._activate(before)

    @property
    def active(self) -> str | None:
        """The adapter that a forward pass uses now."""
        layer = next(iter(self._layers.values()))
        return None if layer.disable_adapters else layer.active_adapters[0]

    def _activate(self, name: str | None) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name, inference_mode=True)
        for parameter in self.parameters(self.trainable) if self.trainable else ():
            parameter.requires_grad_(True)

    def detach(self) -> None:
        """Take all adapters off; the transformer is the very one it was before."""
        for name, layer in self._layers.items():
            parent, _, child = name.rpartition(".")
            setattr(self.backbone.transformer.get_submodule(parent), child, layer.get_base_layer())


@contextmanager
def attached(
    backbone: Backbone,
    config: LoRAConfig,
    names: Sequence[str] = TRAINING_ADAPTERS,
    *,
    trainable: str | None = POLICY,
    seed: int = 0,
    modules: Sequence[str] | None = None,
) -> Iterator[AdapterSet]:
    """An :class:`AdapterSet` that is detached at the end of the block."""
    adapters = AdapterSet(backbone, config, names, trainable=trainable, seed=seed, modules=modules)
    try:
        yield adapters
    finally:
        adapters.detach()


@contextmanager
def loaded_adapter(backbone: Backbone, path: Path | None) -> Iterator[Backbone]:
    """The backbone with the adapter file ``path`` active inside the block; None: the base model.

    Raises:
        ConfigError: a file that is not an adapter of this backbone.
    """
    if path is None:
        yield backbone
        return
    loaded = load_adapter(path)
    config = LoRAConfig(rank=loaded.rank, alpha=loaded.alpha)
    with attached(backbone, config, ("loaded",), trainable=None, modules=loaded.modules) as adapters:
        adapters.load_state("loaded", loaded.weights)
        with adapters.using("loaded"):
            yield backbone


def save_adapter(
    path: Path, weights: Mapping[str, Tensor], *, alpha: float, provenance: Mapping[str, str]
) -> None:
    """Write adapter ``weights`` (as ``AdapterSet.state`` gives them) in the diffusers LoRA format.

    The same weights and provenance give the same bytes.

    Args:
        provenance: further header entries (string to string).

    Raises:
        NonFinite: a weight is not finite.
    """
    if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
        raise NonFinite(f"{path.name}: the adapter's weights are not finite, so it is not saved")
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in weights})
    rank = len(weights[f"{modules[0]}.lora_A.weight"])
    scale = {"r": rank, "lora_alpha": alpha, "target_modules": modules}
    metadata = {
        "format": "pt",
        METADATA_KEY: json.dumps({PREFIX + key: value for key, value in scale.items()}, sort_keys=True),
        **provenance,
    }
    tensors = {PREFIX + name: value.detach().cpu().contiguous() for name, value in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_header_sorted(save(tensors, metadata=metadata)))


def _header_sorted(raw: bytes) -> bytes:
    """The safetensors file ``raw`` with its header's entries in order of their names.

    The library writes ``metadata`` in the order of a hash table, which differs between processes. Layout:
    8 bytes little-endian header length, JSON header padded with spaces to a multiple of 8, then the tensors,
    which the header addresses from where they begin.
    """
    (length,) = struct.unpack_from("<Q", raw)
    header = json.dumps(json.loads(raw[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join((struct.pack("<Q", len(header)), header, memoryview(raw)[8 + length :]))


def load_adapter(path: Path) -> AdapterFile:
    """Read an adapter file. Raises ConfigError for anything that is not a LoRA in the diffusers format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            weights = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path.name} is not a readable safetensors file: {error}") from None
    if not all(map(_is_finite_matrix, weights.values())):
        raise ConfigError(f"{path.name} holds weights that are no finite matrices")
    ranks = {tensor.shape[0] for name, tensor in weights.items() if name.endswith(".lora_A.weight")}
    if len(ranks) != 1 or not all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in weights):
        raise ConfigError(f"{path.name} is not a LoRA adapter of one rank in the diffusers format")
    rank = ranks.pop()
    alpha = _alpha(path.name, metadata, rank)
    try:
        LoRAConfig(rank=rank, alpha=alpha)
    except ValidationError as error:
        wrong = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
        raise ConfigError(f"{path.name} is not an adapter that can be used: {wrong}") from None
    return AdapterFile(weights, rank, alpha, metadata)


def _is_finite_matrix(tensor: Tensor) -> bool:
    """Whether it is one of real numbers that stay finite as the float32 that is computed with."""
    return tensor.ndim == 2 and tensor.is_floating_point() and bool(torch.isfinite(tensor.float()).all())


def _alpha(name: str, metadata: Mapping[str, str], rank: int) -> float:
    """The alpha in the header of file ``name``, the rank where it has none. Raises ConfigError."""
    try:
        alpha = float(json.loads(metadata.get(METADATA_KEY, "{}")).get(f"{PREFIX}lora_alpha", rank))
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError):
        alpha = math.nan
    if not math.isfinite(alpha):
        raise ConfigError(f"{name}: {METADATA_KEY} in its header does not tell a finite lora_alpha")
    return alpha
