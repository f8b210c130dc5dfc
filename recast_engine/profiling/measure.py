"""Measures what a plan asks for, with a model and its rewards (METHOD section 4).

Loads torch; the rest of the package does not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_engine.backbones.base import Backbone, Conditioning
from recast_engine.backbones.sampling import denoise_stochastic, initial_noise, sample
from recast_engine.config import EstimatorConfig
from recast_engine.errors import ConfigError
from recast_engine.observer import NullObserver, Observer, Stopped
from recast_engine.profiling.assembly import profile_from_scores
from recast_engine.profiling.levels import rollout_steps
from recast_engine.profiling.plan import Plan, Role, Work, image_seed
from recast_engine.profiling.profile import Profile
from recast_engine.profiling.scores import COSTS, ScoreTable
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Scores

Array = NDArray[np.float64]
Item = TypeVar("Item")

BATCH_IMAGES = 64
"""Images in one forward pass."""

GROUPS_ENCODED = 16
"""Prompt groups whose prompts are encoded together."""

ROLLOUTS_AT_ONCE = 8
"""Forward passes' worth of rollouts that are under way or waiting at once, which bounds memory."""


class RewardScorer(Protocol):
    """R rewards applied together (``recast_engine.rewards.scoring.Scorer``)."""

    rewards: tuple[str, ...]

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        """(R, N) whether each prompt carries the metadata that each reward needs."""

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        """Scores of ``images`` (N, H, W, 3)."""


class ProposalImages(Protocol):
    """An external proposal's images (``recast_engine.proposals.collection.Proposals``)."""

    @property
    def bought(self) -> int:
        """Images that were paid for to have these."""

    def images(self, prompt: Prompt) -> NDArray[np.uint8]:
        """uint8 (n, H, W, 3) of the model's resolution: as many as the plan wants, or none."""


def measure_profile(
    backbone: Backbone,
    scorer: RewardScorer,
    prompts: Sequence[Prompt],
    config: EstimatorConfig,
    *,
    seed: int,
    observer: Observer | None = None,
    proposals: ProposalImages | None = None,
    batch_size: int = BATCH_IMAGES,
) -> Profile:
    """The current model's profile for all rewards of ``scorer``: every round of its plan, one after another.

    Args:
        observer: hears the phase "profiling", counted in images, in every round.
        proposals: images of every prompt drawn, for ``external_proposal``.
        batch_size: images in one forward pass.

    Raises:
        ConfigError: a reward applies to none of the prompts.
        RewardFailure: a reward failed so often that nothing is left of it.
        Stopped: the observer asked to stop.
    """
    plan = Plan.of(config, scorer.rewards, prompts, seed, applicable=scorer.applicable(prompts))
    table = plan.empty()
    while (work := plan.next(table)) is not None:
        measured = measure_work(
            backbone,
            scorer,
            prompts,
            plan,
            work,
            observer=observer,
            proposals=proposals,
            batch_size=batch_size,
        )
        table = ScoreTable.merge([table, measured])
    return profile_from_scores(plan, table)


def measure_work(
    backbone: Backbone,
    scorer: RewardScorer,
    prompts: Sequence[Prompt],
    plan: Plan,
    work: Work,
    *,
    observer: Observer | None = None,
    proposals: ProposalImages | None = None,
    batch_size: int = BATCH_IMAGES,
) -> ScoreTable:
    """Scores of the clean images of ``work`` and of their rollouts, NaN everywhere else.

    Draws the clean images, noises every one to each level that is asked for and denoises it again by
    stochastic rollouts; one rollout serves all rewards. Level 0 costs nothing: the rollout is the image
    itself. Rewards that do not apply to a prompt are left out for it; failed scores are NaN.

    Every batch lies within one of the plan's prompt groups, so the same image is drawn and scored in the
    same company whichever part of the round it is measured in: the same bits on the same kind of device.

    Args:
        prompts: the set that the plan was made for.
        observer: hears the phase "profiling", counted in images.
        proposals: images of the work's prompts, from which the rollouts then start; a prompt without any is
            left out.
        batch_size: images in one forward pass.

    Raises:
        ConfigError: the plan needs proposals and there are none.
        Stopped: the observer asked to stop.
    """
    if work.external and proposals is None:
        raise ConfigError("proposals: an external proposal's images are needed and were not given")
    measurement = _Measurement(backbone, scorer, prompts, plan, work, observer or NullObserver(), batch_size)
    if work.external and proposals is not None:
        measurement.cost["proposal_images"] = proposals.bought
    return measurement.run(proposals if work.external else None)


class _Measurement:
    """One work under way: the table being filled, and what it costs."""

    def __init__(
        self,
        backbone: Backbone,
        scorer: RewardScorer,
        prompts: Sequence[Prompt],
        plan: Plan,
        work: Work,
        observer: Observer,
        batch_size: int,
    ):
        self.backbone, self.scorer, self.prompts = backbone, scorer, prompts
        self.plan, self.work, self.observer, self.batch_size = plan, work, observer, batch_size
        self.cost: dict[str, float] = dict.fromkeys(COSTS, 0)
        table = plan.table(work.columns[1], max(work.rollouts), rounds=work.round + 1)
        self.clean, self.rollouts, self.failed = table.clean, table.rollouts, table.failed
        self.proposals = table.proposals

    def run(self, proposals: ProposalImages | None) -> ScoreTable:
        """Measure everything. Raises Stopped when the observer asks for it."""
        self.observer.phase("profiling", self.work.images)
        done, groups = 0, self.plan.groups(self.work)
        for block in _batches(groups, GROUPS_ENCODED):
            with self._paid():  # together, and kept: the text encoders are wanted once for all of them
                self._encode([row for rows in block for row in rows])
            for count in itertools.chain.from_iterable(self._group(rows, proposals) for rows in block):
                done += count
                self.observer.advance(done)
                if self.observer.should_stop():
                    raise Stopped
        return ScoreTable(
            self.clean, self.rollouts, self.proposals, self.failed, self.work.round + 1, self.cost
        )

    def _group(self, rows: Sequence[int], proposals: ProposalImages | None) -> Iterator[int]:
        """Measure one prompt group; yields the number of images scored after each step."""
        conditioning = self._encode(rows)
        images = list(itertools.product(range(len(rows)), range(*self.work.columns)))
        parts: list[Tensor] = []
        for batch in _batches(images, self.batch_size):
            with self._paid():
                latents = sample(
                    self.backbone,
                    conditioning.select([place for place, _ in batch]),
                    self._seeds("clean", rows, batch),
                    steps=self.plan.estimator.sampling_steps,
                )
                self._record(self.clean, latents, rows, batch)
            parts.append(latents.float())
            yield len(batch)
        if proposals is not None:
            images, parts = [], []
            for place, row in enumerate(rows):
                with self._paid():
                    drawn, latents = self._proposed(place, proposals.images(self._prompt(row)))
                    if drawn:
                        self._record(self.proposals, latents, rows, drawn)
                        parts.append(latents.float())
                images += drawn
                yield len(drawn)
        if images:
            noise = initial_noise(self.backbone, self._seeds("noise", rows, images)).float()
            yield from self._rollouts(rows, images, torch.cat(parts), noise, conditioning)

    def _proposed(self, place: int, pixels: NDArray[np.uint8]) -> tuple[list[tuple[int, int]], Tensor]:
        """The images of the work among a prompt's proposals, and their latents."""
        columns = range(*self.work.columns)
        if len(pixels) not in (0, columns.stop):
            raise ConfigError(f"proposals: {columns.stop} images of a prompt are needed, got {len(pixels)}")
        if len(pixels) == 0:
            return [], torch.empty(0)
        return [(place, column) for column in columns], self.backbone.encode_images(pixels[columns.start :])

    def _record(
        self, scores: Array, latents: Tensor, rows: Sequence[int], images: Sequence[tuple[int, int]]
    ) -> None:
        """Score ``latents`` of ``images`` and note it in ``scores`` (R, P, K)."""
        at = [rows[place] for place, _ in images]
        scores[:, at, [column for _, column in images]] = self._score(latents, at)

    def _rollouts(
        self,
        rows: Sequence[int],
        images: Sequence[tuple[int, int]],
        latents: Tensor,
        noise: Tensor,
        conditioning: Conditioning,
    ) -> Iterator[int]:
        """Rollouts of ``images`` from every level, batched over levels, prompts and images."""
        wanted = [
            (level, place, rollout)
            for level, count in enumerate(self.work.rollouts)
            for place in range(len(images))
            for rollout in range(count)
        ]
        for chunk in _batches(wanted, ROLLOUTS_AT_ONCE * self.batch_size):
            with self._paid():
                denoised = self._denoise(rows, images, chunk, latents, noise, conditioning)
            for batch in _batches(range(len(chunk)), self.batch_size):
                levels, places, numbers = (
                    list(part) for part in zip(*(chunk[k] for k in batch), strict=True)
                )
                at = [rows[images[place][0]] for place in places]
                with self._paid():
                    columns = [images[place][1] for place in places]
                    scores = self._score(denoised[list(batch)], at)
                    self.rollouts[:, levels, at, columns, numbers] = scores
                yield len(batch)

    def _denoise(
        self,
        rows: Sequence[int],
        images: Sequence[tuple[int, int]],
        chunk: Sequence[tuple[int, int, int]],
        latents: Tensor,
        noise: Tensor,
        conditioning: Conditioning,
    ) -> Tensor:
        sigmas = [self.plan.levels[1 + level] for level, _, _ in chunk]
        places = [place for _, place, _ in chunk]
        column = torch.tensor(sigmas, device=latents.device).reshape(-1, *(1 for _ in latents.shape[1:]))
        return denoise_stochastic(
            self.backbone,
            (1.0 - column) * latents[places] + column * noise[places],
            sigmas,
            conditioning,
            [self._seeds("rollout", rows, [images[place]], rollout)[0] for _, place, rollout in chunk],
            steps=[rollout_steps(sigma, self.plan.estimator.sampling_steps) for sigma in sigmas],
            prompts=[images[place][0] for place in places],
            batch_size=self.batch_size,
        )

    def _encode(self, rows: Sequence[int]) -> Conditioning:
        """One row per prompt; a neighbour does not change its last bits."""
        return self.backbone.encode_prompts([self._prompt(row).prompt for row in rows])

    def _prompt(self, row: int) -> Prompt:
        return self.prompts[self.plan.places[row]]

    def _seeds(
        self, role: Role, rows: Sequence[int], images: Sequence[tuple[int, int]], rollout: int = 0
    ) -> list[int]:
        """Seeds of ``images``, each (place in ``rows``, number)."""
        plan = self.plan
        return [image_seed(plan.seed, role, plan.places[rows[k]], image, rollout) for k, image in images]

    def _score(self, latents: Tensor, rows: Sequence[int]) -> Array:
        """(R, N) scores, NaN where a reward does not apply or failed."""
        scores = self.scorer(self.backbone.decode(latents), [self._prompt(row) for row in rows])
        self.failed += scores.failed.sum(axis=1)
        self.cost["reward_calls"] += int(scores.applicable.sum())
        return np.where(scores.applicable & np.isfinite(scores.values), scores.values, np.nan)

    @contextmanager
    def _paid(self) -> Iterator[None]:
        """Adds what the block costs to ``cost`` and tells the observer."""
        start, before = time.perf_counter(), self.backbone.evaluations
        calls = self.cost["reward_calls"]
        yield
        seconds, evaluations = time.perf_counter() - start, self.backbone.evaluations - before
        self.cost["device_seconds"] += seconds
        self.cost["model_evaluations"] += evaluations
        self.observer.cost(
            model_evaluations=evaluations,
            reward_calls=int(self.cost["reward_calls"] - calls),
            device_seconds=seconds,
        )


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
