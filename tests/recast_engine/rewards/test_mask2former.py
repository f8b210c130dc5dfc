"""GenEval's detector: instances by hand, colours by an open-coded classifier, and the real classes, tiny."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

from recast_engine.errors import WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.clip import ClipEmbedder
from recast_engine.rewards.convert import convert
from recast_engine.rewards.geneval import GenEval, Rules
from recast_engine.rewards.mask2former import (
    ColorNamer,
    Mask2FormerDetector,
    bounding_box,
    instances,
    masked_crop,
)
from recast_engine.rewards.vocabulary import CLASSES, COLORS


def test_instances_by_hand():
    # Two queries, three classes and "no object". Masks of 2 x 2 shown at 2 x 2, so nothing is resized.
    classes = torch.tensor([[4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 2.0]])
    masks = torch.tensor([[[2.0, 2.0], [-3.0, -3.0]], [[1.0, -1.0], [-1.0, -1.0]]])
    found = instances(classes, masks, (2, 2))
    assert len(found) == 6
    total = math.exp(4) + 3
    label, confidence, mask = found[0]
    assert label == 0
    assert confidence == pytest.approx(math.exp(4) / total / (1 + math.exp(-2)), rel=1e-5)
    np.testing.assert_array_equal(mask, [[True, True], [False, False]])
    label, confidence, mask = found[1]
    assert label == 2
    probability = math.exp(2) / (2 + 2 * math.exp(2))
    assert confidence == pytest.approx(probability / (1 + math.exp(-1)), rel=1e-5)
    np.testing.assert_array_equal(mask, [[True, False], [False, False]])
    assert [c for _, c, _ in found] == sorted((c for _, c, _ in found), reverse=True)


def test_an_empty_mask_has_no_confidence_and_no_box():
    found = instances(torch.tensor([[5.0, 0.0]]), torch.full((1, 2, 2), -4.0), (4, 4))
    assert found[0][1] == pytest.approx(0.0, abs=1e-6)
    assert bounding_box(found[0][2]) is None


def test_boxes_close_after_the_last_pixel():
    mask = np.zeros((6, 8), bool)
    mask[2:4, 1:7] = True
    assert bounding_box(mask) == (1.0, 2.0, 7.0, 4.0)


def test_the_crop_is_grey_outside_the_object():
    image = np.full((6, 6, 3), 200, np.uint8)
    mask = np.zeros((6, 6), bool)
    mask[1:3, 2:5] = True
    mask[1, 2] = False
    crop = masked_crop(image, mask, (2.0, 1.0, 5.0, 3.0))
    assert crop.shape == (2, 3, 3)
    assert crop[0, 0].tolist() == [0x99] * 3
    assert (crop[1] == 200).all()


def test_colours_are_the_best_of_the_sentences_mean(clip_folder):
    embedder = ClipEmbedder.load(clip_folder)
    namer = ColorNamer(embedder)
    rng = np.random.default_rng(0)
    mask, box = np.ones((40, 40), bool), (0.0, 0.0, 40.0, 40.0)
    names = set()
    for _ in range(12):
        image = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        pixel = embedder.images(image[None])[0].double().numpy()
        scores = []
        for color in COLORS:
            texts = [
                f"a photo of a {color} dog",
                f"a photo of a {color}-colored dog",
                f"a photo of a {color} object",
            ]
            mean = embedder.texts(texts).double().numpy().mean(0)
            scores.append(mean @ pixel / np.linalg.norm(mean))
        assert namer(image, mask, box, "dog") == COLORS[int(np.argmax(scores))]
        names.add(COLORS[int(np.argmax(scores))])
    assert names <= set(COLORS)


def test_the_classes_are_cocos_under_genevals_names():
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert [CLASSES.index(name) for name in ("person", "computer mouse", "toothbrush")] == [0, 64, 79]


def tiny_model(labels: int = 80) -> Mask2FormerForUniversalSegmentation:
    torch.manual_seed(0)
    backbone = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_layers=1,
        encoder_feedforward_dim=32, dim_feedforward=32, decoder_layers=2, num_attention_heads=2,
        num_queries=5, num_labels=labels,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """What a hub snapshot without safetensors looks like."""
    folder = tmp_path_factory.mktemp("snapshot")
    model = tiny_model()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    Mask2FormerImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 128}, size_divisor=32, num_labels=80
    ).save_pretrained(folder)
    return folder


def test_the_real_classes_load_from_a_converted_snapshot_and_serve_geneval(
    snapshot, tmp_path, monkeypatch, clip_folder
):
    monkeypatch.setenv("RECAST_REWARD_WEIGHTS", str(tmp_path))
    convert("geneval", snapshot)
    embedder = ClipEmbedder.load(clip_folder)
    monkeypatch.setattr(ClipEmbedder, "load", lambda *a, **k: embedder)
    detector = Mask2FormerDetector.load("cpu")
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    found = detector(image)
    assert found
    model, processor = tiny_model().eval(), detector._processor
    with torch.no_grad():
        inputs = processor(images=[image], return_tensors="pt", input_data_format="channels_last")
        out = model(**inputs)
    by_library = processor.post_process_instance_segmentation(out, threshold=0.0, target_sizes=[(48, 64)])[0][
        "segments_info"
    ]
    best = max(info["score"] for info in by_library)
    assert found[0].confidence == pytest.approx(best, rel=0.05)  # the library resizes masks another way
    for one in found:
        x0, y0, x1, y1 = one.box
        assert 0 <= x0 < x1 <= 64
        assert 0 <= y0 < y1 <= 48
        assert one.label in CLASSES
    assert found[0].color in COLORS
    wanted = {"class": found[0].label, "count": 1, "color": found[0].color}
    reward = GenEval(detector, Rules(threshold=found[0].confidence / 2))
    assert reward.score(image[None], [Prompt("x", include=(wanted,))])[0] == 1.0
    strict = GenEval(detector, Rules(threshold=found[0].confidence / 2), strict=True)
    too_many = {"class": found[0].label, "count": 9}
    assert strict.score(image[None], [Prompt("x", include=(too_many,))])[0] == 0.0


def test_a_detector_of_other_classes_is_refused(clip_folder):
    with pytest.raises(WeightsUnavailable, match="7 classes"):
        Mask2FormerDetector(tiny_model(7), None, ColorNamer(ClipEmbedder.load(clip_folder)))
