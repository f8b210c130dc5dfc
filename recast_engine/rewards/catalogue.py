"""The rewards this installation knows, without loading torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from recast_engine import miniature
from recast_engine.backbones.catalogue import RewardWorld, models
from recast_engine.errors import ConfigError
from recast_engine.prompts import Prompt

Role = Literal["training", "held_out", "both"]


@dataclass(frozen=True)
class RewardInfo:
    """A catalogue entry.

    ``summary`` says what the score is, for people. ``public_source`` is the hub repository of the full-size
    checkpoint, if it has one; ``public_gap`` says why full-size images cannot be scored yet, whatever is
    installed.
    """

    id: str
    objective: str
    summary: str
    range: tuple[float, float]
    role: Role
    licence: str
    needs_metadata: tuple[str, ...] = ()
    higher_is_better: bool = True
    public_source: str | None = None
    public_revision: str | None = None
    public_gap: str | None = None
    modules: tuple[str, ...] = field(default=())  # packages of the `rewards` extra it needs

    def missing(self, world: RewardWorld) -> str | None:
        """Why it cannot score images of ``world``, with the remedy; None when it can."""
        if world == "public" and self.public_gap is not None:
            return self.public_gap
        absent = [name for name in self.modules if importlib.util.find_spec(name) is None]
        if absent:
            return f"needs the package {', '.join(absent)}: pip install 'recast[rewards]'"
        if self.public_source is None:
            return None
        if world == "miniature":
            folder = miniature.reward_weights(self.id)
            return None if folder.is_dir() else f"{folder.name}: run python -m recast_engine.miniature.build"
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.public_source, "config.json", revision=self.public_revision)
        if isinstance(cached, str):
            return None
        return f"weights are not in the local cache: run hf download {self.public_source}"


REWARDS: dict[str, RewardInfo] = {
    info.id: info
    for info in (
        RewardInfo("clipscore", "prompt_fidelity", "cosine of image and prompt under CLIP",
                   (-1.0, 1.0), "training", "MIT",
                   public_source="openai/clip-vit-large-patch14", public_revision="main"),
        RewardInfo("hpsv2", "appearance", "human preference: cosine under a CLIP tuned on choices",
                   (-1.0, 1.0), "training", "Apache-2.0",
                   public_source="xswu/HPSv2", public_revision="main",
                   public_gap="the published checkpoint is a pickle, which is never loaded; its conversion"
                   " to safetensors is not available yet"),
        RewardInfo("pickscore", "appearance", "human preference: logit of a CLIP tuned on choices",
                   (-100.0, 100.0), "training", "MIT",
                   public_source="yuvalkirstain/PickScore_v1", public_revision="main"),
        RewardInfo("geneval", "composition",
                   "share of the prompt's objects, counts, colours and positions that are right",
                   (0.0, 1.0), "training", "MIT", needs_metadata=("include",),
                   public_gap="an object detector for full-size images is not available yet"),
        RewardInfo("ocr", "text_accuracy", "share of the wanted letters that can be read",
                   (0.0, 1.0), "training", "Apache-2.0", needs_metadata=("text",),
                   modules=("rapidocr", "onnxruntime")),
        RewardInfo("aesthetic", "appearance", "quality of the image alone, 0 to 10",
                   (0.0, 10.0), "held_out", "MIT",
                   public_source="openai/clip-vit-large-patch14", public_revision="main",
                   public_gap="the published linear head is a pickle, which is never loaded; its conversion"
                   " to safetensors is not available yet"),
    )
}  # fmt: skip


def reward_info(reward: str) -> RewardInfo:
    """The entry of ``reward``. Raises ConfigError naming the known ids."""
    try:
        return REWARDS[reward]
    except KeyError:
        raise ConfigError(f"unknown reward {reward!r}; known: {', '.join(sorted(REWARDS))}") from None


def resolve_budgets(budgets: Mapping[str, float], model: str) -> dict[str, float]:
    """Budgets over rewards and objectives -> normalised budgets over rewards, in catalogue order.

    An objective's weight is shared equally by its training rewards that are available for ``model``; a
    reward named beside its objective keeps its own weight on top of that share.

    Raises:
        ConfigError: unknown names, negative or non-finite weights, all zero, or nothing available.
    """
    world = models()[model].reward_world
    shares: dict[str, float] = {}
    for name, weight in budgets.items():
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"budget of {name!r} must be finite and not negative, got {weight}")
        for reward in _rewards_of(name, world):
            shares[reward[0]] = shares.get(reward[0], 0.0) + weight * reward[1]
    total = math.fsum(shares.values())
    if total <= 0:
        raise ConfigError("at least one budget must be positive")
    return {reward: shares[reward] / total for reward in REWARDS if reward in shares}


def _rewards_of(name: str, world: RewardWorld) -> list[tuple[str, float]]:
    if name in REWARDS:
        info = REWARDS[name]
        if info.role == "held_out":
            raise ConfigError(f"reward {name!r} is held out for evaluation and cannot be trained on")
        if reason := info.missing(world):
            raise ConfigError(f"reward {name!r} is not available: {reason}")
        return [(name, 1.0)]
    members = [info for info in REWARDS.values() if info.objective == name and info.role != "held_out"]
    if not members:
        objectives = sorted({info.objective for info in REWARDS.values()})
        raise ConfigError(
            f"unknown reward or objective {name!r}; rewards: {', '.join(sorted(REWARDS))}; "
            f"objectives: {', '.join(objectives)}"
        )
    usable = [info.id for info in members if info.missing(world) is None]
    if not usable:
        raise ConfigError(f"no reward of objective {name!r} is available: {members[0].missing(world)}")
    return [(reward, 1.0 / len(usable)) for reward in usable]


def usable_prompts(reward: str, prompts: Iterable[Prompt]) -> int:
    """How many of ``prompts`` carry the metadata that ``reward`` needs."""
    needs: Sequence[str] = reward_info(reward).needs_metadata
    return sum(all(prompt.has(name) for name in needs) for prompt in prompts)
