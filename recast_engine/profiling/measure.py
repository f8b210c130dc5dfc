"""Measures a profile with a model and its rewards: estimator (b) of METHOD section 4.

Loads torch; the rest of the package does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recast_engine.backbones.base import Backbone, Conditioning
from recast_engine.backbones.sampling import denoise_stochastic, initial_noise, sample
from recast_engine.config import EstimatorConfig, dump
from recast_engine.errors import ConfigError, RewardFailure
from recast_engine.observer import NullObserver, Observer, Stopped
from recast_engine.profiling.curves import curve_warnings, estimate_curve
from recast_engine.profiling.levels import noise_levels, rollout_steps
from recast_engine.profiling.profile import Curve, Profile
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import Scores

Array = NDArray[np.float64]
Role = Literal["clean", "noise", "rollout"]


class RewardScorer(Protocol):
    """R rewards applied together (``recast_engine.rewards.scoring.Scorer``)."""

    rewards: tuple[str, ...]

    def applicable(self, prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
        """(R, N) whether each prompt carries the metadata that each reward needs."""

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> Scores:
        """Scores of ``images`` (N, H, W, 3)."""


def image_seed(seed: int, role: Role, prompt: int, image: int, rollout: int = 0) -> int:
    """The 32-bit seed of one image's generator.

    The first word of numpy's ``SeedSequence([seed, role, prompt, image, rollout])``, role counted as clean 0,
    noise 1, rollout 2, and prompt the place in the prompt set: any image can be drawn again alone. All
    levels share their random numbers: each level's estimate keeps its distribution, while differences
    between levels, the gains, lose more than half of their noise (a Gaussian's, in the tests).
    """
    words = [seed, ("clean", "noise", "rollout").index(role), prompt, image, rollout]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def choose_prompts(
    prompts: Sequence[Prompt], applicable: NDArray[np.bool_], count: int, seed: int
) -> list[int]:
    """Places of ``count`` prompts (all, if there are fewer), drawn without replacement.

    Systematic sampling: prompts are shuffled, laid out kind by kind (same tag and same applicable rewards),
    and every N / count-th is taken from a random start. Each prompt is equally likely and each kind is drawn
    in proportion; a plain draw may leave a rare kind, and with it a reward, out by chance.

    Args:
        applicable: (R, N).
    """
    rng = np.random.default_rng(seed)
    kinds: dict[tuple[str | None, bytes], list[int]] = {}
    for place in rng.permutation(len(prompts)).tolist():
        kinds.setdefault((prompts[place].tag, applicable[:, place].tobytes()), []).append(place)
    laid_out = [place for members in kinds.values() for place in members]
    if count >= len(laid_out):
        return sorted(laid_out)
    stride = len(laid_out) / count
    start = rng.random() * stride
    return sorted(laid_out[int(start + index * stride)] for index in range(count))


def measure_profile(
    backbone: Backbone,
    scorer: RewardScorer,
    prompts: Sequence[Prompt],
    config: EstimatorConfig,
    *,
    seed: int,
    observer: Observer | None = None,
    batch_size: int = 64,
) -> Profile:
    """The current model's profile for all rewards of ``scorer``.

    Draws ``images_per_prompt`` clean images for each of ``prompts`` prompts, noises every one to the inner
    levels and denoises it again by ``rollouts`` stochastic rollouts; one rollout serves all rewards. Level 0
    costs nothing (the rollout is the image itself), nor does level 1 (D = 0). Rewards that do not apply to a
    prompt are left out for it; failed scores are masked pairwise.

    Args:
        observer: hears the phase "profiling", counted in images.
        batch_size: images in one forward pass.

    Raises:
        ConfigError: a reward applies to none of the prompts.
        RewardFailure: a reward failed so often that nothing is left of it.
        Stopped: the observer asked to stop.
    """
    applicable = scorer.applicable(prompts)
    places = choose_prompts(prompts, applicable, config.prompts, seed)
    for reward, row in zip(scorer.rewards, applicable, strict=True):
        if not row[places].any():
            raise ConfigError(
                f"reward {reward!r} applies to none of the {len(places)} prompts drawn and to {row.sum()} of "
                f"the {len(prompts)} in the set: it needs metadata that they lack"
            )
    measurement = _Measurement(backbone, scorer, prompts, places, config, seed, batch_size)
    measurement.run(observer or NullObserver())
    curves: dict[str, Curve] = {}
    warnings: list[str] = []
    if len(places) < config.prompts:
        warnings.append(f"only {len(places)} prompts are available, {config.prompts} were asked for")
    for index, reward in enumerate(scorer.rewards):
        curves[reward], texts = _curve(measurement, index, config, seed)
        warnings += texts
    settings = dump(config) | {"seed": seed, "prompts": len(places)}
    cost = dict(measurement.cost)
    return Profile(scorer.rewards, measurement.levels, curves, tuple(warnings), cost, settings)


class _Measurement:
    """Scores of clean images and rollouts, gathered batch by batch.

    Attributes:
        clean: (R, P, K); rollouts: (R, L - 2, P, K, M); NaN where there is no score.
        failed: (R,) scores that were due and did not come.
        cost: as ``Profile.cost``.
    """

    def __init__(
        self,
        backbone: Backbone,
        scorer: RewardScorer,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        config: EstimatorConfig,
        seed: int,
        batch_size: int,
    ):
        self.backbone, self.scorer, self.config = backbone, scorer, config
        self.prompts, self.places, self.seed, self.batch_size = prompts, places, seed, batch_size
        self.levels = noise_levels(config.levels)
        shape = (len(places), config.images_per_prompt)
        self.clean = np.full((len(scorer.rewards), *shape), np.nan)
        inner = (len(scorer.rewards), config.levels - 2, *shape, config.rollouts)
        self.rollouts = np.full(inner, np.nan)
        self.failed = np.zeros(len(scorer.rewards), dtype=np.int64)
        self.cost: dict[str, float] = dict.fromkeys(
            ("model_evaluations", "reward_calls", "proposal_images"), 0
        )
        self.cost["device_seconds"] = 0.0

    def run(self, observer: Observer) -> None:
        """Measure everything. Raises Stopped when the observer asks for it."""
        images = self.clean[0].size
        observer.phase("profiling", images * (1 + self.rollouts[0, :, 0, 0].size))
        done = 0
        for batch in self._batches():
            for count in self._batch(batch, observer):
                done += count
                observer.advance(done)
                if observer.should_stop():
                    raise Stopped

    def _batches(self) -> Iterator[list[tuple[int, int]]]:
        """(prompt, image) pairs, ``batch_size`` at a time."""
        pairs = list(np.ndindex(*self.clean.shape[1:]))
        for start in range(0, len(pairs), self.batch_size):
            yield pairs[start : start + self.batch_size]

    def _batch(self, batch: list[tuple[int, int]], observer: Observer) -> Iterator[int]:
        """Draw, noise, roll out and score one batch; yields the number of images after each step."""
        rows, columns = (list(part) for part in zip(*batch, strict=True))
        with self._paid(observer):
            conditioning = self._encode(rows)
            latents = sample(
                self.backbone, conditioning, self._seeds("clean", batch), steps=self.config.sampling_steps
            )
            self.clean[:, rows, columns] = self._score(latents, rows)
        yield len(batch)
        noise = initial_noise(self.backbone, self._seeds("noise", batch)).float()
        for level, sigma in enumerate(self.levels[1:-1]):
            noised = (1.0 - sigma) * latents.float() + sigma * noise
            for rollout in range(self.config.rollouts):
                with self._paid(observer):
                    denoised = denoise_stochastic(
                        self.backbone,
                        noised,
                        sigma,
                        conditioning,
                        self._seeds("rollout", batch, rollout),
                        steps=rollout_steps(sigma, self.config.sampling_steps),
                    )
                    self.rollouts[:, level, rows, columns, rollout] = self._score(denoised, rows)
                yield len(batch)

    def _encode(self, rows: Sequence[int]) -> Conditioning:
        distinct = sorted(set(rows))
        encoded = self.backbone.encode_prompts([self._prompt(row).prompt for row in distinct])
        return encoded.select([distinct.index(row) for row in rows])

    def _prompt(self, row: int) -> Prompt:
        return self.prompts[self.places[row]]

    def _seeds(self, role: Role, batch: Sequence[tuple[int, int]], rollout: int = 0) -> list[int]:
        return [image_seed(self.seed, role, self.places[row], image, rollout) for row, image in batch]

    def _score(self, latents: Tensor, rows: Sequence[int]) -> Array:
        """(R, N) scores, NaN where a reward does not apply or failed."""
        scores = self.scorer(self.backbone.decode(latents), [self._prompt(row) for row in rows])
        self.failed += scores.failed.sum(axis=1)
        self.cost["reward_calls"] += int(scores.applicable.sum())
        return np.where(scores.applicable & np.isfinite(scores.values), scores.values, np.nan)

    @contextmanager
    def _paid(self, observer: Observer) -> Iterator[None]:
        """Adds what the block costs to ``cost`` and tells the observer."""
        start, before = time.perf_counter(), self.backbone.evaluations
        calls = self.cost["reward_calls"]
        yield
        seconds, evaluations = time.perf_counter() - start, self.backbone.evaluations - before
        self.cost["device_seconds"] += seconds
        self.cost["model_evaluations"] += evaluations
        observer.cost(
            model_evaluations=evaluations,
            reward_calls=int(self.cost["reward_calls"] - calls),
            device_seconds=seconds,
        )


def _curve(
    measurement: _Measurement, index: int, config: EstimatorConfig, seed: int
) -> tuple[Curve, list[str]]:
    """The curve of reward number ``index`` and its warnings."""
    reward = measurement.scorer.rewards[index]
    try:
        curve = estimate_curve(
            measurement.clean[index],
            measurement.rollouts[index],
            alpha=config.alpha,
            advantage_clip=config.advantage_clip,
            rng=np.random.default_rng(seed),
        )
    except RewardFailure as error:
        failed = int(measurement.failed[index])
        raise RewardFailure(f"reward {reward!r}: {error} ({failed} scores failed)") from None
    texts = curve_warnings(reward, curve)
    if measurement.failed[index]:
        texts.append(f"{reward}: {measurement.failed[index]} scores failed and were left out")
    return curve, texts
