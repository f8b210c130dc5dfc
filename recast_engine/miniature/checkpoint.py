"""Resumable training state: safetensors for tensors, JSON for the rest, never pickle.

A checkpoint is `state.json`, which names the tensor file it belongs to. The JSON is replaced last
and atomically, so an interruption leaves either the old checkpoint or the new one, never a mix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn


class Trainee:
    """Modules trained together, with their optimiser, their step count and an average of weights.

    `average` holds an exponential moving average (EMA) of all parameters; with `decay=0` it equals
    them. `tensors`/`restore` cover everything that the next step depends on.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, decay: float = 0.0
    ) -> None:
        self.modules = dict(modules)
        self.optimizer = optimizer
        self.decay = decay
        self.step = 0
        self.parameters = {
            f"{name}.{key}": parameter
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters()
        }
        self.average = {key: p.detach().clone() for key, p in self.parameters.items()}

    def apply(self, loss: torch.Tensor, rate: float, clip: float = 1.0) -> float:
        """One optimiser step at learning rate `rate`; returns the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), clip)
        self.optimizer.step()
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (20 + self.step)) if self.decay else 0.0
        values = [p.detach() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.average.values()), values, 1 - decay)
        return float(norm)

    def averaged(self, name: str) -> dict[str, torch.Tensor]:
        """State dict of module `name` with the averaged parameters; buffers as they are."""
        own = self.modules[name].state_dict()
        prefix = f"{name}."
        mean = {k.removeprefix(prefix): v for k, v in self.average.items() if k.startswith(prefix)}
        return {key: mean.get(key, value).detach().clone() for key, value in own.items()}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"parameter/{k}": p.detach() for k, p in self.parameters.items()}
        tensors |= {f"average/{k}": p for k, p in self.average.items()}
        for key, parameter in self.parameters.items():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{slot}/{key}"] = torch.as_tensor(value)
        file = f"step-{self.step:07d}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / file)
        write_json(folder / "state.json", {"step": self.step, "tensors": file})
        for old in folder.glob("step-*.safetensors"):
            if old.name != file:
                old.unlink()

    def restore(self, folder: Path) -> bool:
        """Continue from `folder` when it holds a checkpoint; says whether it did."""
        if not (folder / "state.json").exists():
            return False
        state = json.loads((folder / "state.json").read_text())
        tensors = load_file(folder / state["tensors"])
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(tensors[f"parameter/{key}"])
                self.average[key].copy_(tensors[f"average/{key}"])
        for name, value in tensors.items():
            if name.startswith("optimizer/"):
                _, slot, key = name.split("/", 2)
                # A plain assignment: Optimizer.load_state_dict would move and cast the step count.
                self.optimizer.state[self.parameters[key]][slot] = value.clone()
        self.step = state["step"]
        return True


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, path)


def generator(seed: int, step: int) -> torch.Generator:
    """The generator of one training step, a function of (seed, step) alone: resuming needs no RNG state."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def warm_then_decay(step: int, total: int, peak: float, warmup: int, hold: float) -> float:
    """Learning rate: linear warm-up, constant up to the share `hold` of `total`, then linear to ~0."""
    rise = min(1.0, (step + 1) / warmup)
    fall = (1 - step / total) / (1 - hold) if hold < 1 else 1.0
    return peak * min(rise, max(0.005, min(1.0, fall)))
