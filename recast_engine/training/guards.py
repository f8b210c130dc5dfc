"""The collapse guard: does the objective rise at the cost of what it does not measure?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from recast_engine.config import CollapseGuardConfig
from recast_engine.errors import Collapsed
from recast_engine.training.retention import Kept

PIXEL_RANGE = 255.0


def group_diversity(images: NDArray[np.uint8]) -> float:
    """Root mean squared pixel difference over pairs of images (K, H, W, 3), in [0, 1] of the pixel range.

    The squared difference of two draws is twice the (unbiased) variance on average, so this is the square
    root of twice the pixels' mean variance within the group.
    """
    variance = (images.astype(np.float32) / PIXEL_RANGE).var(axis=0, ddof=1, dtype=np.float64)
    return float(np.sqrt(2.0 * variance.mean()))


@dataclass(frozen=True)
class Watch:
    """What the guard remembers between epochs.

    Attributes:
        diversity: mean diversity of the run's first epoch.
        held_out: (mean, standard deviation) of the held-out reward in the first epoch that had scores.
        doubts: doubted epochs in a row.
    """

    diversity: float | None = None
    held_out: tuple[float, float] | None = None
    doubts: int = 0


def watch_epoch(
    before: Watch,
    config: CollapseGuardConfig,
    *,
    objective: float,
    diversity: float,
    held_out: tuple[float, float] | None,
) -> tuple[Watch, list[str]]:
    """The guard after one more epoch, and what makes it doubt the epoch (nothing: all is well).

    Args:
        objective: of the epoch, 0 at the stage's start.
        diversity: mean over groups of ``group_diversity``.
        held_out: (mean, standard deviation) of the held-out reward; None: not watched, or no scores.
    """
    watch = replace(
        before,
        diversity=diversity if before.diversity is None else before.diversity,
        held_out=held_out if before.held_out is None else before.held_out,
    )
    reasons: list[str] = []
    if config.diversity is not None and watch.diversity:
        share = diversity / watch.diversity
        if share < config.diversity:
            reasons.append(f"images of one prompt differ by {share:.0%} of what they did at the start")
    if held_out is not None and watch.held_out is not None:
        fallen = watch.held_out[0] - held_out[0]
        if fallen > config.held_out_drop * watch.held_out[1]:
            reasons.append(
                f"held-out {config.held_out} fell from {watch.held_out[0]:.4g} to {held_out[0]:.4g}"
            )
    if objective <= 0:
        reasons = []
    return replace(watch, doubts=watch.doubts + 1 if reasons else 0), reasons


def collapsed(
    config: CollapseGuardConfig, reasons: Sequence[str], epoch: int, best: Kept | None
) -> Collapsed:
    """The error that pauses a training after ``epoch``; ``best``: the best checkpoint kept."""
    kept = "none was good" if best is None else f"{best.name} is the best kept"
    return Collapsed(
        f"paused after epoch {epoch}: for {config.epochs} epochs the objective was above its start while "
        f"{' and '.join(reasons)}; of the checkpoints {kept}. Resume to go on all the same, or train anew "
        "with a higher kl_weight or a lower learning_rate"
    )
