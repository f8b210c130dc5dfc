"""A training on the tiny pipeline, with rewards read off the pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast_engine.config import (
    LoRAConfig,
    OptimizerConfig,
    SamplingConfig,
    StageAllocation,
    StageConfig,
    TrainingConfig,
)
from recast_engine.observer import NullObserver
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Scores

PROMPTS = (Prompt("red cat"), Prompt("a dog", text="DOG"), Prompt("two fish"), Prompt("owl", text="OWL"))

Measure = Callable[[NDArray[np.float64]], NDArray[np.float64]]

MEASURES: dict[str, Measure] = {
    "redness": lambda x: (x[..., 0] - 0.5 * x[..., 1] - 0.5 * x[..., 2]).mean((1, 2)),
    "brightness": lambda x: x.mean((1, 2, 3)),
    "text": lambda x: x[:, :8].mean((1, 2, 3)),  # applies to prompts with a text only
    "constant": lambda x: np.full(len(x), 0.25),
    "broken": lambda x: np.full(len(x), np.nan),
    "flaky": lambda x: np.where(np.arange(len(x)) % 8 == 0, np.nan, x.mean((1, 2, 3))),
}


class PixelScorer:
    """Rewards that are means over pixels in [0, 1]."""

    def __init__(self, *rewards: str) -> None:
        self.rewards = rewards

    def select(self, rewards: Sequence[str]) -> PixelScorer:
        return PixelScorer(*rewards)

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        return np.array(
            [[reward != "text" or prompt.has("text") for prompt in prompts] for reward in self.rewards]
        )

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        applicable = self.applicable(prompts)
        pixels = images.astype(np.float64) / 255
        values = np.stack([MEASURES[reward](pixels) for reward in self.rewards])
        return Scores(
            self.rewards, np.where(applicable, values, np.nan), applicable, np.zeros(len(self.rewards))
        )


@dataclass
class Recorder(NullObserver):
    """Remembers what it hears; asks to stop at the ``stop_at``-th question."""

    stop_at: int | None = None
    asked: int = 0
    history: dict[int, dict[str, float]] = field(default_factory=dict)
    findings: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    files: list[tuple[str, str, Path, dict[str, Any]]] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    costs: list[dict[str, float]] = field(default_factory=list)
    discards: list[tuple[str, str]] = field(default_factory=list)

    def phase(self, name: str, total: int) -> None:
        self.phases.append((name, total))

    def advance(self, done: int) -> None:
        self.progress.append(done)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.history[step] = dict(values)

    def finding(self, kind: str, payload: Mapping[str, Any]) -> None:
        self.findings.append((kind, dict(payload)))

    def file(self, kind: str, name: str, path: Path, metadata: Mapping[str, Any]) -> None:
        assert path.exists()
        self.files.append((kind, name, path, dict(metadata)))

    def discard(self, kind: str, name: str) -> None:
        self.discards.append((kind, name))

    def cost(self, **amounts: float) -> None:  # type: ignore[override]
        self.costs.append(amounts)

    def should_stop(self) -> bool:
        self.asked += 1
        return self.stop_at is not None and self.asked >= self.stop_at

    def found(self, kind: str) -> list[dict[str, Any]]:
        return [payload for name, payload in self.findings if name == kind]


def training_config(budgets: Mapping[str, float], epochs: int, **optimizer: Any) -> TrainingConfig:
    """A small training with static weighting."""
    stage = StageConfig(budgets=dict(budgets), epochs=epochs, allocation=StageAllocation(method="static"))
    settings = {"learning_rate": 3e-3, "beta": 1.0, "advantage_clip": 2.0, "kl_weight": 0.0, "batch_size": 8}
    return TrainingConfig(
        model="miniature",
        prompt_set="tests",
        stages=(stage,),
        lora=LoRAConfig(rank=4, alpha=8.0),
        sampling=SamplingConfig(steps=4, prompts_per_epoch=2, images_per_prompt=8),
        optimizer=OptimizerConfig(**{**settings, **optimizer}),
        checkpoint_every=1,
        samples_every=100,
    )
