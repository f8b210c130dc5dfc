"""The shipped weights: they load the diffusers way and encode prompts as pretraining did."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open
from transformers import CLIPModel, CLIPProcessor, CLIPTokenizer

from recast_engine.miniature import (
    PIPELINE,
    REWARDS,
    WEIGHTS,
    architecture,
    evaluate,
    reward_weights,
    vae,
    world,
)
from recast_engine.miniature import rewards as judges
from recast_engine.miniature import tokenizer as tokens
from recast_engine.miniature.measure import flow_of

CAPTIONS = ["a red circle above a blue square", 'the word "FISH" in white on blue', "two green triangles", ""]


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    torch.set_num_threads(1)
    loaded = architecture.load_pipeline(PIPELINE)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_the_pipeline_encodes_as_pretraining_did(pipeline: StableDiffusion3Pipeline) -> None:
    with torch.inference_mode():
        sequence, _, pooled, _ = pipeline.encode_prompt(
            CAPTIONS, None, None, do_classifier_free_guidance=False, max_sequence_length=0
        )
        ours = architecture.encode(flow_of(pipeline), architecture.tokenize(tokens.create(), CAPTIONS))
    assert sequence.shape == (4, 14, 160)
    assert torch.equal(sequence, ours[0])
    assert torch.equal(pooled, ours[1])


def test_the_pipeline_samples_as_evaluation_does(pipeline: StableDiffusion3Pipeline) -> None:
    draw = torch.Generator().manual_seed(3)
    noise = torch.randn(3, 4, 12, 12, generator=torch.Generator().manual_seed(3))
    ours = architecture.sample(flow_of(pipeline), CAPTIONS[:3], draw, steps=10)
    theirs = pipeline(
        CAPTIONS[:3],
        num_inference_steps=10,
        guidance_scale=1.0,
        latents=noise,
        max_sequence_length=0,
        output_type="latent",
    ).images
    # Both are float32 Euler steps; the pipeline rounds its timesteps once more.
    torch.testing.assert_close(theirs, ours, atol=2e-3, rtol=0)


def test_default_size_is_the_worlds(pipeline: StableDiffusion3Pipeline) -> None:
    [image] = pipeline(CAPTIONS[0], num_inference_steps=1, guidance_scale=1.0, max_sequence_length=0).images
    assert image.size == (48, 48)


def test_the_base_model_is_about_half_good(pipeline: StableDiffusion3Pipeline) -> None:
    scenes = evaluate.balanced_scenes(24, seed=9)
    captions = [scene.caption for scene in scenes]
    latents = architecture.sample(flow_of(pipeline), captions, torch.Generator().manual_seed(2))
    scores = evaluate.judge(scenes, vae.decode(pipeline.vae, latents))
    # 72 images give a standard error of at most 0.06 on the strict share, 24 words one of 0.1.
    assert 0.2 < scores["composition"].strict < 0.95
    assert scores["text"].soft > 0.4


def test_renders_survive_the_autoencoder(pipeline: StableDiffusion3Pipeline) -> None:
    assert vae.psnr(pipeline.vae, images=64) > 32


def test_the_autoencoder_stays_within_half_precision(pipeline: StableDiffusion3Pipeline) -> None:
    largest: list[float] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: largest.append(out.abs().max().item()))
        for module in pipeline.vae.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.GroupNorm)
    ]
    vae.psnr(pipeline.vae, images=16)
    for hook in hooks:
        hook.remove()
    assert max(largest) < 65504 / 16


def test_captions_fit_and_words_go_letter_by_letter() -> None:
    tokenizer = tokens.create()
    for kind in world.KIND_WEIGHTS:
        for scene in world.every_scene(kind):
            assert len(tokenizer(scene.caption).input_ids) <= tokens.MAX_TOKENS
    for word in world.WORDS:
        assert len(tokenizer(word).input_ids) == len(word) + 2, word


@pytest.mark.parametrize("folder", ["tokenizer", "tokenizer_2"])
def test_saved_tokenizers_equal_the_one_of_pretraining(folder: str) -> None:
    saved = CLIPTokenizer.from_pretrained(PIPELINE / folder)
    assert saved.model_max_length == tokens.MAX_TOKENS
    assert torch.equal(
        architecture.tokenize(saved, CAPTIONS), architecture.tokenize(tokens.create(), CAPTIONS)
    )


@pytest.mark.parametrize("name", REWARDS)
def test_judges_load_the_transformers_way(name: str) -> None:
    folder = reward_weights(name)
    model, processor = (
        CLIPModel.from_pretrained(folder, dtype=torch.float32),
        CLIPProcessor.from_pretrained(folder),
    )
    rng = random.Random(3)
    scenes = evaluate.balanced_scenes(2, seed=1)
    images = [world.render(scene, rng) for scene in scenes]
    captions = [scene.caption for scene in scenes]
    inputs = processor(
        text=captions, images=images, return_tensors="pt", padding="max_length", truncation=True
    )
    with torch.inference_mode():
        out = model(**inputs)
        ours = judges.image_embeddings(model, np.stack([np.asarray(image) for image in images]))
    torch.testing.assert_close(out.image_embeds, ours, atol=1e-5, rtol=0)
    if name != "aesthetic":
        own = judges.scores(model, None, np.stack([np.asarray(i) for i in images]), captions)
        cosine = (out.image_embeds * out.text_embeds).sum(-1)
        torch.testing.assert_close(cosine, own, atol=1e-5, rtol=0)


def test_judges_order_fresh_pairs_and_differ_from_one_another() -> None:
    for name in REWARDS:
        figures = judges.validate(name, *judges.load(reward_weights(name)), size=128)
        key = "pair_accuracy_wrong_scene" if name == "clipscore" else "pair_accuracy_spoilt"
        assert figures[key] > 0.75, (name, figures)


def test_weights_are_small_half_precision_and_measured() -> None:
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20e6
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                kinds = {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118
            assert kinds <= {torch.float16, torch.int64}, path
    card = json.loads((WEIGHTS / "card.json").read_text())
    assert card["megabytes"] <= 20


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, recast_engine.miniature as m; m.prompt_file('train'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
