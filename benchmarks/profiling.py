"""Profiles against the truth: errors, intervals, and model evaluations for a wanted accuracy.

    python benchmarks/profiling.py pool FOLDER [--levels 26 --steps 25 --images 4 --seed 1000]

Prints JSON.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from recast_engine import miniature
from recast_engine.backbones.catalogue import flow_sigmas
from recast_engine.backbones.load import load_backbone
from recast_engine.config import EstimatorConfig
from recast_engine.profiling.levels import noise_levels
from recast_engine.profiling.measure import measure_work
from recast_engine.profiling.plan import Plan, Work
from recast_engine.prompts import Prompt, parse_prompts
from recast_engine.rewards.scoring import load_scorer

REWARDS = ("clipscore", "hpsv2", "pickscore", "geneval", "ocr")


def training_prompts() -> list[Prompt]:
    """The miniature's own."""
    return parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))


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
        whole = Work(0, 0, tuple(range(len(prompts))), (image, image + 1), counts)
        for part in plan.split(whole, len(prompts)):
            path = arguments.folder / f"image{image:03}-part{part.shard:03}.safetensors"
            if not path.exists():
                measure_work(backbone, scorer, prompts, plan, part).save(path)
                print(path.name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("pool", help="measure and keep raw scores of the miniature")
    command.add_argument("folder", type=Path)
    command.add_argument("--dense", action="store_true")
    command.add_argument("--levels", type=int, default=9)
    command.add_argument("--steps", type=int, default=25)
    command.add_argument("--rollouts", type=int, default=1)
    command.add_argument("--images", type=int, default=4)
    command.add_argument("--seed", type=int, default=1000)
    command.set_defaults(run=pool)
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
