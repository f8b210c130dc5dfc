"""The detector of GenEval's published evaluation: Mask2Former on COCO, colours by CLIP (arXiv 2310.11513).

Instances are taken as the published evaluation's detector takes them: the 100 best (query, class) pairs by
class probability, each with the mask where its logit is positive, that probability times the mean mask
probability inside as its confidence, and the mask's bounding box.

A colour is the best of ten under CLIP ViT-L/14: three sentences per colour, their embeddings averaged,
against the object's box cut from the image, everything outside the object's mask painted grey (#999).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from recast_engine.errors import WeightsUnavailable
from recast_engine.rewards.clip import OPENAI_CLIP_L, ClipEmbedder
from recast_engine.rewards.detection import Box
from recast_engine.rewards.settings import weights_folder
from recast_engine.rewards.vocabulary import CLASSES, COLORS

REPOSITORY = "facebook/mask2former-swin-small-coco-instance"
"""Swin-S trained for 50 epochs on COCO: the architecture of the published evaluation."""
MAX_INSTANCES = 100
SENTENCES = (
    "a photo of a {color} {label}",
    "a photo of a {color}-colored {label}",
    "a photo of a {color} object",
)
GREY = 0x99


class ColorNamer:
    """Names the colour of a masked object by CLIP."""

    def __init__(self, embedder: ClipEmbedder):
        self._embedder = embedder
        self._classifiers: dict[str, Tensor] = {}

    def __call__(self, image: NDArray[np.uint8], mask: NDArray[np.bool_], box: Box, label: str) -> str:
        """The colour in ``COLORS`` of the ``label`` that ``mask`` (H, W) shows in ``image`` (H, W, 3)."""
        crop = masked_crop(image, mask, box)
        similarity = self._classifier(label) @ self._embedder.images(crop[None])[0]
        return COLORS[int(similarity.argmax())]

    def _classifier(self, label: str) -> Tensor:
        """(10, D): per colour the mean of the sentences' unit embeddings, made a unit vector again."""
        if label not in self._classifiers:
            texts = [s.format(color=color, label=label) for color in COLORS for s in SENTENCES]
            mean = self._embedder.texts(texts).reshape(len(COLORS), len(SENTENCES), -1).mean(1)
            self._classifiers[label] = functional.normalize(mean, dim=-1)
        return self._classifiers[label]


def masked_crop(image: NDArray[np.uint8], mask: NDArray[np.bool_], box: Box) -> NDArray[np.uint8]:
    """The part of ``image`` (H, W, 3) in ``box``, grey outside ``mask`` (H, W); PIL's rounding of the box."""
    alone = np.where(mask[..., None], image, np.uint8(GREY))
    return np.asarray(Image.fromarray(alone).crop(box))


@dataclass
class Instance:
    """One object found; its colour is looked up when it is first asked for."""

    label: str
    confidence: float
    box: Box
    mask: NDArray[np.bool_] = field(repr=False)
    image: NDArray[np.uint8] = field(repr=False)
    namer: ColorNamer = field(repr=False)
    _color: str | None = field(default=None, repr=False)

    @property
    def color(self) -> str:
        """One of ``COLORS``."""
        if self._color is None:
            self._color = self.namer(self.image, self.mask, self.box, self.label)
        return self._color


def instances(
    class_logits: Tensor, mask_logits: Tensor, size: tuple[int, int]
) -> list[tuple[int, float, NDArray[np.bool_]]]:
    """(class, confidence, mask (H, W)) of the instances in Mask2Former's output for one image, best first.

    Args:
        class_logits: (Q, C + 1); the last class is "no object".
        mask_logits: (Q, h, w); resized bilinearly to ``size`` (H, W).
    """
    probability = class_logits.float().softmax(-1)[:, :-1].flatten()
    best = probability.topk(min(MAX_INSTANCES, len(probability)))
    classes = class_logits.shape[-1] - 1
    queries, labels = best.indices // classes, best.indices % classes
    logits = functional.interpolate(
        mask_logits[queries].float()[None], size=size, mode="bilinear", align_corners=False
    )[0]
    masks = logits > 0
    inside = (logits.sigmoid() * masks).flatten(1).sum(1) / (masks.flatten(1).sum(1) + 1e-6)
    confidence = (best.values * inside).cpu()
    order = confidence.argsort(descending=True, stable=True).tolist()
    found, shown = labels.cpu(), masks.cpu().numpy()
    return [(int(found[i]), float(confidence[i]), shown[i]) for i in order]


def bounding_box(mask: NDArray[np.bool_]) -> Box | None:
    """(x0, y0, x1, y1) of the pixels in ``mask`` (H, W), the far edges exclusive; None where it is empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return None
    return (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))


class Mask2FormerDetector:
    """Objects of the 80 COCO classes in images of any size."""

    def __init__(self, model: Any, processor: Any, namer: ColorNamer, *, device: str = "cpu"):
        self._model = model.eval().requires_grad_(False).to(device)
        self._processor, self._namer, self._device = processor, namer, device
        if model.config.num_labels != len(CLASSES):
            raise WeightsUnavailable(f"a detector of {model.config.num_labels} classes, not COCO's 80")

    @classmethod
    def load(cls, device: str) -> Mask2FormerDetector:
        """The converted checkpoint if there is one, else the hub snapshot. Raises WeightsUnavailable."""
        from transformers import Mask2FormerForUniversalSegmentation
        from transformers.models.mask2former.image_processing_pil_mask2former import (
            Mask2FormerImageProcessorPil,
        )

        converted: Path = weights_folder("geneval")
        source: str | Path = converted if converted.is_dir() else REPOSITORY
        try:
            model = Mask2FormerForUniversalSegmentation.from_pretrained(
                source, local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
            processor = Mask2FormerImageProcessorPil.from_pretrained(source, local_files_only=True)
        except (OSError, ValueError) as error:
            raise WeightsUnavailable(
                f"weights of {Path(source).name} are incomplete ({type(error).__name__}): run hf download "
                f"{REPOSITORY}; if it has no safetensors, run recast rewards convert geneval SNAPSHOT"
            ) from error
        embedder = ClipEmbedder.load(OPENAI_CLIP_L, revision="main", device=device)
        return cls(model, processor, ColorNamer(embedder), device=device)

    @torch.no_grad()
    def __call__(self, image: NDArray[np.uint8]) -> Sequence[Instance]:
        """Instances in an RGB image (H, W, 3), the most confident first."""
        inputs = self._processor(images=[image], return_tensors="pt", input_data_format="channels_last")
        pixels = inputs["pixel_values"].to(self._device)
        output = self._model(pixel_values=pixels, pixel_mask=inputs["pixel_mask"].to(self._device))
        masks = functional.interpolate(
            output.masks_queries_logits, size=pixels.shape[-2:], mode="bilinear", align_corners=False
        )[0]
        used = inputs["pixel_mask"][0].bool()  # the image itself, without the padding beside it
        height, width = int(used.any(1).sum()), int(used.any(0).sum())
        found = instances(output.class_queries_logits[0], masks[:, :height, :width], image.shape[:2])
        objects = []
        for label, confidence, mask in found:
            if (box := bounding_box(mask)) is not None:
                objects.append(Instance(CLASSES[label], confidence, box, mask, image, self._namer))
        return objects
