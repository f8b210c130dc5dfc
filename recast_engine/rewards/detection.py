"""What a detector hands to the composition rules: labelled, coloured boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Box = tuple[float, float, float, float]


class Detection(Protocol):
    """One object found in an image."""

    @property
    def label(self) -> str:
        """Class name, as prompts' ``include`` clauses spell it."""

    @property
    def confidence(self) -> float:
        """In [0, 1]."""

    @property
    def box(self) -> Box:
        """(x0, y0, x1, y1) in pixels, y growing downwards."""

    @property
    def color(self) -> str:
        """Name of the object's colour."""


class Detector(Protocol):
    """Finds objects in one image."""

    def __call__(self, image: NDArray[np.uint8]) -> Sequence[Detection]:
        """Objects in an RGB image (H, W, 3), in any order."""
