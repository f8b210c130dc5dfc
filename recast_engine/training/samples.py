"""Grids of fixed prompts and seeds that show a training's progress."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast_engine.backbones.base import Backbone
from recast_engine.backbones.catalogue import model_info
from recast_engine.backbones.sampling import sample
from recast_engine.prompts import Prompt
from recast_engine.training.adapters import EMA
from recast_engine.training.metrics import Meter
from recast_engine.training.state import TrainingState

GRID_IMAGES = 16


def draw_samples(state: TrainingState) -> None:
    """Draw and report the grid of ``state``'s position, with the adapter as it would be exported."""
    if not state.devices.leads:
        return
    meter = Meter(state.backbone)
    name = f"epoch-{state.position.epoch:06d}.png"
    path = state.workdir / "samples" / name
    with state.adapters.using(EMA):
        facts = draw_grid(
            state.backbone,
            fixed_choice(state.prompts, state.config.seed),
            steps=model_info(state.config.model).default_steps,
            batch_size=state.config.sampling.batch_size,
            path=path,
        )
    meter.report(state.observer)
    state.observer.file("samples", name, path, {"epoch": state.position.epoch, **facts})


def fixed_choice(prompts: Sequence[Prompt], seed: int) -> list[tuple[str, int]]:
    """At most 16 (prompt, seed) pairs, evenly spaced over the prompt set."""
    count = min(GRID_IMAGES, len(prompts))
    places = np.linspace(0, len(prompts) - 1, count).round().astype(int)
    return [(prompts[place].prompt, (seed + number) % 2**31) for number, place in enumerate(places)]


def draw_grid(
    backbone: Backbone, choice: Sequence[tuple[str, int]], *, steps: int, batch_size: int, path: Path
) -> Mapping[str, Any]:
    """Draw ``choice`` with the plain Euler solver and the adapter now active; write a PNG without padding.

    Returns:
        What reproduces each cell, row by row: steps, solver, cell size, columns, prompts and seeds.
    """
    conditioning = backbone.encode_prompts([prompt for prompt, _ in choice])
    seeds = [seed for _, seed in choice]
    latents = sample(backbone, conditioning, seeds, steps=steps, solver="euler", batch_size=batch_size)
    images = backbone.decode(latents)
    columns = math.ceil(math.sqrt(len(images)))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(tile(images, columns)).save(path)
    return {
        "steps": steps,
        "solver": "euler",
        "cell": [images.shape[2], images.shape[1]],
        "columns": columns,
        "images": [{"prompt": prompt, "seed": seed} for prompt, seed in choice],
    }


def tile(images: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """(N, H, W, 3) -> one image of ``columns`` cells a row, row by row; the last row is filled with black."""
    count, height, width, channels = images.shape
    rows = math.ceil(count / columns)
    cells = np.zeros((rows * columns, height, width, channels), dtype=np.uint8)
    cells[:count] = images
    grid = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return grid.reshape(rows * height, columns * width, channels)
