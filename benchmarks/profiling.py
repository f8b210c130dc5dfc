"""Model evaluations until an allocation is right: this project's profile against the published scheme.

    python benchmarks/profiling.py pool DENSE --dense                  raw scores of the miniature, kept
    python benchmarks/profiling.py pool EXTERNAL --dense --proposals --seed 2000
    python benchmarks/profiling.py pool OURS --steps 10 --seed 1
    python benchmarks/profiling.py report DENSE EXTERNAL OURS

A pool is measured once, subsampled afterwards, and goes on where it stopped. DENSE holds all 25 levels of a
25-step sampler with 25-step sampling, as the published scheme measures and as the long-run truth needs: per
image about 360 model evaluations and 26 scored images (2 to 6 s of one core). OURS is this project's way: 9
levels and 10-step sampling, 66 evaluations and 9 scored images. EXTERNAL is the published scheme proper: its
rollouts start from an external generator's images, here the renderer that the miniature learnt from, which
draws every prompt faultlessly.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from recast_engine import miniature
from recast_engine.allocation import allocate
from recast_engine.backbones.catalogue import flow_sigmas
from recast_engine.backbones.load import load_backbone
from recast_engine.config import Cleanup, EstimatorConfig
from recast_engine.miniature.world import parse, render
from recast_engine.profiling import Curve
from recast_engine.profiling.curves import estimate_curve, estimate_proposal_curve
from recast_engine.profiling.levels import noise_levels, rollout_steps
from recast_engine.profiling.measure import measure_work
from recast_engine.profiling.plan import Plan, Work
from recast_engine.profiling.scores import ScoreTable
from recast_engine.prompts import Prompt, parse_prompts
from recast_engine.rewards.scoring import load_scorer

Array = NDArray[np.float64]

REWARDS = ("clipscore", "hpsv2", "pickscore", "geneval", "ocr")
WANTED = 0.05
SPLITS = 10
DENSE_STEPS, SHORT_STEPS = 25, 10


def training_prompts() -> list[Prompt]:
    """The miniature's own."""
    return parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))


class Renderer:
    """The miniature's own world as an external generator: the same prompt and number, the same image."""

    bought = 0

    def __init__(self, images: int):
        self.count = images

    def images(self, prompt: Prompt) -> NDArray[np.uint8]:
        """uint8 (count, H, W, 3)."""
        scene = parse(prompt.prompt)
        drawn = (render(scene, random.Random(f"{prompt.prompt}/{number}")) for number in range(self.count))
        return np.stack([np.asarray(image, dtype=np.uint8) for image in drawn])


def pool(arguments: argparse.Namespace) -> None:
    """Measure one image of every prompt after another and keep the raw scores; goes on where it stopped."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    prompts = training_prompts()
    levels = flow_sigmas(arguments.steps, 1.0)[::-1] if arguments.dense else noise_levels(arguments.levels)
    estimator = EstimatorConfig(
        prompts=len(prompts), images_per_prompt=2, sampling_steps=arguments.steps, rollouts=arguments.rollouts
    )
    plan = Plan.of(estimator, REWARDS, prompts, arguments.seed, levels=levels)
    backbone, scorer = load_backbone("miniature"), load_scorer(REWARDS, "miniature")
    counts = (arguments.rollouts,) * (len(levels) - 1)
    for image in range(arguments.images):
        columns = (image, image + 1)
        whole = Work(0, 0, tuple(range(len(prompts))), columns, counts, external=arguments.proposals)
        for part in plan.split(whole, len(prompts)):
            path = arguments.folder / f"image{image:03}-part{part.shard:03}.safetensors"
            if not path.exists():
                proposals = Renderer(image + 1)
                measure_work(backbone, scorer, prompts, plan, part, proposals=proposals).save(path)
                print(path.name, flush=True)


def load_pool(folder: Path) -> ScoreTable:
    """All that ``pool`` has measured so far."""
    return ScoreTable.merge([ScoreTable.load(path) for path in sorted(folder.glob("*.safetensors"))])


@dataclass(frozen=True)
class Scheme:
    """A way from the scores of some prompts to an allocation.

    Attributes:
        levels: all levels of ``table``.
        keep: places of those that are used, both ends among them.
        sampling_steps: of the sampler that draws the images; None: as many as the allocation has steps, at
            whose noise levels it measures too.
    """

    name: str
    table: ScoreTable
    levels: Array
    keep: NDArray[np.int_]
    cleanup: Cleanup | None = "smooth"
    anchor: bool = False
    external: bool = False
    sampling_steps: int | None = SHORT_STEPS

    def curves(self, rows: Array) -> list[Curve]:
        """One of every reward, from the prompts ``rows``."""
        return [self._curve(reward, rows) for reward in range(len(REWARDS))]

    def _curve(self, reward: int, rows: Array) -> Curve:
        clean, drawn = self.table.clean[reward, rows], self.table.rollouts[reward][:, rows]
        start = [self.table.proposals[reward, rows]] if self.external else []
        estimate = estimate_proposal_curve if self.external else estimate_curve
        return estimate(
            clean,
            *start,
            drawn[self.keep[1:-1] - 1],
            levels=tuple(self.levels[self.keep]),
            alpha=2.0,
            advantage_clip=5.0,
            rng=np.random.default_rng(0),
            anchor=drawn[-1] if self.anchor else None,
            cleanup=self.cleanup or "isotonic",
        )

    def allocation(self, rows: Array, steps: int) -> Array:
        """W with equal budgets and tau = 1, (R, T); raw differences that are negative count as none."""
        curves = self.curves(rows)
        values = np.array([c.divergence if self.cleanup else c.divergence_raw for c in curves])
        levels, wanted = self.levels[self.keep], flow_sigmas(steps, 1.0)
        if self.sampling_steps is None:  # it has these very levels; for other T, read off between them
            dense = np.array([np.interp(wanted, levels, curve) for curve in values])
        else:
            dense = PchipInterpolator(levels, values, axis=1)(wanted)
        gains = np.maximum(np.diff(dense, axis=1), 0.0)
        return allocate(gains, np.full(len(gains), 1 / len(gains))).matrix

    def evaluations_per_image(self, steps: int) -> int:
        """Velocities for one image and its rollouts; for one proposal, with the model's own image for Z."""
        if self.sampling_steps is None:
            return steps + sum(rollout_steps(sigma, steps) for sigma in flow_sigmas(steps, 1.0)[1:-1])
        inner = sum(rollout_steps(self.levels[k], self.sampling_steps) for k in self.keep[1:-1])
        return self.sampling_steps * (1 + self.anchor) + inner

    @property
    def images(self) -> int:
        """Images in the table."""
        return int(np.isfinite(self.table.clean[0]).sum())


def spread(scheme: Scheme, steps: int) -> float:
    """Mean absolute error of an allocation from half the pool about the scheme's own limit.

    Of two allocations from disjoint halves; the error of one is their mean absolute difference / sqrt(2),
    whatever the limit.
    """
    rng = np.random.default_rng(0)
    prompts = scheme.table.clean.shape[1]
    errors = []
    for _ in range(SPLITS):
        order = rng.permutation(prompts)
        halves = (np.sort(order[: prompts // 2]), np.sort(order[prompts // 2 :]))
        first, second = (scheme.allocation(rows, steps) for rows in halves)
        errors.append(np.abs(first - second).mean() / np.sqrt(2))
    return float(np.mean(errors))


def distance(scheme: Scheme, prompts: int, steps: int, truth: Array) -> float:
    """Mean absolute difference to ``truth`` of allocations from ``prompts`` random prompts."""
    rng = np.random.default_rng(1)
    everyone = scheme.table.clean.shape[1]
    found = []
    for _ in range(SPLITS):
        rows = np.sort(rng.permutation(everyone)[:prompts])
        found.append(np.abs(scheme.allocation(rows, steps) - truth).mean())
    return float(np.mean(found))


def report(arguments: argparse.Namespace) -> None:
    """Model evaluations until an allocation is within 0.05 of the truth.

    The error to the truth is taken as sqrt(bias^2 + spread^2), the spread falling as 1 / sqrt(images), and
    the bias as what is left of the distance between the limits once both sides' spread is taken off.
    """
    dense, external, few = (load_pool(path) for path in (arguments.dense, arguments.external, arguments.ours))
    fine = flow_sigmas(DENSE_STEPS, 1.0)[::-1]
    levels = np.array(noise_levels(few.rollouts.shape[1] + 1))
    schemes = _schemes(dense, external, few, fine, levels)
    truth_scheme = Scheme("truth", dense, fine, np.arange(len(fine)), sampling_steps=None)
    everyone = np.arange(dense.clean.shape[1])
    print(f"images: dense {truth_scheme.images}, external {schemes[2].images}, ours {schemes[-1].images}")
    print(
        f"{'scheme':<42}{'T':>3}{'own error':>11}{'bias':>7}{'evals/image':>12}{'for 0.05':>11}{'ratio':>7}"
        f"{'to own limit':>13}{'ratio':>7}{'  checked':>9}"
    )
    for steps in (10, 25, 50):
        truth = truth_scheme.allocation(everyone, steps)
        truth_error = spread(truth_scheme, steps) / np.sqrt(2)
        print(f"{'truth: 25 levels, smooth':<42}{steps:>3}{truth_error:>11.3f}")
        baseline: tuple[float, float] | None = None
        for scheme in schemes:
            half = spread(scheme, steps)
            price, images = scheme.evaluations_per_image(steps), scheme.images // 2
            apart = np.abs(scheme.allocation(everyone, steps) - truth).mean()
            bias = np.sqrt(max(apart**2 - half**2 / 2 - truth_error**2, 0.0))
            own = images * (half / WANTED) ** 2 * price
            needed = own / (1 - (bias / WANTED) ** 2) if bias < WANTED else np.inf
            baseline = baseline or (needed, own)
            prompts = round(needed / price / (scheme.images / len(everyone))) if np.isfinite(needed) else 0
            checked = distance(scheme, prompts, steps, truth) if 8 <= prompts <= len(everyone) else np.nan
            print(
                f"{scheme.name:<42}{steps:>3}{half / np.sqrt(2):>11.3f}{bias:>7.3f}{price:>12}{needed:>11.0f}"
                f"{baseline[0] / needed:>6.1f}x{own:>13.0f}{baseline[1] / own:>6.1f}x{checked:>9.3f}"
            )


def _schemes(
    dense: ScoreTable, external: ScoreTable, few: ScoreTable, fine: Array, levels: Array
) -> Sequence[Scheme]:
    all_fine, nine = np.arange(len(fine)), np.arange(len(levels))
    six = np.array([0, 2, 3, 4, 6, 8])
    return (
        Scheme("T levels, raw differences", dense, fine, all_fine, cleanup=None, sampling_steps=None),
        Scheme("T levels, isotonic", dense, fine, all_fine, cleanup="isotonic", sampling_steps=None),
        Scheme(
            "external, T levels, raw differences",
            external,
            fine,
            all_fine,
            cleanup=None,
            external=True,
            sampling_steps=None,
        ),
        Scheme("9 levels, isotonic", few, levels, nine, cleanup="isotonic"),
        Scheme("9 levels, smooth", few, levels, nine),
        Scheme("9 levels, smooth, anchor", few, levels, nine, anchor=True),
        Scheme("6 levels, smooth", few, levels, six),
        Scheme("5 levels, smooth", few, levels, nine[::2]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("pool", help="measure and keep raw scores of the miniature")
    command.add_argument("folder", type=Path)
    command.add_argument("--dense", action="store_true", help="all levels of a sampler of --steps steps")
    command.add_argument("--proposals", action="store_true", help="rollouts from the renderer's images")
    command.add_argument("--levels", type=int, default=9)
    command.add_argument("--steps", type=int, default=DENSE_STEPS)
    command.add_argument("--rollouts", type=int, default=1)
    command.add_argument("--images", type=int, default=4, help="of every training prompt")
    command.add_argument("--seed", type=int, default=1000)
    command.set_defaults(run=pool)
    command = commands.add_parser("report", help="model evaluations for an allocation, from three pools")
    for name in ("dense", "external", "ours"):
        command.add_argument(name, type=Path)
    command.set_defaults(run=report)
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
