"""Ways to spoil a clean render, in three families, one for each preference or quality model.

Every function takes an image uint8 [H, W, 3], a severity in [0, 1] and a numpy generator, and
returns a spoilt copy. Families do not share a way, so that models trained on different families
are different judges.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Image = NDArray[np.uint8]
Floats = NDArray[np.float32]
Degradation = Callable[[Image, float, np.random.Generator], Image]


def _clip(pixels: NDArray[np.floating]) -> Image:
    levels: Image = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    return levels


def _smooth_noise(shape: tuple[int, ...], width: float, rng: np.random.Generator) -> Floats:
    """Noise of unit standard deviation, smoothed over `width` pixels in both image axes."""
    sigma = (width, width) + (0,) * (len(shape) - 2)
    noise: Floats = ndimage.gaussian_filter(rng.standard_normal(shape).astype(np.float32), sigma, mode="wrap")
    return noise / max(float(noise.std()), 1e-6)


def _displace(image: Image, field: Floats) -> Image:
    """Pixels taken from where the displacement field [2, H, W] (y, x, in pixels) points."""
    rows, columns = np.indices(image.shape[:2], dtype=np.float32)
    where = np.stack([rows + field[0], columns + field[1]])
    planes = [ndimage.map_coordinates(image[..., c], where, order=1, mode="nearest") for c in range(3)]
    return np.stack(planes, axis=-1)


def blur(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Gaussian blur of 0.4 to 2.6 px."""
    sigma = 0.4 + 2.2 * severity
    return _clip(ndimage.gaussian_filter(image.astype(np.float32), (sigma, sigma, 0)))


def noise(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Independent Gaussian noise of 6 to 46 levels."""
    return _clip(image + rng.normal(0, 6 + 40 * severity, image.shape))


def bleed(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Colour runs out of its outline: chroma is blurred over 5 px, lightness stays."""
    pixels = image.astype(np.float32)
    chroma = pixels - pixels.mean(2, keepdims=True)
    spread = ndimage.gaussian_filter(chroma, (5, 5, 0), mode="nearest")
    return _clip(pixels + (0.2 + 0.8 * severity) * (spread - chroma))


def blocks(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Coarse coding: 4 x 4 px blocks fade into their mean and levels are rounded off."""
    height, width, _ = image.shape
    pixels = image.astype(np.float32)
    mean = pixels.reshape(height // 4, 4, width // 4, 4, 3).mean((1, 3))
    coarse = mean.repeat(4, axis=0).repeat(4, axis=1)
    level = 8 + 40 * severity
    mixed = pixels + (0.15 + 0.85 * severity) * (coarse - pixels)
    return _clip(np.rint(mixed / level) * level)


def wobble(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Wavy outlines: pixels move by up to about 3 px, coherently over 2.5 px."""
    height, width, _ = image.shape
    field = np.moveaxis(_smooth_noise((height, width, 2), 2.5, rng), -1, 0)
    return _displace(image, field * (0.5 + 2.0 * severity))


def blotch(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Cloudy tints of 8 to 48 levels, coherent over 5 px."""
    return _clip(image + _smooth_noise(image.shape, 5.0, rng) * (8 + 40 * severity))


def fade(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Contrast shrinks towards the mean colour, by up to 85%."""
    pixels = image.astype(np.float32)
    return _clip(pixels + (0.1 + 0.75 * severity) * (pixels.mean((0, 1)) - pixels))


def streak(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Rows slip sideways against one another by up to about 5 px."""
    slips = np.rint(rng.normal(0, 0.4 + 2.6 * severity, len(image))).astype(int)
    return np.stack([np.roll(row, slip, axis=0) for row, slip in zip(image, slips, strict=True)])


def melt(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """Corners and thin strokes melt: a median over 3 to 9 px, and a slow drift of the outline."""
    size = 3 + 2 * round(3 * severity)
    rounded = ndimage.median_filter(image, size=(size, size, 1))
    height, width, _ = image.shape
    field = np.moveaxis(_smooth_noise((height, width, 2), 6.0, rng), -1, 0)
    return _displace(rounded, field * (0.3 + 1.7 * severity))


def ghost(image: Image, severity: float, rng: np.random.Generator) -> Image:
    """A second, shifted exposure of up to half the weight."""
    shift = rng.integers(3, 8, 2) * rng.choice([-1, 1], 2)
    second = np.roll(image.astype(np.float32), tuple(shift), axis=(0, 1))
    return _clip(image + (0.1 + 0.4 * severity) * (second - image))


FAMILIES: dict[str, tuple[Degradation, ...]] = {
    "hpsv2": (blur, noise, bleed),
    "pickscore": (blocks, wobble, blotch),
    "aesthetic": (fade, streak, melt, ghost),
}


def spoil(image: Image, family: str, severity: float, rng: np.random.Generator) -> Image:
    """The image spoilt in one way of the family, chosen at random."""
    ways = FAMILIES[family]
    return ways[int(rng.integers(len(ways)))](image, severity, rng)
