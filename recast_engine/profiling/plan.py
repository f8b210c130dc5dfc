"""What a profile measures, in which order and in which batches; no torch, so it can be planned anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recast_engine.config import EstimatorConfig
from recast_engine.errors import ConfigError, InvalidArgument
from recast_engine.profiling.levels import noise_levels, rollout_steps
from recast_engine.profiling.scores import ScoreTable
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import reward_info

Role = Literal["clean", "noise", "rollout"]

MAX_ROUNDS = 100
"""Rounds of an adaptive profile without a budget."""

FEWEST_IMAGES = 2
"""Images that a prompt's covariance needs."""

GROUP_IMAGES = 32
"""Images of a prompt group: what is measured together by one worker, and never split."""


@dataclass(frozen=True)
class Work:
    """Clean images of some prompts, and rollouts of each from some levels.

    Attributes:
        round: place among the plan's rounds, from 0.
        shard: place among the parts of the round, from 0.
        rows: prompts, as places in ``Plan.places``.
        columns: (first, stop) numbers of each prompt's clean images.
        rollouts: (L - 1,) rollouts of every image from each level above 0; the last is pure noise.
        external: the rollouts are of as many proposals, scored too.
    """

    round: int
    shard: int
    rows: tuple[int, ...]
    columns: tuple[int, int]
    rollouts: tuple[int, ...]
    external: bool = False

    @property
    def clean_images(self) -> int:
        """Clean images drawn."""
        return len(self.rows) * (self.columns[1] - self.columns[0])

    @property
    def images(self) -> int:
        """Images drawn and scored, rollouts included: the unit of progress."""
        return self.clean_images * (1 + self.external + sum(self.rollouts))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; ``from_dict`` inverts it."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Work:
        """Read what ``to_dict`` wrote. Raises InvalidArgument when it is something else."""
        try:
            first, stop = data["columns"]
            return cls(
                int(data["round"]),
                int(data["shard"]),
                tuple(int(row) for row in data["rows"]),
                (int(first), int(stop)),
                tuple(int(count) for count in data["rollouts"]),
                bool(data["external"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"not the work of a profile: {error}") from None


@dataclass(frozen=True)
class Plan:
    """A profile's measurement, laid out.

    Attributes:
        estimator: its settings.
        rewards: ids, in row order of the scores.
        places: the prompts drawn, as places in the prompt set.
        levels: noise levels, ascending from 0 to 1.
        seed: of every random draw.
        warnings: texts for people, known before anything is measured.
    """

    estimator: EstimatorConfig
    rewards: tuple[str, ...]
    places: tuple[int, ...]
    levels: tuple[float, ...]
    seed: int
    warnings: tuple[str, ...] = field(default=())

    @classmethod
    def of(
        cls,
        estimator: EstimatorConfig,
        rewards: Sequence[str],
        prompts: Sequence[Prompt],
        seed: int,
        *,
        applicable: NDArray[np.bool_] | None = None,
        levels: Sequence[float] | None = None,
    ) -> Plan:
        """Draw the prompts and lay out the levels.

        Args:
            applicable: (R, N) whether each prompt carries what each reward needs; None: by the catalogue.
            levels: ascending from 0 to 1; None: ``noise_levels(estimator.levels)``.

        Raises:
            ConfigError: a reward applies to none of the prompts drawn.
        """
        if applicable is None:
            applicable = applicable_prompts(rewards, prompts)
        places = choose_prompts(prompts, applicable, estimator.prompts, seed)
        for reward, row in zip(rewards, applicable, strict=True):
            if not row[places].any():
                raise ConfigError(
                    f"reward {reward!r} applies to none of the {len(places)} prompts drawn and to "
                    f"{row.sum()} of the {len(prompts)} in the set: it needs metadata that they lack"
                )
        warnings: tuple[str, ...] = ()
        if len(places) < estimator.prompts:
            warnings = (f"only {len(places)} of the {estimator.prompts} prompts asked for are available",)
        levels = noise_levels(estimator.levels) if levels is None else tuple(levels)
        plan = cls(estimator, tuple(rewards), tuple(places), levels, seed, warnings)
        first = plan.next(plan.empty())
        if first is None or first.columns[1] < FEWEST_IMAGES:
            raise ConfigError(
                f"adaptive.max_model_evaluations: too few for {FEWEST_IMAGES} images of each of "
                f"{len(places)} prompts; raise it, or use fewer prompts, levels, rollouts or sampling steps"
            )
        return plan

    def prompts_of(self, prompts: Sequence[Prompt], work: Mapping[str, Any] | None) -> list[Prompt]:
        """The prompts drawn from the set ``prompts``; given a work as a dict, only those of its rows."""
        rows = range(len(self.places)) if work is None else Work.from_dict(work).rows
        return [prompts[self.places[row]] for row in rows]

    def empty(self) -> ScoreTable:
        """The table before the first round."""
        return self.table(0, 0)

    def table(self, images: int, rollouts: int, *, rounds: int = 0) -> ScoreTable:
        """An unmeasured table of ``images`` images a prompt and ``rollouts`` rollouts a level."""
        shape = (len(self.rewards), len(self.levels), len(self.places))
        return ScoreTable.empty(*shape, images, rollouts, rounds=rounds)

    def next(self, table: ScoreTable) -> Work | None:
        """What is to be measured after ``table``, or None when the profile is finished.

        It depends on the merged scores alone, so it is the same for one worker and for any number of shards.
        """
        if table.rounds == 0:
            rollouts = (self.estimator.rollouts,) * (len(self.levels) - 2)
            return self._round(table, (*rollouts, self.estimator.rollouts if self.estimator.anchor else 0))
        if self.estimator.adaptive is None or table.rounds >= MAX_ROUNDS:
            return None
        from recast_engine.profiling.adaptive import rollouts_wanted  # it reads plans itself

        wanted = rollouts_wanted(self, table)
        return None if wanted is None else self._round(table, wanted)

    def _round(self, table: ScoreTable, rollouts: tuple[int, ...]) -> Work | None:
        """The next images of every prompt: as many as the budget allows, None if that is none."""
        images = self.estimator.images_per_prompt
        adaptive = self.estimator.adaptive
        if adaptive is not None and adaptive.max_model_evaluations is not None:
            left = adaptive.max_model_evaluations - int(table.cost["model_evaluations"])
            images = min(images, left // (len(self.places) * self.evaluations_per_image(rollouts)))
        if images < 1:
            return None
        columns = (table.images, table.images + images)
        external = self.estimator.kind == "external_proposal"
        return Work(table.rounds, 0, tuple(range(len(self.places))), columns, rollouts, external)

    def groups(self, work: Work) -> list[tuple[int, ...]]:
        """``work.rows`` in the groups that are never split, so that batches never depend on the split."""
        size = max(1, GROUP_IMAGES // (work.columns[1] - work.columns[0]))
        kept = set(work.rows)
        groups = (range(start, start + size) for start in range(0, len(self.places), size))
        return [rows for group in groups if (rows := tuple(row for row in group if row in kept))]

    def split(self, work: Work, parts: int) -> list[Work]:
        """``work`` in at most ``parts`` of whole prompt groups, as even as they go."""
        groups = self.groups(work)
        parts = min(parts, len(groups))
        bounds = [len(groups) * part // parts for part in range(parts + 1)]
        return [
            replace(work, shard=part, rows=sum(groups[bounds[part] : bounds[part + 1]], ()))
            for part in range(parts)
        ]

    def model_evaluations(self, work: Work) -> int:
        """Velocities computed for ``work``."""
        return work.clean_images * self.evaluations_per_image(work.rollouts)

    def evaluations_per_image(self, rollouts: Sequence[int]) -> int:
        """Velocities for one clean image with ``rollouts`` (L - 1,) from the levels above 0."""
        steps = self.estimator.sampling_steps
        pairs = zip(self.levels[1:], rollouts, strict=True)
        return steps + sum(count * rollout_steps(sigma, steps) for sigma, count in pairs)


def applicable_prompts(rewards: Sequence[str], prompts: Sequence[Prompt]) -> NDArray[np.bool_]:
    """(R, N) whether each prompt carries the metadata that each reward of the catalogue needs."""
    needs = [reward_info(reward).needs_metadata for reward in rewards]
    rows = [[all(prompt.has(name) for name in names) for prompt in prompts] for names in needs]
    return np.array(rows, dtype=bool).reshape(len(rewards), len(prompts))


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
