"""Rewards -> group-normalised advantages -> optimality probabilities. Never NaN, never infinite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_engine.rewards.base import RELATIVE_NOISE

Scale = Literal["global", "group"]


def group_advantages(
    rewards: Tensor | NDArray[Any] | Sequence[Any],
    groups: Tensor | NDArray[Any] | Sequence[Any],
    *,
    scale: Scale = "global",
) -> Tensor:
    """Advantages: score minus its group's mean, over a standard deviation; each reward on its own.

    Scores that are NaN or infinite (failed, or not applicable), and all scores of groups with no spread or
    with a single finite score, get exactly 0; ``usable_samples`` tells them from true zeros.

    Args:
        rewards: (N,) or (R, N) scores.
        groups: (N,) group ids; images of one prompt share an id.
        scale: divide by the standard deviation of all finite scores of the reward (``global``), or of the
            group's (``group``); population standard deviations.

    Returns:
        float64 tensor of the shape of ``rewards``, finite.

    Raises:
        ValueError: shapes that do not fit, or an unknown scale.
    """
    scores, ids = _as_tensors(rewards, groups)
    if scale not in ("global", "group"):
        raise ValueError(f"scale must be 'global' or 'group', got {scale!r}")
    rows = [_row_advantages(row, ids, scale) for row in (scores if scores.ndim == 2 else scores[None])]
    return torch.stack(rows).reshape(scores.shape) if rows else torch.zeros_like(scores)


def advantage_scales(
    rewards: Tensor | NDArray[Any] | Sequence[Any],
    groups: Tensor | NDArray[Any] | Sequence[Any],
    *,
    scale: Scale = "global",
) -> list[float]:
    """What ``group_advantages`` divides each of (R, N) rewards by; the mean over live groups for ``group``.

    NaN for a reward without a group that has spread.
    """
    scores, ids = _as_tensors(rewards, groups)
    scales: list[float] = []
    for row in scores if scores.ndim == 2 else scores[None]:
        usable = _usable(row, ids)
        if not bool(usable.any()):
            scales.append(float("nan"))
        elif scale == "global":
            scales.append(float(row[torch.isfinite(row)].std(correction=0)))
        else:
            live = torch.unique(ids[usable])
            scales.append(float(_spread(row, usable, ids)[1][live].mean()))
    return scales


def usable_samples(
    rewards: Tensor | NDArray[Any] | Sequence[Any], groups: Tensor | NDArray[Any] | Sequence[Any]
) -> Tensor:
    """bool tensor of the shape of ``rewards``: True for a finite score in a group with spread."""
    scores, ids = _as_tensors(rewards, groups)
    rows = [_usable(row, ids) for row in (scores if scores.ndim == 2 else scores[None])]
    return torch.stack(rows).reshape(scores.shape) if rows else torch.zeros(scores.shape, dtype=torch.bool)


def optimality(advantages: Tensor, clip: float) -> Tensor:
    """o = 1/2 + 1/2 clip(A / clip, -1, 1), in [0, 1]; ``clip`` is A_max (METHOD section 3)."""
    return 0.5 + 0.5 * (advantages / clip).clamp(-1.0, 1.0)


def _as_tensors(rewards: Any, groups: Any) -> tuple[Tensor, Tensor]:
    scores = torch.as_tensor(rewards).double()
    _, ids = torch.unique(torch.as_tensor(groups), return_inverse=True)
    if scores.ndim not in (1, 2) or ids.ndim != 1 or scores.shape[-1] != len(ids):
        raise ValueError(
            f"rewards (N,) or (R, N) and groups (N,) do not fit: {tuple(scores.shape)}, {tuple(ids.shape)}"
        )
    return scores, ids.to(scores.device)


def _row_advantages(scores: Tensor, ids: Tensor, scale: Scale) -> Tensor:
    usable = _usable(scores, ids)
    if not bool(usable.any()):
        return torch.zeros_like(scores)
    deviation, spread = _spread(scores, usable, ids)
    if scale == "global":
        return deviation / scores[torch.isfinite(scores)].std(correction=0)
    return torch.where(usable, deviation / torch.where(usable, spread[ids], 1.0), 0.0)


def _spread(scores: Tensor, usable: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Deviations from the group's mean (N,), 0 where not usable, and standard deviations by group (P,)."""
    kept = torch.where(usable, scores, 0.0)
    count = _sums(usable.double(), ids).clamp_min(1.0)
    deviation = torch.where(usable, scores - (_sums(kept, ids) / count)[ids], 0.0)
    return deviation, (_sums(deviation.square(), ids) / count).sqrt()


def _usable(scores: Tensor, ids: Tensor) -> Tensor:
    """Finite, and in a group whose finite scores differ by more than ``RELATIVE_NOISE``: (N,) bool."""
    finite = torch.isfinite(scores)
    size = int(ids.max()) + 1 if len(ids) else 0
    highest = scores.new_full((size,), -torch.inf).scatter_reduce(
        0, ids, torch.where(finite, scores, -torch.inf), "amax"
    )
    lowest = scores.new_full((size,), torch.inf).scatter_reduce(
        0, ids, torch.where(finite, scores, torch.inf), "amin"
    )
    magnitude = torch.maximum(highest.abs(), lowest.abs())
    alive = torch.isfinite(magnitude) & (highest - lowest > RELATIVE_NOISE * magnitude)
    return finite & alive[ids]


def _sums(values: Tensor, ids: Tensor) -> Tensor:
    return values.new_zeros(int(ids.max()) + 1).index_add(0, ids, values)
