"""Milliseconds per image of every reward on the miniature: `python benchmarks/scoring.py [--images 128]`.

Images are renders of held-out prompts. Every reward is warmed up and then timed three times on the prompts it
applies to; the fastest counts. Then the scoring service against inline calls: batches are drawn and scored
one after the other, or scored while the next is drawn, in turns in the same run; once with local rewards, and
once with one more that waits for another machine. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from recast_engine.prompts import Prompt


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


class Remote:
    """Stands for a reward on another machine: it only waits."""

    id, lane = "jpeg_size", "remote"

    def __init__(self, seconds: float):
        self._seconds = seconds

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Zeros (N,), after a while."""
        time.sleep(self._seconds)
        return np.zeros(len(images))


def compare_service(batches: int, repeats: int, wait: float) -> dict[str, dict[str, float]]:
    """Seconds to draw and score ``batches`` of 32 images inline and in the service: medians over repeats."""
    from recast_engine import miniature
    from recast_engine.backbones.load import load_backbone
    from recast_engine.backbones.sampling import sample
    from recast_engine.prompts import parse_prompts
    from recast_engine.rewards.scoring import Scorer, load_scorer
    from recast_engine.rewards.service import ScoringService, begin, joined

    backbone = load_backbone("miniature")
    prompts = parse_prompts(miniature.prompt_file("heldout").read_text(encoding="utf-8"))[:32]
    conditioning = backbone.encode_prompts([prompt.prompt for prompt in prompts])
    local = load_scorer(["clipscore", "hpsv2", "pickscore", "geneval", "ocr"], "miniature")

    def run(scorer: Scorer | ScoringService) -> float:
        started = time.perf_counter()
        waiting = []
        for batch in range(batches):
            seeds = range(32 * batch, 32 * (batch + 1))
            images = backbone.decode(sample(backbone, conditioning, seeds, steps=10))
            waiting.append(begin(scorer, images, prompts))
        joined([scores() for scores in waiting])
        return time.perf_counter() - started

    figures = {}
    for name, scorer in {"local": local, "with_remote": Scorer([*local.members, Remote(wait)])}.items():
        with ScoringService(scorer) as service:
            run(scorer), run(service)
            pairs = [(run(scorer), run(service)) for _ in range(repeats)]
        inline, beside = (float(np.median(column)) for column in zip(*pairs, strict=True))
        figures[name] = {
            "images": 32 * batches,
            "inline_seconds": round(inline, 3),
            "service_seconds": round(beside, 3),
            "inline_over_service": round(float(np.median([a / b for a, b in pairs])), 3),
        }
    return figures


def main() -> None:
    """Parse the command line, limit the threads before torch loads, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=6, help="of 32 images, for the service")
    parser.add_argument(
        "--remote-seconds", type=float, default=0.5, help="a batch's wait at the remote reward"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["RECAST_ENGINE_THREADS"] = str(arguments.threads)
    figures = {
        "threads": arguments.threads,
        "rewards": measure(arguments.images, arguments.repeats),
        "remote_seconds_per_batch": arguments.remote_seconds,
        "service": compare_service(arguments.batches, arguments.repeats, arguments.remote_seconds),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
