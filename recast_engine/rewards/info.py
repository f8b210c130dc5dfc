"""A catalogue entry of a reward: what it measures, what it needs, and how it is loaded. No torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from recast_engine import miniature
from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError
from recast_engine.rewards.base import Reward
from recast_engine.rewards.settings import weights_folder
from recast_engine.rewards.vocabulary import Vocabulary
from recast_engine.weights import weights_identity

Role = Literal["training", "held_out", "both"]
Loader = Callable[..., Reward]
"""``loader(world, device, **options)``."""

WORLDS: tuple[RewardWorld, ...] = ("miniature", "public")


class Requirement(Protocol):
    """Something that must be on this machine before a reward can score."""

    def missing(self) -> str | None:
        """What is missing, with the remedy; None when it is there."""

    def identity(self) -> dict[str, str]:
        """What of it scores follow from: versions and hashes of what is here."""


@dataclass(frozen=True)
class Packages:
    """Python packages of the ``rewards`` extra."""

    modules: tuple[str, ...]

    def missing(self) -> str | None:
        absent = [name for name in self.modules if importlib.util.find_spec(name) is None]
        return f"needs the package {', '.join(absent)}: pip install 'recast[rewards]'" if absent else None

    def identity(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in self.modules}


@dataclass(frozen=True)
class HubSnapshot:
    """A hub repository in the local cache, with its weights as safetensors."""

    repository: str
    revision: str = "main"

    def missing(self) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        def cached(name: str) -> bool:
            return isinstance(try_to_load_from_cache(self.repository, name, revision=self.revision), str)

        weights = ("model.safetensors", "model.safetensors.index.json")
        if cached("config.json") and any(map(cached, weights)):
            return None
        return f"weights are not in the local cache: run hf download {self.repository}"

    def identity(self) -> dict[str, str]:
        return {self.repository: weights_identity(self.repository, self.revision, "config.json")}


@dataclass(frozen=True)
class Converted:
    """A published checkpoint that ``recast rewards convert`` has turned into safetensors."""

    reward: str
    published: str
    file: str = "model.safetensors"
    arguments: str = ""

    def missing(self) -> str | None:
        if (weights_folder(self.reward) / self.file).is_file():
            return None
        return (
            f"the published checkpoint is not converted yet: download {self.published}, "
            f"then run {' '.join(('recast rewards convert', self.reward, 'FILE', self.arguments)).rstrip()}"
        )

    def identity(self) -> dict[str, str]:
        return {"converted": weights_identity(str(weights_folder(self.reward)), None, self.file)}


@dataclass(frozen=True)
class AnyOf:
    """One of several is enough; the remedy named is the first one's."""

    options: tuple[Requirement, ...]

    def missing(self) -> str | None:
        reasons = [option.missing() for option in self.options]
        return None if None in reasons else reasons[0]

    def identity(self) -> dict[str, str]:
        return next((one.identity() for one in self.options if one.missing() is None), {})


@dataclass(frozen=True)
class Setting:
    """An environment variable that the operator sets."""

    variable: str
    meaning: str

    def missing(self) -> str | None:
        return None if os.environ.get(self.variable) else f"set {self.variable}: {self.meaning}"

    def identity(self) -> dict[str, str]:
        return {}  # it may be a key


@dataclass(frozen=True)
class MiniatureWeights:
    """The packaged judge of the miniature's world."""

    reward: str

    def missing(self) -> str | None:
        folder: Path = miniature.reward_weights(self.reward)
        return None if folder.is_dir() else f"{folder.name}: run python -m recast_engine.miniature.build"

    def identity(self) -> dict[str, str]:
        folder = str(miniature.reward_weights(self.reward))
        return {"weights": weights_identity(folder, None, "config.json")}


def check_options(
    reward: str, target: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Raises ConfigError for options that ``target(*arguments, **options)`` does not know."""
    try:
        inspect.signature(target).bind(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"options.{reward}: {error}") from None


@dataclass(frozen=True)
class RewardInfo:
    """A catalogue entry.

    Attributes:
        objective: what it serves; budgets may name it in place of the reward.
        summary: what the score is, for people.
        range: lowest and highest value that it is meant to give.
        role: ``held_out`` rewards cannot be trained on.
        loader: a callable, or "module:function", called as ``loader(world, device, **options)``.
        licence: of the published weights, as their page or the repository that publishes them states it;
            "unknown" where neither does.
        needs_metadata: prompt fields without which it cannot score.
        worlds: the images it can judge: the miniature's, or full-size ones ("public").
        memory_gib: device memory that its full-size checkpoint takes.
        weights: where the full-size weights come from.
        requires: what must be here to score images of a world.
        options: keyword arguments of the loader, from the operator's file.
        version: of what gives the scores, where no weights on this machine do: a plug-in's package, an
            HTTP reward's endpoint.
        problem: why it cannot be used at all (a plug-in that does not import, say).
        vocabulary: the classes and colours that prompts may ask it for, where that is limited.
    """

    id: str
    objective: str
    summary: str
    range: tuple[float, float]
    role: Role
    licence: str
    loader: str | Loader
    needs_metadata: tuple[str, ...] = ()
    higher_is_better: bool = True
    worlds: tuple[RewardWorld, ...] = WORLDS
    memory_gib: float = 0.0
    weights: str | None = None
    requires: Mapping[RewardWorld, tuple[Requirement, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    problem: str | None = None
    vocabulary: Mapping[RewardWorld, Vocabulary] = field(default_factory=dict)

    def missing(self, world: RewardWorld) -> str | None:
        """Why it cannot score images of ``world``, with the remedy; None when it can."""
        if self.problem is not None:
            return self.problem
        if world not in self.worlds:
            kind = "the miniature's" if world == "miniature" else "full-size"
            return f"it does not judge {kind} images"
        for requirement in self.requires.get(world, ()):
            if reason := requirement.missing():
                return reason
        return None

    def identity(self, world: RewardWorld) -> dict[str, str]:
        """What its scores of images of ``world`` follow from. Raises WeightsUnavailable."""
        parts: dict[str, str] = {}
        for requirement in self.requires.get(world, ()):
            parts |= requirement.identity()
        extra = {"options": json.dumps(dict(self.options), sort_keys=True), "version": self.version}
        return parts | {name: value for name, value in extra.items() if value not in ("", "{}")}

    def load(self, world: RewardWorld, device: str) -> Reward:
        """The reward, ready to score images of ``world``. Raises WeightsUnavailable, ConfigError."""
        loader = self.loader
        if isinstance(loader, str):
            module, _, name = loader.partition(":")
            loader = getattr(importlib.import_module(module), name)
        check_options(self.id, loader, (world, device), self.options)
        return loader(world, device, **self.options)
