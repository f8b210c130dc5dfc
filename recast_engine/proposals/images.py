"""Image files from outside: read with care, fitted to the model, kept as PNG."""

from __future__ import annotations

import os
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MAX_IMAGE_BYTES = 32 * 2**20
MAX_PIXELS = 2**25
"""Twice an image of 4096 x 4096; checked before anything is decompressed."""


class UnusableImage(Exception):
    """A file is no image that can be used; the text says why."""


def read_image(
    source: bytes | Path, *, at_least: int = 1, exactly: tuple[int, int] | None = None
) -> Image.Image:
    """The image as RGB, upright, transparency on white.

    Args:
        at_least: pixels that each side must have.
        exactly: (width, height) that it must have.

    Raises:
        UnusableImage: not a PNG, JPEG or WebP, broken or cut off, or of a size that is not allowed.
    """
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if size > MAX_IMAGE_BYTES:
        raise UnusableImage(f"is larger than {MAX_IMAGE_BYTES // 2**20} MiB")
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UnusableImage(f"has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            if image.mode[0] in "IF":
                raise UnusableImage("has more than 8 bits a channel")
            image.load()
            result = _rgb(ImageOps.exif_transpose(image))
    except (UnusableImage, MemoryError):
        raise
    except Image.DecompressionBombError:  # Pillow's own limit, which it checks first
        raise UnusableImage(f"has more than {MAX_PIXELS} pixels") from None
    except Exception:  # noqa: BLE001 - Pillow lets through whatever its parsers trip over
        raise UnusableImage("is no intact PNG, JPEG or WebP image") from None
    if min(result.size) < at_least:
        raise UnusableImage(f"has {result.width} x {result.height} pixels, less than {at_least} a side")
    if exactly is not None and result.size != exactly:
        wanted = f"{exactly[0]} x {exactly[1]}"
        raise UnusableImage(f"has {result.width} x {result.height} pixels instead of {wanted}")
    return result


def _rgb(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def fitted(image: Image.Image, resolution: int) -> NDArray[np.uint8]:
    """uint8 (resolution, resolution, 3): the middle square, resized unless it has that size."""
    return np.asarray(ImageOps.fit(image, (resolution, resolution), Image.Resampling.LANCZOS), np.uint8)


def write_png(image: Image.Image, path: Path) -> None:
    """Write whole or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            image.save(file, format="PNG")
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
