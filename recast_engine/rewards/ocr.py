"""Whether an image spells its prompt's target: rapidocr's recogniser against it.

The target is the prompt's ``text``, or else its first quoted span. The score is max(0, 1 - d / n): d the edit
distance between what was read and the target, n the target's length, both without spaces and case, as
text-rendering rewards are published (Flow-GRPO, arXiv 2505.05470). As there, a target that stands somewhere
within what a large image says counts as read without error: a scene may show other words too.

Small images (below 256 px) are one line of large type: the band that differs from the border's colour is
enlarged and given to the recogniser alone, many at once. Larger images go through text detection first.
"""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.prompts import Prompt
from recast_engine.rewards.base import PartialFailure

logger = logging.getLogger(__name__)

SMALL = 256
"""Images with a shorter side below this many pixels are read by the recogniser alone."""
LINE_HEIGHT = 48
"""Height in pixels at which the recogniser reads a line."""
LINE_WIDTH = 128
"""Width that lines are padded to; the recogniser's own 320 would cost more than twice as much."""

_CONTRAST = 60  # difference from the border's colour, of 255, that counts as ink
_MARGIN = 0.08  # kept around the ink, as a share of the image's height


class Reader(Protocol):
    """Reads one line of text from each of several BGR crops."""

    def __call__(self, lines: Sequence[NDArray[np.uint8]]) -> list[str]: ...


def threads() -> int:
    """Cores this process may use: RECAST_ENGINE_THREADS, else OMP_NUM_THREADS, else all of them."""
    value = os.environ.get("RECAST_ENGINE_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return int(value) if value else os.cpu_count() or 1


def normalise(text: str) -> str:
    """``text`` without white space, case and compatibility variants (full-width letters, ligatures)."""
    return "".join(unicodedata.normalize("NFKC", text).split()).casefold()


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: fewest insertions, deletions and substitutions that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def similarity(read: str, target: str, *, within: bool = False) -> float:
    """max(0, 1 - edit distance / length of the target), in [0, 1].

    Args:
        within: a target that is part of what was read is 1, whatever else was read.

    Raises:
        ValueError: a blank target.
    """
    wanted, found = normalise(target), normalise(read)
    if not wanted:
        raise ValueError("the target text is blank")
    if within and wanted in found:
        return 1.0
    return max(0.0, 1.0 - edit_distance(found, wanted) / len(wanted))


def text_line(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The rows of an RGB image (H, W, 3) that hold ink, enlarged to twice the line height, as BGR.

    The band is at least so high that the line needs no more than ``LINE_WIDTH``: the recogniser pads a
    batch to its widest line, and an image's reading must not depend on its neighbours. An image without
    ink gives its middle half, in which the recogniser then reads nothing, or noise.
    """
    height, width, _ = image.shape
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    distance = np.abs(image.astype(np.int16) - np.median(border, axis=0)).max(axis=2)
    rows = np.nonzero((distance > _CONTRAST).any(axis=1))[0]
    first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) > 2 else (height // 4, height - height // 4)
    margin = round(_MARGIN * height)
    short = max(0, -(-width * LINE_HEIGHT // LINE_WIDTH) - (last - first + 2 * margin))
    margin += -(-short // 2)
    top, bottom = max(0, first - margin), min(height, last + margin)
    band = Image.fromarray(image[top:bottom])
    size = (max(1, round(width * 2 * LINE_HEIGHT / (bottom - top))), 2 * LINE_HEIGHT)
    return np.ascontiguousarray(np.asarray(band.resize(size, Image.Resampling.BICUBIC))[:, :, ::-1])


def _parameters() -> dict[str, Any]:
    return {
        "Global.log_level": "error",
        "EngineConfig.onnxruntime.intra_op_num_threads": threads(),
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }


class LineReader:
    """rapidocr's recogniser without text detection; batches of 32."""

    def __init__(self) -> None:
        from rapidocr import RapidOCR

        shape = {"Rec.rec_img_shape": [3, LINE_HEIGHT, LINE_WIDTH], "Rec.rec_batch_num": 32}
        engine: Any = RapidOCR(params=_parameters() | shape)
        blank = np.zeros((LINE_HEIGHT, LINE_WIDTH, 3), np.uint8)
        engine(blank, use_det=False, use_cls=False, use_rec=True)  # the recogniser exists after a first call
        self._recognizer = engine.text_rec

    def __call__(self, lines: Sequence[NDArray[np.uint8]]) -> list[str]:
        """What each BGR line (h, w, 3) says; "" where nothing was recognised."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        result = self._recognizer(TextRecInput(img=list(lines), return_word_box=False))
        return [str(text) for text in result.txts]


class PageReader:
    """rapidocr's whole pipeline on each image: detection, orientation, recognition of every line."""

    def __init__(self) -> None:
        from rapidocr import RapidOCR

        self._engine: Any = RapidOCR(params=_parameters())

    def __call__(self, lines: Sequence[NDArray[np.uint8]]) -> list[str]:
        """All lines of each BGR image (H, W, 3), in reading order, joined; "" where none was found."""
        return [" ".join(self._engine(image).txts or ()) for image in lines]


class OCR:
    """Spelling accuracy as a reward; readers are created when first needed."""

    id = "ocr"
    lane = "cpu"

    def __init__(self, line_reader: Reader | None = None, page_reader: Reader | None = None):
        self._line_reader = line_reader
        self._page_reader = page_reader

    def read(self, images: NDArray[np.uint8]) -> list[str | None]:
        """What is written in each RGB image (N, H, W, 3); None, logged, where the reader failed."""
        return self._read(images, [])

    def _read(self, images: NDArray[np.uint8], failures: list[str]) -> list[str | None]:
        if min(images.shape[1:3]) < SMALL:
            self._line_reader = self._line_reader or LineReader()
            return _read(self._line_reader, [text_line(image) for image in images], failures)
        self._page_reader = self._page_reader or PageReader()
        pages = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
        return _read(self._page_reader, pages, failures)

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,) in [0, 1].

        Raises:
            PartialFailure: the reader failed on some images, or a prompt has no target; NaN for them.
        """
        scores, failures = np.full(len(images), np.nan), list[str]()
        scene = min(images.shape[1:3]) >= SMALL
        for index, (read, prompt) in enumerate(zip(self._read(images, failures), prompts, strict=True)):
            if prompt.target is None:
                failures.append("a prompt has no target text")
            elif read is not None:
                scores[index] = similarity(read, prompt.target, within=scene)
        if failures:
            raise PartialFailure(scores, failures[-1])
        return scores


def _read(reader: Reader, crops: Sequence[NDArray[np.uint8]], failures: list[str]) -> list[str | None]:
    """All crops at once; after a failure one by one, so that only the crops at fault are lost.

    ``failures`` gets a text for each of them.
    """
    if not crops:
        return []
    try:
        return list(reader(crops))
    except Exception as error:
        logger.warning(
            "text recogniser failed on %d images: %s", len(crops), type(error).__name__, exc_info=True
        )
        if len(crops) == 1:
            failures.append(f"the text recogniser failed ({type(error).__name__})")
            return [None]
    return [text for crop in crops for text in _read(reader, [crop], failures)]


def load(world: RewardWorld, device: str) -> OCR:
    """Readers on the CPU, whatever ``device``."""
    return OCR()
