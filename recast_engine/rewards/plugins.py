"""Rewards of your own: the ``@reward`` decorator and the entry point group ``recast.rewards``.

    @reward("redness", objective="appearance", range=(0, 1), licence="MIT", summary="share of red light")
    def redness(images, prompts):
        return images[..., 0].mean(axis=(1, 2)) / 255

and in the package's pyproject.toml:

    [project.entry-points."recast.rewards"]
    redness = "my_package:redness"

The API imports plug-ins too, to list them: import what is heavy inside the function, or inside the class.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Reward
from recast_engine.rewards.info import WORLDS, Requirement, RewardInfo, Role, check_options

GROUP = "recast.rewards"
ATTRIBUTE = "recast_reward"
METADATA = ("text", "include", "exclude", "tag")
"""Fields of a prompt that a reward may need."""
ID = re.compile(r"[a-z][a-z0-9_]{0,39}")

logger = logging.getLogger(__name__)
Target = TypeVar("Target", bound=Callable[..., Any])


def reward(
    id: str,
    *,
    objective: str,
    range: tuple[float, float],
    licence: str,
    summary: str = "",
    role: Role = "both",
    needs_metadata: Sequence[str] = (),
    worlds: Sequence[RewardWorld] = WORLDS,
    memory_gib: float = 0.0,
    requires: Sequence[Requirement] = (),
) -> Callable[[Target], Target]:
    """Mark a function or a class as a reward.

    A function takes ``images`` (N, H, W, 3) uint8 and ``prompts`` (N :class:`Prompt`) and returns N scores,
    higher is better, NaN where it cannot tell. A class is built once per job as ``cls(device="cuda:0",
    **options)`` (only with the arguments that it names) and has a method ``score`` of that form. An attribute
    ``lane`` of either is that of :class:`Reward`.

    Raises:
        ConfigError: ``id`` or ``objective`` is not lower-case letters, digits and underscores, or another
            argument is none of what it may be; the text names it.
    """
    check_id(id)
    _check(id, objective, range, licence, role, needs_metadata, worlds)

    def mark(target: Target) -> Target:
        info = RewardInfo(
            id=id,
            objective=objective,
            summary=summary or (inspect.getdoc(target) or id).splitlines()[0],
            range=range,
            role=role,
            licence=licence,
            loader=partial(_load, id, target),
            needs_metadata=tuple(needs_metadata),
            worlds=tuple(worlds),
            memory_gib=memory_gib,
            requires=dict.fromkeys(worlds, tuple(requires)),
        )
        setattr(target, ATTRIBUTE, info)
        return target

    return mark


def _check(
    id: str,
    objective: str,
    range: tuple[float, float],
    licence: str,
    role: str,
    needs_metadata: Sequence[str],
    worlds: Sequence[str],
) -> None:
    """Raises ConfigError naming the argument: the service and its clients read the catalogue."""
    problems = {
        "objective": None if ID.fullmatch(objective) else "lower-case letters, digits and underscores",
        "range": None if _ordered(range) else "the lowest and the highest score, both finite",
        "licence": None if licence.strip() else "the licence of the weights, or 'unknown'",
        "role": None if role in get_args(Role) else f"one of {', '.join(get_args(Role))}",
        "needs_metadata": _not_among(needs_metadata, METADATA),
        "worlds": _not_among(worlds, WORLDS),
    }
    for name, problem in problems.items():
        if problem is not None:
            raise ConfigError(f"reward {id!r}: {name} must be {problem}")


def _ordered(range: tuple[float, float]) -> bool:
    return len(range) == 2 and all(map(math.isfinite, range)) and range[0] < range[1]


def _not_among(given: Sequence[str], known: Sequence[str]) -> str | None:
    if not isinstance(given, str) and all(name in known for name in given):
        return None
    return f"a list of names among {', '.join(known)}"


def check_id(id: str) -> None:
    """Raises ConfigError for an id that no reward may have."""
    if not ID.fullmatch(id):
        raise ConfigError(
            f"{id!r} is no reward id: lower-case letters, digits and underscores, at most 40, letter first"
        )


class PlugIn:
    """A function or object of somebody else's as a :class:`Reward`, in the ``lane`` that it names."""

    def __init__(self, id: str, score: Callable[..., Any], lane: str = "device"):
        self.id, self.lane = id, lane
        self._score = score

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """What the plug-in gives, as float64 (N,)."""
        scores: NDArray[np.float64] = np.asarray(self._score(images, prompts), dtype=np.float64)
        return scores


def _load(id: str, target: Callable[..., Any], world: RewardWorld, device: str, **options: Any) -> Reward:
    lane = getattr(target, "lane", "device")
    if not isinstance(target, type):
        check_options(id, target, (None, None), options)
        return PlugIn(id, partial(target, **options), lane)
    known = inspect.signature(target).parameters
    given = {name: value for name, value in {"device": device, "world": world}.items() if name in known}
    check_options(id, target, (), {**options, **given})
    built = target(**given, **options)
    return PlugIn(id, built.score, getattr(built, "lane", lane))


def discover(points: Iterable[EntryPoint] | None = None) -> Iterator[RewardInfo]:
    """Rewards of installed packages, by name; one that cannot be loaded says why in its ``problem``."""
    found = entry_points(group=GROUP) if points is None else points
    for point in sorted(found, key=lambda point: point.name):
        try:
            info = getattr(point.load(), ATTRIBUTE, None)
        except Exception as error:  # another project's import must not take the service down
            logger.exception("plug-in reward %s cannot be loaded", point.name)
            yield _broken(point, f"plug-in {point.value} cannot be loaded ({type(error).__name__})")
            continue
        if not isinstance(info, RewardInfo):
            yield _broken(point, f"plug-in {point.value} is not marked with @reward")
        else:
            package = point.dist
            yield replace(info, version=f"{package.name} {package.version}" if package else info.version)


def _broken(point: EntryPoint, problem: str) -> RewardInfo:
    return RewardInfo(
        point.name, "unknown", "a plug-in that cannot be used", (0.0, 1.0), "held_out", "unknown",
        loader=point.value, problem=problem,
    )  # fmt: skip
