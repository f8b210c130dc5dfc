"""What a profile costs and how far to trust it: against closed forms, and against the published scheme.

    python benchmarks/profiling.py mixture                    both estimators against the analytic mixture
    python benchmarks/profiling.py pool FOLDER [--dense] [--proposals]   raw scores of the miniature, kept
    python benchmarks/profiling.py miniature DENSE OURS       evaluations for an allocation, from two pools

A pool is measured once and subsampled afterwards. `pool DENSE --dense` measures all 25 levels of a 25-step
sampler with 25-step sampling, as the published scheme does and as a long-run truth needs: per image about 360
model evaluations and 26 scored images (6 s of one core, so 1,000 images take 1.6 h). `pool OURS --steps 10
--seed 1` is this project's way: 9 levels, 10-step sampling, 66 evaluations and 9 scored images (1.5 s).
`--proposals` starts the rollouts from images of an external generator: the renderer that the miniature learnt
from, which draws every prompt faultlessly. A pool goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mixture import Mixture, MixtureBackbone
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.special import stdtrit

from recast_engine import miniature
from recast_engine.allocation import allocate
from recast_engine.backbones.catalogue import flow_sigmas
from recast_engine.backbones.load import load_backbone
from recast_engine.backbones.sampling import denoise_stochastic
from recast_engine.config import EstimatorConfig
from recast_engine.miniature.world import parse, render
from recast_engine.profiling import renyi_self_tilted
from recast_engine.profiling.curves import estimate_curve
from recast_engine.profiling.estimator import jackknife, proposal_moments
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
LEAST_SPREAD = 1e-12


def rollouts(world: Mixture, clean: Array, sigma: float, steps: int, rng: np.random.Generator) -> Array:
    """One stochastic rollout of each of ``clean`` from noise level ``sigma``."""
    backbone = MixtureBackbone(world, clean.size)
    noised = (1 - sigma) * clean + sigma * rng.normal(size=clean.shape)
    start = torch.from_numpy(noised.reshape(1, 1, 1, -1)).float()
    seed = int(rng.integers(2**31))
    drawn = denoise_stochastic(backbone, start, sigma, backbone.encode_prompts([""]), [seed], steps=steps)
    return drawn.double().numpy().reshape(clean.shape)


def mixture(arguments: argparse.Namespace) -> None:
    """Both estimators at equal model evaluations: error, bias by standard deviation, coverage."""
    world, steps, prompts, images = Mixture(), arguments.steps, 48, 8
    biased = Mixture((1.0,), (0.8,), 0.8)
    print(f"{arguments.repeats} profiles of {prompts} x {images} images, {steps} steps, alpha 2")
    print(
        f"{'sigma':>6}{'D':>8}  {'estimator':<34}{'evaluations':>12}{'rms error':>11}{'bias/sd':>9}"
        f"{'cover':>8}"
    )
    for sigma in (0.3, 0.6, 0.85):
        exact = world.divergence(sigma)
        evaluations = prompts * images * (steps + rollout_steps(sigma, steps))
        for name, values in {
            "self-tilted": _self_tilted(world, sigma, arguments, prompts, images),
            "external, the positive policy": _external(
                world, world.positive_policy(), sigma, arguments, prompts, images
            ),
            "external, another proposal": _external(world, biased, sigma, arguments, prompts, images),
        }.items():
            estimates, reach = values
            error = estimates - exact
            bias = error.mean() / max(estimates.std(), LEAST_SPREAD)
            print(
                f"{sigma:>6}{exact:>8.4f}  {name:<34}{evaluations:>12}{np.sqrt((error**2).mean()):>11.4f}"
                f"{bias:>9.2f}{np.mean(np.abs(error) <= reach):>8.3f}"
            )


def _self_tilted(
    world: Mixture, sigma: float, arguments: argparse.Namespace, prompts: int, images: int
) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    clean = world.draw(rng, (arguments.repeats, prompts, images))
    again = rollouts(world, clean, sigma, rollout_steps(sigma, arguments.steps), rng)
    pairs = zip(world.optimality(clean), world.optimality(again), strict=True)
    found = [renyi_self_tilted(first, second) for first, second in pairs]
    reach = [estimate.interval()[1] - estimate.value for estimate in found]
    return np.array([estimate.value for estimate in found]), np.array(reach)


def _external(
    world: Mixture,
    proposal: Mixture,
    sigma: float,
    arguments: argparse.Namespace,
    prompts: int,
    images: int,
) -> tuple[Array, Array]:
    """Z of each prompt from as many images of the model as there are proposals, as in a profile."""
    rng = np.random.default_rng(1)
    shape = (arguments.repeats, prompts, images)
    partitions = world.optimality(world.draw(rng, shape)).mean(axis=2)
    drawn = rollouts(world, proposal.draw(rng, shape), sigma, rollout_steps(sigma, arguments.steps), rng)
    found = [
        proposal_moments(values[..., None], partition, 2.0)
        for values, partition in zip(world.optimality(drawn), partitions, strict=True)
    ]
    estimates = np.array([float(moments.divergence(np.ones(prompts))) for moments in found])
    return estimates, stdtrit(prompts - 1, 0.975) * np.array([jackknife(moments) for moments in found])


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


Scheme = Callable[[ScoreTable, Array, int], Array]


def divergences(table: ScoreTable, rows: Array, *, anchor: bool, raw: bool, keep: Array) -> Array:
    """(R, levels kept, both ends among them) curves from the prompts ``rows``."""
    inner = keep[1:-1] - 1
    found = []
    for clean, drawn in zip(table.clean[:, rows], table.rollouts[:, :, rows], strict=True):
        curve = estimate_curve(
            clean,
            drawn[inner],
            alpha=2.0,
            advantage_clip=5.0,
            rng=np.random.default_rng(0),
            anchor=drawn[-1] if anchor else None,
        )
        found.append(curve.divergence_raw if raw else curve.divergence)
    return np.array(found)


def allocation(gains: Array) -> Array:
    """Uniform budgets, tau = 1."""
    return allocate(gains, np.full(len(gains), 1 / len(gains))).matrix


def ours(levels: Array, keep: Array, *, anchor: bool) -> Scheme:
    """Few levels, interpolated monotonically."""

    def scheme(table: ScoreTable, rows: Array, steps: int) -> Array:
        curves = divergences(table, rows, anchor=anchor, raw=False, keep=keep)
        dense = PchipInterpolator(levels[keep], curves, axis=1)(flow_sigmas(steps, 1.0))
        return allocation(np.maximum(np.diff(dense, axis=1), 0.0))

    return scheme


def published(levels: Array, *, raw: bool) -> Scheme:
    """Every level of the sampler, differences of neighbours (negative ones cut, or isotonic regression).

    For other step counts than the pool's, the curves are read off between its levels.
    """
    everything = np.arange(len(levels))

    def scheme(table: ScoreTable, rows: Array, steps: int) -> Array:
        curves = divergences(table, rows, anchor=False, raw=raw, keep=everything)
        dense = np.array([np.interp(flow_sigmas(steps, 1.0), levels, curve) for curve in curves])
        return allocation(np.maximum(np.diff(dense, axis=1), 0.0))

    return scheme


def noise(scheme: Scheme, table: ScoreTable, steps: int) -> tuple[int, float]:
    """Images of half the pool's prompts, and the mean absolute error of an allocation from that many.

    Of two allocations from disjoint halves; the error of one about the scheme's own limit is their mean
    absolute difference / sqrt(2), whatever the limit.
    """
    rng = np.random.default_rng(0)
    prompts = table.clean.shape[1]
    errors = []
    for _ in range(SPLITS):
        order = rng.permutation(prompts)
        halves = (np.sort(order[: prompts // 2]), np.sort(order[prompts // 2 :]))
        first, second = (scheme(table, rows, steps) for rows in halves)
        errors.append(np.abs(first - second).mean() / np.sqrt(2))
    return int(np.isfinite(table.clean[0]).sum()) // 2, float(np.mean(errors))


def report(arguments: argparse.Namespace) -> None:
    """Model evaluations until an allocation is within 0.05 of its scheme's limit.

    From the error measured at half the pool's prompts, by error ~ 1 / sqrt(images).
    """
    dense, few = load_pool(arguments.dense), load_pool(arguments.ours)
    dense_levels = flow_sigmas(arguments.dense_steps, 1.0)[::-1]
    levels = np.array(noise_levels(few.rollouts.shape[1] + 1))
    nine, six = np.arange(len(levels)), np.array([0, 2, 3, 4, 6, 8])
    five = nine[::2]
    short = 10
    print(f"{'scheme':<44}{'T':>4}{'images':>8}{'error':>8}{'evals/image':>13}{'for 0.05':>11}{'ratio':>8}")
    for steps in (10, 25, 50):
        sampler = flow_sigmas(steps, 1.0)[1:-1]
        whole = steps + sum(rollout_steps(sigma, steps) for sigma in sampler)
        rows: list[tuple[str, Scheme, ScoreTable, int]] = [
            ("published: T levels, raw differences", published(dense_levels, raw=True), dense, whole),
            ("published: T levels, isotonic", published(dense_levels, raw=False), dense, whole),
        ]
        for name, keep, anchor in (
            ("ours: 9 levels, no anchor", nine, False),
            ("ours: 9 levels", nine, True),
            ("ours: 6 levels, no anchor", six, False),
            ("ours: 6 levels", six, True),
            ("ours: 5 levels, no anchor", five, False),
        ):
            inner = sum(rollout_steps(levels[k], short) for k in keep[1:-1])
            rows.append((name, ours(levels, keep, anchor=anchor), few, short + inner + short * anchor))
        baseline = 0.0
        for name, scheme, table, price in rows:
            images, error = noise(scheme, table, steps)
            needed = images * (error / WANTED) ** 2 * price
            baseline = baseline or needed
            print(
                f"{name:<44}{steps:>4}{images:>8}{error:>8.3f}{price:>13}{needed:>11.0f}"
                f"{baseline / needed:>7.1f}x"
            )
    print("differences of the limits, all images of both pools, T = 25:")
    everyone = np.arange(dense.clean.shape[1])
    limits = {
        "dense levels, isotonic": published(dense_levels, raw=False)(dense, everyone, 25),
        "dense scores at 9 of the levels": ours(
            dense_levels, np.array([0, 1, 5, 9, 13, 17, 20, 23, 25]), anchor=True
        )(dense, everyone, 25),
        "ours, 9 levels": ours(levels, nine, anchor=True)(few, everyone, 25),
        "ours, 6 levels": ours(levels, six, anchor=True)(few, everyone, 25),
    }
    for (first, a), (second, b) in itertools.combinations(limits.items(), 2):
        print(f"  {first} / {second}: {np.abs(a - b).mean():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("mixture", help="both estimators against the analytic mixture")
    command.add_argument("--repeats", type=int, default=400)
    command.add_argument("--steps", type=int, default=25)
    command.set_defaults(run=mixture)
    command = commands.add_parser("pool", help="measure and keep raw scores of the miniature")
    command.add_argument("folder", type=Path)
    command.add_argument("--dense", action="store_true", help="all levels of a sampler of --steps steps")
    command.add_argument("--proposals", action="store_true", help="rollouts from the renderer's images")
    command.add_argument("--levels", type=int, default=9)
    command.add_argument("--steps", type=int, default=25)
    command.add_argument("--rollouts", type=int, default=1)
    command.add_argument("--images", type=int, default=4, help="of every training prompt")
    command.add_argument("--seed", type=int, default=1000)
    command.set_defaults(run=pool)
    command = commands.add_parser("miniature", help="model evaluations for an allocation, from two pools")
    command.add_argument("dense", type=Path)
    command.add_argument("ours", type=Path)
    command.add_argument("--dense-steps", type=int, default=25)
    command.set_defaults(run=report)
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
