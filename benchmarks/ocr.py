"""How well the OCR reward reads: `python benchmarks/ocr.py PROMPTS [--fonts FOLDER] [--images N]`.

PROMPTS is a prompt set (JSONL, or text with the wanted words in quotes). Every target is rendered once
on a 512 px image; font, size, colours and background go round. Prints one JSON object: the share of targets
read exactly (case and spaces aside) and the mean reward, in all and by size, font and background, and what
blank, noise and huge images score. Nothing of the prompt set is printed but counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 512
SIZES = (24, 36, 56, 80)
FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Italic.ttf",
    "DejaVuSansMono.ttf",
)
COLOURS = (
    ("black", "white"),
    ("white", "navy"),
    ("gold", "black"),
    ("firebrick", "beige"),
    ("grey", "white"),
)
BACKGROUNDS = ("plain", "gradient", "noise")


@dataclass(frozen=True)
class Case:
    """One rendering: a target in a font of a size, coloured, on a background."""

    target: str
    size: int
    font: str
    colours: tuple[str, str]
    background: str


def cases(targets: list[str]) -> Iterator[Case]:
    """One case per target; every size meets every font and colour in turn."""
    for place, target in enumerate(targets):
        yield Case(
            target,
            SIZES[place % len(SIZES)],
            FONTS[place // len(SIZES) % len(FONTS)],
            COLOURS[place % len(COLOURS)],
            BACKGROUNDS[place // 7 % len(BACKGROUNDS)],
        )


def render(case: Case, folder: Path, rng: np.random.Generator) -> np.ndarray:
    """The target centred on 512 x 512 px, in lines that fit; in a smaller size where it would not fit."""
    ink, paper = case.colours
    picture = Image.new("RGB", (SIDE, SIDE), paper)
    if case.background != "plain":
        shade = np.asarray(picture, dtype=np.float32)
        if case.background == "gradient":
            shade = shade * np.linspace(0.75, 1.0, SIDE, dtype=np.float32)[:, None, None]
        else:
            shade = shade + rng.normal(0, 12, shade.shape)
        picture = Image.fromarray(shade.clip(0, 255).astype(np.uint8))
    draw, size = ImageDraw.Draw(picture), case.size
    while True:
        font = ImageFont.truetype(str(folder / case.font), size)
        text = wrapped(case.target, font)
        left, top, right, bottom = draw.multiline_textbbox((0, 0), text, font=font, align="center")
        if max(right - left, bottom - top) <= SIDE - 24:
            break
        size -= 4
    place = ((SIDE - right - left) / 2, (SIDE - bottom - top) / 2)
    draw.multiline_text(place, text, font=font, fill=ink, align="center")
    return np.asarray(picture)


def wrapped(text: str, font: ImageFont.FreeTypeFont) -> str:
    """``text`` broken between words where a line would be wider than the image allows."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= SIDE - 24:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(line for line in lines if line)


def measure(targets: list[str], folder: Path) -> dict[str, object]:
    """The figures of all cases."""
    from recast_engine.rewards.ocr import OCR, normalise, similarity

    reward, rng = OCR(), np.random.default_rng(0)
    groups: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    started = time.perf_counter()
    for case in cases(targets):
        image = render(case, folder, rng)[None]
        read = reward.read(image)[0] or ""
        score = similarity(read, case.target, within=True)  # as the reward scores an image of this size
        exact = normalise(read) == normalise(case.target)
        for name in ("all", f"size {case.size}", case.font, f"background {case.background}"):
            groups[name].append((exact, score))
    seconds = (time.perf_counter() - started) / max(1, len(targets))
    figures = {
        name: {
            "images": len(rows),
            "exact_share": round(float(np.mean([exact for exact, _ in rows])), 4),
            "mean_reward": round(float(np.mean([score for _, score in rows])), 4),
        }
        for name, rows in groups.items()
    }
    return {
        "milliseconds_per_image": round(1000 * seconds, 1),
        "figures": figures,
        "nothing_to_read": empty(),
    }


def empty() -> dict[str, float]:
    """Scores of images that spell nothing."""
    from recast_engine.prompts import Prompt
    from recast_engine.rewards.ocr import OCR

    rng, reward = np.random.default_rng(0), OCR()
    pictures = {
        "white": np.full((SIDE, SIDE, 3), 255, np.uint8),
        "black": np.zeros((SIDE, SIDE, 3), np.uint8),
        "noise": rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8),
        "huge (4096 x 4096)": np.full((4096, 4096, 3), 128, np.uint8),
    }
    asked = [Prompt("x", text="Grand Opening")]
    return {name: float(reward.score(image[None], asked)[0]) for name, image in pictures.items()}


def main() -> None:
    """Parse the command line, limit the threads before anything loads, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts/truetype/dejavu"))
    parser.add_argument("--images", type=int, default=None, help="only the first N targets")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["RECAST_ENGINE_THREADS"] = str(arguments.threads)
    from recast_engine.prompts import parse_prompts

    prompts = parse_prompts(arguments.prompts.read_text(encoding="utf-8"))
    targets = [prompt.target for prompt in prompts if prompt.target][: arguments.images]
    figures = {"prompts": len(prompts), "targets": len(targets), **measure(targets, arguments.fonts)}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
