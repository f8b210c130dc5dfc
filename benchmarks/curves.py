"""Curves of the miniature's rewards, as a figure and as figures.

    python benchmarks/curves.py [--prompts 96] [--images 16] [--levels 11] [--svg FILE] [--json FILE]

Measures one self-tilted profile of the base model for all its rewards. Draws for each the share of D(0) that
is left at noise level sigma, and the gain per unit of sigma, which says where along the trajectory the reward
is decided; both with 95% intervals. Prints for each its total, the noise level above which half of it is
decided, and the band in which the middle 80% of it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray

from recast_engine import miniature
from recast_engine.backbones.load import load_backbone
from recast_engine.config import EstimatorConfig
from recast_engine.profiling import Profile
from recast_engine.profiling.measure import measure_profile
from recast_engine.prompts import parse_prompts
from recast_engine.rewards.scoring import load_scorer

REWARDS = ("ocr", "geneval", "clipscore", "hpsv2", "pickscore", "aesthetic")
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
FINE = np.linspace(0.0, 1.0, 1001)


def measured(prompts: int, images: int, levels: int) -> Profile:
    """The base model's profile."""
    estimator = EstimatorConfig(levels=levels, prompts=prompts, images_per_prompt=images, sampling_steps=10)
    texts = parse_prompts(miniature.prompt_file("train").read_text(encoding="utf-8"))
    return measure_profile(
        load_backbone("miniature"), load_scorer(REWARDS, "miniature"), texts, estimator, seed=0
    )


def where_gained(profile: Profile, shares: tuple[float, ...]) -> NDArray[np.float64]:
    """(R, S) noise levels above which ``shares`` of each reward's total is decided; NaN without a total."""
    rows = []
    for curve in profile.divergence(FINE):
        left = curve / curve[0] if curve[0] > 0 else np.full_like(curve, np.nan)
        rows.append([FINE[np.argmax(left <= share)] if curve[0] > 0 else np.nan for share in shares])
    return np.array(rows)


def draw(profile: Profile, path: Path) -> None:
    """What is left of each reward at sigma, and where it is gained."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    levels = np.array(profile.levels)
    fine = profile.divergence(FINE)
    for reward, colour, smooth in zip(profile.rewards, COLOURS, fine, strict=True):
        curve = profile.curves[reward]
        if curve.total <= 0:
            continue
        low, high = np.array(curve.ci_low) / curve.total, np.array(curve.ci_high) / curve.total
        left.fill_between(levels, low, high, color=colour, alpha=0.15, linewidth=0)
        left.plot(FINE, smooth / curve.total, color=colour, label=f"{reward}, D(0) = {curve.total:.3f}")
        left.plot(levels, np.array(curve.divergence) / curve.total, "o", color=colour, markersize=3)
        widths, gains = np.diff(levels), np.array(curve.gain)
        centres = (levels[1:] + levels[:-1]) / 2
        bounds = [gains - np.array(curve.gain_low), np.array(curve.gain_high) - gains]
        scale = curve.total * widths
        right.errorbar(
            centres,
            gains / scale,
            yerr=bounds / scale,
            color=colour,
            capsize=2,
            linewidth=1,
            markersize=3,
            fmt="o-",
        )
    left.set(xlabel="noise level sigma", ylabel="D(sigma) / D(0)", xlim=(1, 0), ylim=(0, None))
    left.legend(fontsize=8)
    right.set(xlabel="noise level sigma", ylabel="share of D(0) gained per unit of sigma", xlim=(1, 0))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--levels", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path, help="keep the profile; an existing one is drawn, not measured")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.json and options.json.exists():
        profile = Profile.from_dict(json.loads(options.json.read_text(encoding="utf-8")))
    else:
        profile = measured(options.prompts, options.images, options.levels)
        if options.json:
            options.json.write_text(json.dumps(profile.to_dict()), encoding="utf-8")
    places = where_gained(profile, (0.1, 0.5, 0.9))
    print(f"{'reward':<11}{'D(0)':>9}{'95% interval':>20}{'half above':>12}{'middle 80%':>16}{'prompts':>9}")
    for reward, (first, half, last) in zip(profile.rewards, places, strict=True):
        curve = profile.curves[reward]
        interval = f"{curve.ci_low[0]:.4f} .. {curve.ci_high[0]:.4f}"
        print(
            f"{reward:<11}{curve.total:>9.4f}{interval:>20}{half:>12.2f}{f'{last:.2f} .. {first:.2f}':>16}"
            f"{curve.prompts:>9}"
        )
    print("cost:", {name: round(value, 1) for name, value in profile.cost.items()})
    for warning in profile.warnings:
        print("warning:", warning)
    if options.svg:
        draw(profile, options.svg)


if __name__ == "__main__":
    main()
