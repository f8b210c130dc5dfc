"""Finds circles, squares and triangles in miniature images with classical vision.

For every palette colour the image is read as a blend of background and that colour; connected
blends are objects. An object is compared with the ideal circle, square and triangle of its own
centroid and area; its label is the best one and its confidence falls with the soft
intersection over union (IoU) of the two and with the distance of its colour from the palette. A
crisp shape scores close to 1, a blob clearly less: a learner cannot earn much by drawing blobs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from recast_engine.miniature import world

Floats = NDArray[np.float32]

MIN_AREA = 24.0
"""Smallest object in pixels; the smallest that the world draws covers 104."""
IOU_RANGE = (0.60, 0.88)
"""Soft IoU with the best ideal shape that counts as confidence 0 and 1; renders reach 0.97 and more."""
CLEAR_MARGIN = 0.04
"""Lead in IoU over the second-best shape below which confidence falls, to one half at a tie; renders lead
by 0.14 and more."""
COLOR_RANGE = (40.0, 130.0)
"""Distance in RGB from the palette that counts as full confidence and none."""
_MAX_ANGLE_SINE = 0.5  # a pixel whose change from the background points elsewhere is no palette colour

_NAMES = tuple(world.COLORS)
_PALETTE = np.array([world.COLORS[name] for name in _NAMES], np.float32)


class Detection(NamedTuple):
    """One object: class, confidence in [0, 1], box (x0, y0, x1, y1) in pixels, colour name."""

    label: str
    confidence: float
    box: tuple[float, float, float, float]
    color: str


def _background(pixels: Floats) -> Floats:
    """Median colour [3] of the outermost two rows and columns of pixels [H, W, 3]."""
    ring = np.concatenate(
        [p.reshape(-1, 3) for p in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])]
    )
    background: Floats = np.median(ring, axis=0)
    return background


def _blends(pixels: Floats, background: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Coverage [K, H, W] by each of K palette colours, and the colour [H, W] each pixel leans to (-1: none).

    A pixel half covered by a colour lies half-way from the background to it, so coverage is the
    length of the projection on that direction and does not suffer from antialiasing.
    """
    change = pixels - background
    direction = _PALETTE - background
    norm = np.maximum((direction**2).sum(1), 1.0)
    along = np.einsum("hwc,kc->khw", change, direction) / norm[:, None, None]
    length = (change**2).sum(2)
    off = length - along**2 * norm[:, None, None]
    off[along <= 0] = np.inf
    leaning = off.argmin(0)
    astray = off.min(0) > (_MAX_ANGLE_SINE**2) * length
    return np.clip(along, 0, 1), np.where(astray, -1, leaning)


def _ideal(shape: str, x: Floats, y: Floats, area: float) -> Floats:
    """Coverage of the ideal shape with its centroid at the origin, at pixel centres x, y.

    Coverage is 1/2 minus the signed distance to the outline, clipped to [0, 1]. Proportions are those
    of `world.outline`: a triangle is 2 r wide and 1.85 r high, its centroid a third of that above its base.
    """
    if shape == "circle":
        distance = np.hypot(x, y) - np.sqrt(area / np.pi)
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - np.sqrt(area) / 2
    else:
        radius = np.sqrt(area / 1.85)
        height = 1.85 * radius
        slant = np.hypot(height, radius)
        side = (np.abs(x) * height - (y + 2 / 3 * height) * radius) / slant
        distance = np.maximum(y - height / 3, side)
    inside: Floats = np.clip(0.5 - distance, 0, 1)
    return inside


def _fit(coverage: Floats) -> tuple[str, float, float]:
    """The best ideal shape for a coverage map [h, w], its soft IoU (sum min / sum max), its lead."""
    area = float(coverage.sum())
    grid: Floats = np.indices(coverage.shape, dtype=np.float32)
    rows, columns = grid[0], grid[1]
    y = rows - float((rows * coverage).sum()) / area
    x = columns - float((columns * coverage).sum()) / area
    scores = {}
    for shape in world.SHAPES:
        ideal = _ideal(shape, x, y, area)
        scores[shape] = float(np.minimum(coverage, ideal).sum() / np.maximum(coverage, ideal).sum())
    second, best = sorted(scores, key=scores.__getitem__)[-2:]
    return best, scores[best], scores[best] - scores[second]


def _ramp(value: float, zero: float, one: float) -> float:
    return float(np.clip((value - zero) / (one - zero), 0, 1))


def _describe(
    pixels: Floats, coverage: Floats, region: NDArray[np.bool_], corner: tuple[int, int], color: int
) -> Detection | None:
    """The detection for one connected region of a crop whose upper left pixel is `corner` (y, x)."""
    core = ndimage.binary_erosion(region)
    inside = core if core.any() else region
    soft = np.where(ndimage.binary_dilation(region), coverage / np.median(coverage[inside]), 0)
    soft = np.minimum(soft, 1)
    if soft.sum() < MIN_AREA:
        return None
    label, iou, lead = _fit(soft)
    shade = np.median(pixels[inside], axis=0)
    tint = float(np.linalg.norm(shade - _PALETTE[color]))
    clear = 0.5 + 0.5 * _ramp(lead, 0, CLEAR_MARGIN)
    confidence = _ramp(iou, *IOU_RANGE) * clear * _ramp(tint, COLOR_RANGE[1], COLOR_RANGE[0])
    rows, columns = np.nonzero(region.any(1))[0], np.nonzero(region.any(0))[0]
    top, left = corner
    box = (
        float(left + columns[0]),
        float(top + rows[0]),
        float(left + columns[-1] + 1),
        float(top + rows[-1] + 1),
    )
    return Detection(label, confidence, box, _NAMES[color])


class MiniatureDetector:
    """Detector for 48 x 48 px images of the miniature world; stateless, about a millisecond an image."""

    def __call__(self, image: Image.Image | NDArray[np.uint8]) -> list[Detection]:
        """Objects of an RGB image, the most confident first. Raises ValueError for another layout."""
        pixels = np.asarray(image, dtype=np.float32)
        if pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(f"expected an RGB image [H, W, 3], got shape {pixels.shape}")
        coverage, leaning = _blends(pixels, _background(pixels))
        found = []
        for color in range(len(_NAMES)):
            mine = leaning == color
            regions, _ = ndimage.label(mine & (coverage[color] > 0.5))
            blend = np.where(mine, coverage[color], 0)
            for index, (ys, xs) in enumerate(ndimage.find_objects(regions), start=1):
                rows = slice(max(0, ys.start - 2), ys.stop + 2)
                columns = slice(max(0, xs.start - 2), xs.stop + 2)
                window = (rows, columns)
                corner = (rows.start, columns.start)
                region = regions[window] == index
                detection = _describe(pixels[window], blend[window], region, corner, color)
                if detection is not None:
                    found.append(detection)
        return sorted(found, key=lambda d: -d.confidence)
