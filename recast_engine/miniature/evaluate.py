"""How good the miniature model is: composition by vision, spelling by a recogniser, time by the clock."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast_engine.miniature import world
from recast_engine.miniature.detector import Detection, MiniatureDetector
from recast_engine.miniature.world import Scene

if TYPE_CHECKING:
    from rapidocr.ch_ppocr_rec import TextRecognizer

Images = NDArray[np.uint8]
MIN_CONFIDENCE = 0.3
"""GenEval's threshold for a detection to exist."""


@dataclass(frozen=True)
class Score:
    """`strict`: every demand met (0 or 1). `soft`: share of the demands met, in [0, 1]."""

    strict: float
    soft: float


def _holds(relation: str, first: Detection, second: Detection) -> bool:
    """Whether the centre of `first` lies on the named side of `second`, by at least 8 px."""
    dx = (first.box[0] + first.box[2] - second.box[0] - second.box[2]) / 2
    dy = (first.box[1] + first.box[3] - second.box[1] - second.box[3]) / 2
    offset = {"above": -dy, "below": dy, "left of": -dx, "right of": dx}[relation]
    return offset >= 8


def _relation(scene: Scene, found: Sequence[Detection]) -> Score:
    """Colour and shape of both objects, their relation and their number: six demands."""
    best = 0
    (color, shape), (other_color, other_shape) = scene.objects
    for a in found:
        for b in found:
            if a is b:
                continue
            met = [a.color == color, a.label == shape, b.color == other_color, b.label == other_shape]
            met += [_holds(scene.relation, a, b), len(found) == 2]
            best = max(best, sum(met))
    if len(found) == 1:
        best = max((found[0].color == c) + (found[0].label == s) for c, s in scene.objects)
    return Score(float(best == 6), best / 6)


def composition(scene: Scene, detections: Sequence[Detection]) -> Score:
    """How far the detected objects are those of the scene (any kind but "text")."""
    found = [d for d in detections if d.confidence >= MIN_CONFIDENCE]
    if scene.kind == "relation":
        return _relation(scene, found)
    if not found:
        return Score(0.0, 0.0)
    color, shape = scene.objects[0]
    shares = [
        fmean(d.color == color for d in found),
        fmean(d.label == shape for d in found),
        max(0.0, 1 - abs(len(found) - scene.count) / scene.count),
    ]
    return Score(float(all(share == 1 for share in shares)), fmean(shares))


@cache
def _recognizer() -> TextRecognizer:
    """rapidocr's recogniser alone, on one thread; words here are short, so lines are not padded to 320 px."""
    from rapidocr import RapidOCR

    parameters = {
        "Global.log_level": "error",
        "Global.use_det": False,
        "Global.use_cls": False,
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        "Rec.rec_img_shape": [3, 48, 128],
        "Rec.rec_batch_num": 16,
    }
    engine: Any = RapidOCR(params=parameters)
    engine(np.zeros((48, 128, 3), np.uint8), use_det=False, use_cls=False, use_rec=True)  # loads it
    recognizer: TextRecognizer = engine.text_rec
    return recognizer


def _line(image: Image.Image) -> Images:
    """The band of the image that holds the word, with a margin, enlarged four times, BGR."""
    pixels = np.asarray(image, dtype=np.float32)
    background = np.median(np.concatenate([pixels[:2], pixels[-2:]]).reshape(-1, 3), axis=0)
    rows = np.nonzero((np.abs(pixels - background).max(2) > 60).any(1))[0]
    top, bottom = (rows[0], rows[-1] + 1) if len(rows) >= 4 else (12, 36)
    box = (0, max(0, top - 4), image.width, min(image.height, bottom + 4))
    band = image.crop(box)
    band = band.resize((4 * band.width, 4 * band.height), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(band)[:, :, ::-1])


def read_words(images: Images) -> list[str]:
    """What the recogniser reads in each image [N, 48, 48, 3], letters and digits only, upper case."""
    from rapidocr.ch_ppocr_rec import TextRecInput

    lines = [_line(Image.fromarray(image)) for image in images]
    read = _recognizer()(TextRecInput(img=lines, return_word_box=False))
    return [re.sub(r"[^A-Z0-9]", "", text.upper()) for text in read.txts or ()]


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def spelling(word: str, read: str) -> Score:
    """Exact match, and one minus the edit distance relative to the length of the word (at least 0)."""
    return Score(float(word == read), max(0.0, 1 - edit_distance(word, read) / len(word)))


def score_each(scenes: Sequence[Scene], images: Images) -> list[Score]:
    """One score per image [N, 48, 48, 3]: spelling for words, composition for all else."""
    detector = MiniatureDetector()
    words = [i for i, scene in enumerate(scenes) if scene.kind == "text"]
    reads = dict(zip(words, read_words(images[words]), strict=True)) if words else {}
    return [
        spelling(scene.word, reads[i]) if i in reads else composition(scene, detector(images[i]))
        for i, scene in enumerate(scenes)
    ]


def judge(scenes: Sequence[Scene], images: Images) -> dict[str, Score]:
    """Mean scores by kind; "composition" pools all kinds but text."""
    scores: dict[str, list[Score]] = {}
    for scene, score in zip(scenes, score_each(scenes, images), strict=True):
        scores.setdefault(scene.kind, []).append(score)
        if scene.kind != "text":
            scores.setdefault("composition", []).append(score)
    return {kind: Score(fmean(s.strict for s in v), fmean(s.soft for s in v)) for kind, v in scores.items()}


def balanced_scenes(per_kind: int, seed: int) -> list[Scene]:
    """`per_kind` scenes of every kind, drawn with replacement."""
    rng = random.Random(seed)
    return [world.sample_scene(rng, kind) for kind in world.KIND_WEIGHTS for _ in range(per_kind)]
