"""The rewards this installation knows, without loading torch.

Three kinds stand side by side: built-in ones, HTTP rewards of the operator's file, and plug-ins of installed
packages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from recast_engine.backbones.catalogue import RewardWorld, models
from recast_engine.errors import ConfigError
from recast_engine.prompts import Prompt
from recast_engine.rewards import http_config, plugins
from recast_engine.rewards.info import (
    AnyOf,
    Converted,
    HubSnapshot,
    MiniatureWeights,
    Packages,
    Requirement,
    RewardInfo,
    Setting,
)
from recast_engine.rewards.settings import RewardsFile, read_rewards_file
from recast_engine.rewards.vocabulary import VOCABULARIES

logger = logging.getLogger(__name__)

OPENAI_CLIP_L = HubSnapshot("openai/clip-vit-large-patch14")
MASK2FORMER = HubSnapshot("facebook/mask2former-swin-small-coco-instance")
AESTHETIC_HEAD = "sac+logos+ava1-l14-linearMSE.pth of christophschuhmann/improved-aesthetic-predictor"


HPSV3 = Converted(
    "hpsv3", "HPSv3.safetensors of MizzenAI/HPSv3", "head.safetensors", arguments="--instruction FILE"
)
CODE_MIT = "MIT (code); weights: unknown"
"""The repository of the weights' authors is MIT; of a licence of the weights themselves we do not know."""


def _loader(name: str) -> str:
    return f"recast_engine.rewards.{name}:load"


def _weights(reward: str, *public: Requirement) -> dict[RewardWorld, tuple[Requirement, ...]]:
    return {"miniature": (MiniatureWeights(reward),), "public": public}


BUILT_IN: tuple[RewardInfo, ...] = (
    RewardInfo(
        "clipscore", "prompt_fidelity", "cosine of image and prompt under CLIP",
        (-1.0, 1.0), "training", CODE_MIT, _loader("clipscore"),
        memory_gib=0.9, weights=OPENAI_CLIP_L.repository,
        requires=_weights("clipscore", OPENAI_CLIP_L),
    ),
    RewardInfo(
        "hpsv2", "appearance", "human preference: cosine under a CLIP tuned on choices",
        (-1.0, 1.0), "training", "Apache-2.0", _loader("hpsv2"),
        memory_gib=2.0, weights="xswu/HPSv2",
        requires=_weights("hpsv2", Converted("hpsv2", "HPS_v2.1_compressed.pt of xswu/HPSv2")),
    ),
    RewardInfo(
        "pickscore", "appearance", "human preference: logit of a CLIP tuned on choices",
        (-100.0, 100.0), "training", CODE_MIT, _loader("pickscore"),
        memory_gib=2.0, weights="yuvalkirstain/PickScore_v1",
        requires=_weights("pickscore", HubSnapshot("yuvalkirstain/PickScore_v1")),
    ),
    RewardInfo(
        "geneval", "composition",
        "share of the prompt's objects, counts, colours and positions that are right",
        (0.0, 1.0), "training", "CC-BY-NC-4.0 (Mask2Former); CLIP: as clipscore", _loader("geneval"),
        needs_metadata=("include",), memory_gib=1.8,
        weights=f"{MASK2FORMER.repository} and {OPENAI_CLIP_L.repository}",
        requires={"public": (AnyOf((MASK2FORMER, Converted("geneval", "the snapshot"))), OPENAI_CLIP_L)},
        vocabulary=VOCABULARIES,
    ),
    RewardInfo(
        "ocr", "text_accuracy", "share of the wanted letters that can be read",
        (0.0, 1.0), "training", "Apache-2.0", _loader("ocr"), needs_metadata=("text",),
        requires=dict.fromkeys(
            ("miniature", "public"), (Packages(("rapidocr", "onnxruntime")),)
        ),
    ),
    RewardInfo(
        "aesthetic", "appearance", "quality of the image alone, 0 to 10",
        (0.0, 10.0), "held_out", "Apache-2.0 (head); CLIP: as clipscore", _loader("aesthetic"),
        memory_gib=0.9, weights=f"{AESTHETIC_HEAD} and {OPENAI_CLIP_L.repository}",
        requires=_weights(
            "aesthetic",
            OPENAI_CLIP_L,
            Converted("aesthetic", AESTHETIC_HEAD, "head.safetensors"),
        ),
    ),
    RewardInfo(
        "imagereward", "appearance", "human preference by BLIP, standardised: about -2 to 2",
        (-3.0, 3.0), "held_out", "Apache-2.0", _loader("imagereward"), worlds=("public",),
        memory_gib=2.0, weights="THUDM/ImageReward",
        requires={"public": (Converted("imagereward", "ImageReward.pt of THUDM/ImageReward"),)},
    ),
    RewardInfo(
        "hpsv3", "appearance", "human preference by a vision-language model, about 0 to 12",
        (-5.0, 20.0), "held_out", "MIT", _loader("hpsv3"), worlds=("public",),
        memory_gib=17.0, weights="MizzenAI/HPSv3",
        requires={
            "public": (HPSV3,)
        },
    ),
    RewardInfo(
        "unifiedreward", "appearance", "a vision-language model's overall score, 1 to 5",
        (1.0, 5.0), "held_out", "MIT", _loader("unifiedreward"), worlds=("public",),
        weights="an endpoint that serves CodeGoat24/UnifiedReward-qwen-7b",
        requires={
            "public": (
                Setting("RECAST_UNIFIEDREWARD_URL", "an OpenAI-compatible endpoint, such as http://host:8080/v1"),
            )
        },
    ),
    RewardInfo(
        "jpeg_size", "compressibility", "minus the kilobytes of the image as JPEG: for debugging",
        (-1000.0, 0.0), "both", "Apache-2.0", _loader("jpeg_size"),
    ),
)  # fmt: skip


def build(file: RewardsFile, found: Iterable[RewardInfo]) -> dict[str, RewardInfo]:
    """The catalogue: built-in rewards, those of ``file``, and plug-ins ``found``, by id.

    Raises:
        ConfigError: ``file`` gives options to an unknown reward, or an HTTP reward a built-in's id.
    """
    rewards = {info.id: info for info in BUILT_IN}
    for id, table in file.http.items():
        if id in rewards:
            raise ConfigError(f"http.{id}: that is a built-in reward; give yours another name")
        rewards[id] = http_config.info(id, table)
    for info in found:
        if info.id in rewards:
            logger.error("plug-in reward %s is left out: another reward has that id", info.id)
        else:
            rewards[info.id] = info
    if unknown := sorted(set(file.options) - set(rewards)):
        raise ConfigError(f"options.{unknown[0]}: no such reward; known: {', '.join(sorted(rewards))}")
    for id, options in file.options.items():
        rewards[id] = replace(rewards[id], options=dict(options))
    return rewards


class Catalogue(Mapping[str, RewardInfo]):
    """Every reward by id, read on first use: a wrong file is an error of what needs it, not of an import.

    Any use raises ConfigError when the operator's file is wrong.
    """

    @cached_property
    def _rewards(self) -> dict[str, RewardInfo]:
        return build(read_rewards_file(), plugins.discover())

    def load(self) -> None:
        """Read the operator's file and the plug-ins now."""
        len(self._rewards)

    def __getitem__(self, reward: str) -> RewardInfo:
        return self._rewards[reward]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rewards)

    def __len__(self) -> int:
        return len(self._rewards)


REWARDS = Catalogue()


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
