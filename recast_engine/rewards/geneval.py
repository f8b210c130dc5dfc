"""GenEval's published rules for composed scenes, over any detector's boxes.

Source: Ghosh et al., "GenEval: An Object-Focused Framework for Evaluating Text-to-Image Alignment"
(arXiv 2310.11513) and its evaluation script (github.com/djghosh13/geneval). The strict verdict is theirs:

* an object exists when its confidence exceeds a threshold, higher for counting prompts; at most 16 a class;
  of boxes that overlap by more than asked (their option ``max_overlap``, off unless set) the surest stays;
* an ``include`` clause looks at the ``count`` most confident objects of its class, which must exist, all
  have the clause's colour, and all stand in the clause's position to all objects of the clause it names;
* an ``exclude`` clause fails when ``count`` or more objects of its class exist.

A training reward needs a slope, so the *soft* score is the mean over all conditions of the share to which
each is met (objects present, objects of the right colour, pairs in the right position, objects too many).
It equals 1 exactly when the strict verdict is true.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.errors import ConfigError
from recast_engine.prompts import Prompt, Relation
from recast_engine.rewards.base import PartialFailure
from recast_engine.rewards.detection import Box, Detection, Detector
from recast_engine.rewards.vocabulary import VOCABULARIES, Vocabulary

logger = logging.getLogger(__name__)

RELATIONS: tuple[str, ...] = get_args(Relation)


@dataclass(frozen=True)
class Rules:
    """Thresholds; the defaults are GenEval's for its Mask2Former detector.

    Attributes:
        threshold: confidence above which an object exists.
        counting_threshold: the same for prompts tagged "counting", where duplicates would hurt.
        max_objects: most confident objects kept per class.
        max_overlap: intersection over union from which a box doubles a surer one of its class, and goes;
            1 keeps every box.
        slack: share of the summed box sizes that an offset must exceed before it counts as a position.
    """

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0
    slack: float = 0.1


@dataclass(frozen=True)
class Verdict:
    """``strict``: every condition met, as GenEval reports it. ``soft``: mean share met, in [0, 1]."""

    strict: bool
    soft: float


def relative_positions(box: Box, other: Box, slack: float = 0.1) -> set[str]:
    """Where ``box`` lies relative to ``other``: a subset of ``RELATIONS``, two of them on a diagonal.

    The offset of the centres, shortened on each axis by ``slack`` times the summed box sizes, must make up
    more than half of the centres' distance on that axis.
    """
    dx = (box[0] + box[2] - other[0] - other[2]) / 2
    dy = (box[1] + box[3] - other[1] - other[3]) / 2
    distance = math.hypot(dx, dy)
    widths = abs(box[2] - box[0]) + abs(other[2] - other[0])
    heights = abs(box[3] - box[1]) + abs(other[3] - other[1])
    beyond_x = math.copysign(max(abs(dx) - slack * widths, 0.0), dx)
    beyond_y = math.copysign(max(abs(dy) - slack * heights, 0.0), dy)
    if max(abs(beyond_x), abs(beyond_y)) < 1e-3:
        return set()
    reach = {"left of": -beyond_x, "right of": beyond_x, "above": -beyond_y, "below": beyond_y}
    return {relation for relation, value in reach.items() if value / distance > 0.5}


def existing(detections: Sequence[Detection], tag: str | None, rules: Rules) -> dict[str, list[Detection]]:
    """Objects that exist by ``rules``, per class, the most confident first."""
    threshold = rules.counting_threshold if tag == "counting" else rules.threshold
    groups: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.confidence):
        if detection.confidence > threshold:
            groups.setdefault(detection.label, []).append(detection)
    kept = {label: group[: rules.max_objects] for label, group in groups.items()}
    return {label: _distinct(group, rules.max_overlap) for label, group in kept.items()}


def _distinct(group: Sequence[Detection], max_overlap: float) -> list[Detection]:
    """``group``, the most confident first, without boxes that overlap one before them."""
    kept: list[Detection] = []
    for one in group:
        if max_overlap == 1.0 or all(overlap(one.box, other.box) < max_overlap for other in kept):
            kept.append(one)
    return kept


def overlap(box: Box, other: Box) -> float:
    """Intersection over union of two boxes, whose far edges are pixels of theirs, as GenEval counts."""

    def area(x0: float, y0: float, x1: float, y1: float) -> float:
        return max(x1 - x0 + 1, 0.0) * max(y1 - y0 + 1, 0.0)

    shared = area(max(box[0], other[0]), max(box[1], other[1]), min(box[2], other[2]), min(box[3], other[3]))
    return shared / (area(*box) + area(*other) - shared)


def _presence(clause: Mapping[str, Any], found: Sequence[Detection]) -> list[float]:
    """Shares to which an include clause's count and colour conditions are met."""
    count = clause["count"]
    shares = [len(found) / count]
    if "color" in clause:
        shares.append(sum(d.color == clause["color"] for d in found) / count)
    return shares


def _position(
    clause: Mapping[str, Any],
    found: Sequence[Detection],
    targets: Sequence[Detection],
    target_count: int,
    slack: float,
) -> float:
    """Share of the (object, target) pairs asked for that stand in the clause's position."""
    relation = clause["position"][0]
    right = sum(relation in relative_positions(d.box, t.box, slack) for d in found for t in targets)
    asked: int = clause["count"] * target_count
    return right / asked


def judge(detections: Sequence[Detection], prompt: Prompt, rules: Rules | None = None) -> Verdict:
    """How far ``detections`` show the scene that ``prompt.include`` and ``prompt.exclude`` describe.

    Raises:
        ValueError: the prompt has neither clause, or asks for a position outside ``RELATIONS``.
    """
    rules = rules or Rules()
    groups = existing(detections, prompt.tag, rules)
    matches = [groups.get(clause["class"], [])[: clause["count"]] for clause in prompt.include]
    shares: list[float] = []
    for clause, found in zip(prompt.include, matches, strict=True):
        shares += _presence(clause, found)
        if "position" in clause:
            relation, target = clause["position"]
            if relation not in RELATIONS:
                raise ValueError(f"unknown position {relation!r}; known: {', '.join(RELATIONS)}")
            asked = prompt.include[target]["count"]
            shares.append(_position(clause, found, matches[target], asked, rules.slack))
    for clause in prompt.exclude:
        excess = len(groups.get(clause["class"], [])) - (clause["count"] - 1)
        shares.append(1.0 if excess <= 0 else max(0.0, 1.0 - excess / clause["count"]))
    if not shares:
        raise ValueError("the prompt has no include or exclude clause")
    return Verdict(all(share == 1.0 for share in shares), fmean(shares))


class GenEval:
    """The soft GenEval score as a reward; with ``strict`` 1 where every condition is met, and else 0."""

    id = "geneval"

    def __init__(
        self,
        detector: Detector,
        rules: Rules | None = None,
        *,
        strict: bool = False,
        vocabulary: Vocabulary | None = None,
    ):
        """``vocabulary``: what the detector can name; prompts that ask for more have no score."""
        self._detector = detector
        self._vocabulary = vocabulary
        self._rules = rules or Rules()
        self._strict = strict

    def score(self, images: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
        """Scores (N,) in [0, 1].

        Raises:
            PartialFailure: detector or metadata failed on some images, logged; NaN for them.
        """
        scores, failures = np.full(len(images), np.nan), []
        for index, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            if self._vocabulary and (unknown := dict(self._vocabulary.unknown(prompt))):
                names = ", ".join(map(repr, unknown.values()))
                failures.append(f"the detector does not know {names}")
                continue
            try:
                verdict = judge(self._detector(image), prompt, self._rules)
                scores[index] = float(verdict.strict) if self._strict else verdict.soft
            except Exception as error:
                logger.warning("geneval failed on an image: %s", type(error).__name__, exc_info=True)
                failures.append(f"the detector failed ({type(error).__name__})")
        if failures:
            raise PartialFailure(scores, failures[-1])
        return scores


def load(
    world: RewardWorld, device: str, *, strict: bool = False, max_overlap: float = Rules.max_overlap
) -> GenEval:
    """With the detector of the world; ``[options.geneval] strict = true`` asks for GenEval's own verdict.

    Raises:
        ConfigError: ``max_overlap`` is not in (0, 1].
        WeightsUnavailable: the detector's weights or CLIP's are not there.
    """
    if not 0 < max_overlap <= 1:
        raise ConfigError(f"options.geneval.max_overlap must be above 0 and at most 1, got {max_overlap}")
    if world == "miniature":
        from recast_engine.miniature.detector import MiniatureDetector

        # GenEval asks for 0.9 when counting because its detector reports one object several times. The
        # miniature's does not, and its confidence measures how crisp a shape is.
        rules = Rules(counting_threshold=Rules.threshold, max_overlap=max_overlap)
        return GenEval(MiniatureDetector(), rules, strict=strict, vocabulary=VOCABULARIES[world])
    from recast_engine.rewards.mask2former import Mask2FormerDetector

    detector, rules = Mask2FormerDetector.load(device), Rules(max_overlap=max_overlap)
    return GenEval(detector, rules, strict=strict, vocabulary=VOCABULARIES[world])
