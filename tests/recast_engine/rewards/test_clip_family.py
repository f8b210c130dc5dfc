"""The CLIP scorers against an open-coded computation with the same weights."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel

from recast_engine import miniature
from recast_engine.errors import WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards.aesthetic import Aesthetic
from recast_engine.rewards.clip import ClipEmbedder
from recast_engine.rewards.clipscore import ClipScore
from recast_engine.rewards.hpsv2 import HPSv2
from recast_engine.rewards.pickscore import PickScore

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
TEXTS = ("a red cat", "dog", "a red cat", "two big blue dogs by a tree", "x")
PROMPTS = [Prompt(text) for text in TEXTS]


@pytest.fixture(scope="module")
def embedder(clip_folder):
    return ClipEmbedder.load(clip_folder)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).integers(0, 256, (5, 48, 40, 3), dtype=np.uint8)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def open_coded(folder, images, texts):
    """Unit image and text embeddings, spelled out: resize, crop, normalise, encode, project, normalise."""
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = []
    for image in images:
        height, width = image.shape[:2]
        scale = 32 / min(height, width)
        size = (int(width * scale), int(height * scale))
        resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
        top, left = (resized.shape[0] - 32) // 2, (resized.shape[1] - 32) // 2
        pixels.append((resized[top : top + 32, left : left + 32] / 255 - MEAN) / STD)
    values = torch.tensor(np.stack(pixels), dtype=torch.float32).permute(0, 3, 1, 2)
    letters = {c: 3 + 2 * i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")}
    rows = []
    for text in texts:
        ids = [letters[c] + (i == len(word) - 1) for word in text.split() for i, c in enumerate(word)]
        ids = [0, *ids[:10], 1]
        rows.append(ids + [1] * (12 - len(ids)))
    with torch.no_grad():
        image = model.visual_projection(model.vision_model(values).pooler_output)
        hidden = model.text_model(torch.tensor(rows)).last_hidden_state
        ends = torch.tensor([row.index(1) for row in rows])
        text = model.text_projection(hidden[torch.arange(len(rows)), ends])
    unit = [
        e.double().numpy() / np.linalg.norm(e.double().numpy(), axis=1, keepdims=True) for e in (image, text)
    ]
    return unit[0], unit[1]


def test_scores_equal_the_open_coded_computation(embedder, clip_folder, images):
    image, text = open_coded(clip_folder, images, TEXTS)
    cosine = (image * text).sum(1)
    np.testing.assert_allclose(ClipScore(embedder).score(images, PROMPTS), cosine, atol=1e-5)
    square = np.pad(images, ((0, 0), (0, 0), (4, 4), (0, 0)))  # 48 x 40 px, filled up with black
    image_on_black, _ = open_coded(clip_folder, square, TEXTS)
    preference = (image_on_black * text).sum(1)
    np.testing.assert_allclose(HPSv2(embedder).score(images, PROMPTS), preference, atol=1e-5)
    np.testing.assert_allclose(HPSv2(embedder).score(square, PROMPTS), preference, atol=1e-5)
    logit = math.exp(1.5) * cosine
    np.testing.assert_allclose(PickScore(embedder).score(images, PROMPTS), logit, atol=1e-5)
    np.testing.assert_allclose(PickScore(embedder, divisor=26).score(images, PROMPTS), logit / 26, atol=1e-6)
    quality = image @ np.linspace(-1, 1, 16) + 5
    np.testing.assert_allclose(
        Aesthetic.load(embedder, clip_folder).score(images, PROMPTS), quality, atol=1e-5
    )


@pytest.mark.parametrize(
    ("height", "width", "resized", "top", "left"),
    [(96, 96, (32, 32), 0, 0), (20, 20, (32, 32), 0, 0), (50, 75, (48, 32), 0, 8), (75, 50, (32, 48), 8, 0)],
)
def test_images_are_resized_as_pil_does_it(embedder, height, width, resized, top, left):
    image = np.random.default_rng(4).integers(0, 256, (height, width, 3), dtype=np.uint8)
    values = embedder._image_processor(images=[image], return_tensors="np")["pixel_values"][0]
    by_pil = np.asarray(Image.fromarray(image).resize(resized, Image.Resampling.BICUBIC))
    by_pil = by_pil[top : top + 32, left : left + 32]
    for row, column in [(0, 0), (0, 31), (17, 5), (31, 31)]:
        expected = (by_pil[row, column] / 255 - MEAN) / STD
        np.testing.assert_allclose(values[:, row, column], expected, atol=1e-5)


def test_features_are_taken_from_whatever_transformers_returns(embedder, images, monkeypatch):
    wrapped = embedder.images(images)
    features = embedder.model.get_image_features

    def plain(**inputs):
        return features(**inputs).pooler_output  # a tensor, as before transformers 5

    monkeypatch.setattr(embedder.model, "get_image_features", plain)
    torch.testing.assert_close(embedder.images(images), wrapped, rtol=0, atol=0)
    texts = ClipEmbedder(embedder.model, embedder._image_processor, embedder._tokenizer)
    wrapped = texts.texts(["a cat"])
    encode = embedder.model.get_text_features
    monkeypatch.setattr(embedder.model, "get_text_features", lambda **inputs: encode(**inputs).pooler_output)
    again = ClipEmbedder(embedder.model, embedder._image_processor, embedder._tokenizer)
    torch.testing.assert_close(again.texts(["a cat"]), wrapped, rtol=0, atol=0)


def aesthetic(embedder: ClipEmbedder) -> Aesthetic:
    return Aesthetic(embedder, torch.linspace(-1, 1, 16)[None], torch.tensor([5.0]))


@pytest.mark.parametrize("build", [ClipScore, HPSv2, PickScore, aesthetic])
def test_a_batch_of_one_equals_a_batch_of_many(build, clip_folder, images):
    many = build(ClipEmbedder.load(clip_folder)).score(images, PROMPTS)
    reward = build(ClipEmbedder.load(clip_folder))
    one = [reward.score(images[i : i + 1], PROMPTS[i : i + 1])[0] for i in range(5)]
    np.testing.assert_allclose(one, many, atol=1e-6)


@pytest.mark.parametrize("build", [ClipScore, HPSv2, PickScore, aesthetic])
def test_no_gradients_and_no_trainable_weights(build, clip_folder, images, monkeypatch):
    embedder = ClipEmbedder.load(clip_folder)
    modes = []
    for name in ("get_image_features", "get_text_features"):
        encode = getattr(embedder.model, name)

        def spy(encode=encode, **inputs):
            modes.append((torch.is_grad_enabled(), embedder.model.training))
            return encode(**inputs)

        monkeypatch.setattr(embedder.model, name, spy)
    with torch.enable_grad():
        build(embedder).score(images, PROMPTS)
    assert modes
    assert set(modes) == {(False, False)}
    assert not any(p.requires_grad for p in embedder.model.parameters())
    assert not embedder.images(images).requires_grad
    assert not embedder.texts(["a cat"]).requires_grad


def test_embeddings_have_unit_length(embedder, images):
    lengths = torch.cat([embedder.images(images), embedder.texts(["a", "bc"])]).norm(dim=1)
    np.testing.assert_allclose(lengths, 1.0, atol=1e-6)


def test_texts_are_encoded_once(clip_folder, monkeypatch):
    embedder = ClipEmbedder.load(clip_folder)
    seen = []
    encode = embedder.model.get_text_features

    def spy(**inputs):
        seen.append(len(inputs["input_ids"]))
        return encode(**inputs)

    monkeypatch.setattr(embedder.model, "get_text_features", spy)
    first = embedder.texts(["a cat", "a dog", "a cat"])
    again = embedder.texts(["a dog", "a cat"])
    assert seen == [1, 1]
    torch.testing.assert_close(first[1], again[0], rtol=0, atol=0)


def test_long_prompts_are_truncated_to_the_context(embedder):
    long = "abcdefghij"  # ten letters fill the context of twelve with start and end
    same = embedder.texts([f"{long[:9]} jklm nop", f"{long[:9]} jxyz"])
    torch.testing.assert_close(same[0], embedder.texts([f"{long[:9]} jzzz qqqqqqqq"])[0])
    assert torch.isfinite(embedder.texts(["word " * 500])).all()


def test_missing_weights_say_so(tmp_path, clip_folder, embedder):
    with pytest.raises(WeightsUnavailable, match="nothing-here"):
        ClipEmbedder.load(tmp_path / "nothing-here")
    partial = tmp_path / "partial"
    shutil.copytree(clip_folder, partial)
    (partial / "model.safetensors").unlink()
    with pytest.raises(WeightsUnavailable, match="partial"):
        ClipEmbedder.load(partial)
    mute = tmp_path / "mute"
    shutil.copytree(clip_folder, mute)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mute / name).unlink()
    with pytest.raises(WeightsUnavailable, match="mute"):
        ClipEmbedder.load(mute)
    with pytest.raises(WeightsUnavailable, match="hf download someone/no-such-model"):
        ClipEmbedder.load("someone/no-such-model", revision="main")
    with pytest.raises(WeightsUnavailable, match="head"):
        Aesthetic.load(embedder, tmp_path)


@pytest.mark.parametrize("name", ["clipscore", "hpsv2", "pickscore"])
def test_packaged_judges_prefer_the_right_caption(name):
    import random

    from recast_engine.miniature import world
    from recast_engine.rewards.scoring import load_scorer

    if not miniature.reward_weights(name).is_dir():
        pytest.skip("the miniature's reward weights are not built yet")
    rng = random.Random(5)
    scenes = [world.sample_scene(rng) for _ in range(64)]
    images = world.render_many(scenes, rng)
    prompts = [Prompt(scene.caption) for scene in scenes]
    scorer = load_scorer([name], "miniature")
    right = scorer(images, prompts).values[0]
    wrong = scorer(images, prompts[1:] + prompts[:1]).values[0]
    assert (right > wrong).mean() > 0.85
