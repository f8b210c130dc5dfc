"""What each subject draws: the same prompts with the same seeds, scored, with a few images kept to show."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast_engine.backbones.base import Backbone
from recast_engine.backbones.sampling import sample
from recast_engine.config import EvaluationConfig
from recast_engine.observer import Observer, Stopped
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Scores
from recast_engine.rewards.scoring import Scorer as InlineScorer
from recast_engine.rewards.service import ScoringService, begin

Scorer = InlineScorer | ScoringService
Images = NDArray[np.uint8]
Floats = NDArray[np.float64]

BATCH = 32
"""Images sampled and decoded at once."""
AHEAD = 2
"""Groups that may wait for their scores while the next one is drawn."""
GRID_PROMPTS = 8
GRID_IMAGES = 4
SEED_RULE = "numpy.random.SeedSequence((seed, prompt_index, image_index)).generate_state(1)[0] >> 1"
"""How the generator of an image is seeded: ``prompt_index`` counts the whole prompt set from 0 and
``image_index`` the images of one prompt and seed from 0."""


def image_seed(seed: int, prompt_index: int, image_index: int) -> int:
    """The seed of one image, by ``SEED_RULE``; below 2**31."""
    return int(np.random.SeedSequence((seed, prompt_index, image_index)).generate_state(1)[0]) >> 1


def spread_evenly(total: int, wanted: int) -> list[int]:
    """``min(total, wanted)`` indices below ``total``, evenly spaced, the first one 0."""
    wanted = min(total, wanted)
    return [index * total // wanted for index in range(wanted)]


@dataclass(frozen=True)
class Plan:
    """P prompts with K image seeds each, the same for every subject.

    Attributes:
        indices: positions of the prompts in the prompt set.
        seeds: (P, K); seed by seed, within a seed image by image.
        shown: rows (of P) whose first images are kept for the sample grids.
    """

    prompts: tuple[Prompt, ...]
    indices: tuple[int, ...]
    seeds: NDArray[np.int64]
    shown: tuple[int, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], config: EvaluationConfig) -> Plan:
        """Prompts taken evenly from the set when ``max_prompts`` cuts it."""
        indices = spread_evenly(len(prompts), config.max_prompts or len(prompts))
        draws = [(seed, image) for seed in config.seeds for image in range(config.images_per_prompt)]
        seeds = [[image_seed(seed, index, image) for seed, image in draws] for index in indices]
        shown = spread_evenly(len(indices), GRID_PROMPTS)
        chosen = tuple(prompts[index] for index in indices)
        return cls(chosen, tuple(indices), np.array(seeds, dtype=np.int64), tuple(shown))

    @property
    def images(self) -> int:
        return len(self.prompts) * int(self.seeds.shape[1])

    @property
    def columns(self) -> int:
        """Images of a prompt in a sample grid."""
        return min(GRID_IMAGES, int(self.seeds.shape[1]))


@dataclass(frozen=True)
class Drawn:
    """One subject's images, reduced to what the comparison needs.

    Attributes:
        scores: (R, P, K), NaN where a reward does not apply or failed.
        failed: (R, P, K) True where it applied and failed.
        diversity: (P,) root mean squared pixel difference over pairs of images of one prompt, in [0, 1] of
            the pixel range; NaN with one image a prompt.
        shown: (rows, columns, H, W, 3), the images of the sample grid.
        reward_calls: images scored, summed over rewards.
        seconds: wall time of drawing and scoring, which go on side by side.
    """

    scores: Floats
    failed: NDArray[np.bool_]
    diversity: Floats
    shown: Images
    reward_calls: int
    seconds: float


def pairwise_distance(images: Images) -> float:
    """Root mean squared pixel difference over pairs of images (K, H, W, 3), in [0, 1]; NaN for one image.

    The mean over pairs of (a - b)^2 is twice the unbiased variance, so no pair is ever formed.
    """
    if len(images) < 2:
        return float("nan")
    variance = (images.astype(np.float32) / 255).var(axis=0, ddof=1, dtype=np.float64)
    return float(np.sqrt(2 * variance.mean()))


def draw(
    backbone: Backbone, scorer: Scorer, plan: Plan, steps: int, *, observer: Observer, done: int
) -> Drawn:
    """Draw and score the plan's images with whatever adapter is active on ``backbone``.

    Args:
        done: images of the phase that earlier subjects have finished.

    Raises:
        Stopped: the observer asked to stop, between groups of prompts.
    """
    tally = _Tally(scorer, plan, observer, done)
    group = max(1, BATCH // tally.per_prompt)
    for first in range(0, len(plan.prompts), group):
        rows = range(first, min(first + group, len(plan.prompts)))
        tally.add(rows, *_draw_group(backbone, plan, rows, steps, observer))
    return tally.finish()


class _Tally:
    """What becomes of a subject's images: scores as they arrive, diversity, the images shown, the cost."""

    def __init__(self, scorer: Scorer, plan: Plan, observer: Observer, done: int):
        self.plan, self.scorer, self.observer, self.done = plan, scorer, observer, done
        prompt_count, self.per_prompt = plan.seeds.shape
        self.scores = np.full((len(scorer.rewards), prompt_count, self.per_prompt), np.nan)
        self.failed = np.zeros(self.scores.shape, dtype=bool)
        self.diversity = np.full(prompt_count, np.nan)
        self.shown: list[Images] = []
        self.calls, self.seconds, self.used = 0, 0.0, 0
        self.clock = time.perf_counter()
        self.waiting: deque[tuple[range, Callable[[], Scores]]] = deque()

    def add(self, rows: range, images: Images, used: int) -> None:
        """Take the images (len(rows) * K, H, W, 3) of prompts ``rows``, which took ``used`` evaluations."""
        plan = self.plan
        prompts = [plan.prompts[row] for row in rows for _ in range(self.per_prompt)]
        self.waiting.append((rows, begin(self.scorer, images, prompts)))
        by_prompt = images.reshape(len(rows), self.per_prompt, *images.shape[1:])
        self.diversity[rows] = [pairwise_distance(own) for own in by_prompt]
        self.shown += [by_prompt[row - rows.start, : plan.columns] for row in rows if row in plan.shown]
        self.used += used
        while len(self.waiting) > AHEAD:
            self._collect()

    def finish(self) -> Drawn:
        """Wait for the last scores."""
        while self.waiting:
            self._collect()
        shown = np.stack(self.shown)
        return Drawn(self.scores, self.failed, self.diversity, shown, self.calls, self.seconds)

    def _collect(self) -> None:
        rows, scores = self.waiting.popleft()
        batch = scores()
        self.scores[:, rows] = batch.values.reshape(-1, len(rows), self.per_prompt)
        self.failed[:, rows] = batch.failed.reshape(-1, len(rows), self.per_prompt)
        now, scored = time.perf_counter(), int(batch.applicable.sum())
        self.observer.cost(model_evaluations=self.used, reward_calls=scored, device_seconds=now - self.clock)
        self.calls, self.seconds = self.calls + scored, self.seconds + now - self.clock
        self.used, self.clock = 0, now
        self.observer.advance(self.done + rows.stop * self.per_prompt)


def _draw_group(
    backbone: Backbone, plan: Plan, rows: range, steps: int, observer: Observer
) -> tuple[Images, int]:
    """Images (len(rows) * K, H, W, 3) of the prompts ``rows``, and the model evaluations they took."""
    per_prompt = plan.seeds.shape[1]
    conditioning = backbone.encode_prompts([plan.prompts[row].prompt for row in rows])
    seeds = plan.seeds[rows.start : rows.stop].reshape(-1).tolist()
    before = backbone.evaluations
    parts = []
    for start in range(0, len(seeds), BATCH):
        if observer.should_stop():
            raise Stopped
        batch = seeds[start : start + BATCH]
        owners = [(start + offset) // per_prompt for offset in range(len(batch))]
        latents = sample(
            backbone, conditioning.select(owners), batch, steps=steps, solver="euler", batch_size=BATCH
        )
        parts.append(backbone.decode(latents))
    return np.concatenate(parts), backbone.evaluations - before


def save_grid(drawn: Drawn, plan: Plan, steps: int, path: Path) -> Mapping[str, Any]:
    """Write the kept images as a PNG grid without padding, a prompt a row; returns the grid's metadata."""
    rows, columns, height, width, _ = drawn.shown.shape
    grid = drawn.shown.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, 3)
    Image.fromarray(grid).save(path)
    return {
        "steps": steps,
        "solver": "euler",
        "cell": [width, height],
        "columns": columns,
        "images": [
            {"prompt": plan.prompts[row].prompt, "seed": int(plan.seeds[row, column])}
            for row in plan.shown
            for column in range(columns)
        ],
    }
