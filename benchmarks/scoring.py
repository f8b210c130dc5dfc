"""Milliseconds per image of every reward on the miniature: `python benchmarks/scoring.py [--images 128]`.

Images are renders of held-out prompts. Every reward is warmed up and then timed three times on the prompts it
applies to; the fastest counts. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random

import numpy as np


def measure(images: int, repeats: int) -> dict[str, dict[str, float]]:
    """Per reward: images scored, milliseconds per image, and the mean score of the renders."""
    from recast_engine import miniature
    from recast_engine.miniature import world
    from recast_engine.prompts import parse_prompts
    from recast_engine.rewards.catalogue import REWARDS
    from recast_engine.rewards.scoring import load_scorer

    prompts = parse_prompts(miniature.prompt_file("heldout").read_text(encoding="utf-8"))
    prompts = [prompts[index % len(prompts)] for index in range(images)]
    pictures = world.render_many([world.parse(p.prompt) for p in prompts], random.Random(0))
    figures = {}
    for reward, info in REWARDS.items():
        if info.missing("miniature") is not None:
            continue
        scorer = load_scorer([reward], "miniature")
        runs = [scorer(pictures, prompts) for _ in range(repeats + 1)]
        scored = int(np.isfinite(runs[0].values).sum())
        seconds = min(float(run.seconds[0]) for run in runs[1:])
        figures[reward] = {
            "images": scored,
            "milliseconds_per_image": round(1000 * seconds / max(1, scored), 3),
            "mean_score_of_renders": round(float(np.nanmean(runs[0].values)), 4),
        }
    return figures


def main() -> None:
    """Parse the command line, limit the threads before torch loads, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["RECAST_ENGINE_THREADS"] = str(arguments.threads)
    figures = measure(arguments.images, arguments.repeats)
    print(json.dumps({"threads": arguments.threads, "rewards": figures}, indent=2))


if __name__ == "__main__":
    main()
