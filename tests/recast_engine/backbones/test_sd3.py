"""The SD3 backbone against the plain diffusers pipeline."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging

from recast_engine.backbones import pipeline
from recast_engine.backbones.catalogue import flow_sigmas
from recast_engine.backbones.load import load_backbone
from recast_engine.backbones.sampling import initial_noise, sample
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.errors import InvalidArgument

PROMPTS = ["red cat", "a dog", "red cat", "two fish"]


@pytest.fixture(scope="module")
def backbone(tiny_pipeline: Path) -> SD3Backbone:
    return SD3Backbone.from_pretrained(tiny_pipeline, id="tiny")


@pytest.fixture(scope="module")
def plain(tiny_pipeline: Path) -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        tiny_pipeline, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_loads_in_float32_and_frozen(backbone: SD3Backbone) -> None:
    assert backbone.dtype == torch.float32
    assert backbone.latent_shape == (4, 4, 4)
    assert not any(parameter.requires_grad for parameter in backbone.transformer.parameters())


@torch.no_grad()
def test_encoding_is_the_pipelines(backbone: SD3Backbone, plain: StableDiffusion3Pipeline) -> None:
    conditioning = backbone.encode_prompts(PROMPTS)
    assert conditioning.embeds.shape == (4, 12, 40)  # CLIP's tokens alone: no padding tokens of an absent T5
    assert conditioning.mask is None
    for row, prompt in enumerate(PROMPTS):
        embeds, _, pooled, _ = plain.encode_prompt(
            prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=0
        )
        assert torch.equal(conditioning.embeds[row], embeds[0])
        assert torch.equal(conditioning.pooled[row], pooled[0])


def test_the_bits_of_an_encoding_do_not_depend_on_what_else_is_encoded() -> None:
    """With a model large enough for kernels to differ by batch: the miniature, whose pooled row did."""
    prompts = [f"{count} {color} squares" for count in ("two", "four") for color in ("red", "blue", "green")]
    together = load_backbone("miniature").encode_prompts(prompts)
    alone = load_backbone("miniature")
    for row, prompt in reversed(list(enumerate(prompts))):
        encoded = alone.encode_prompts([prompt])
        assert torch.equal(encoded.embeds[0], together.embeds[row])
        assert torch.equal(encoded.pooled[0], together.pooled[row])


def test_loading_is_quiet_and_leaves_the_bars_of_others(
    tiny_pipeline: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        SD3Backbone.from_pretrained(tiny_pipeline, id="tiny")
    assert "Loading" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_prompts_are_encoded_once_and_the_cache_is_bounded(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = SD3Backbone.from_pretrained(tiny_pipeline, id="tiny")
    asked: list[str] = []
    encode = backbone.pipeline.encode_prompt

    def counting(prompts: list[str], *args: object, **kwargs: object) -> object:
        asked.extend(prompts)
        return encode(prompts, *args, **kwargs)

    monkeypatch.setattr(backbone.pipeline, "encode_prompt", counting)
    first = backbone.encode_prompts(PROMPTS)
    again = backbone.encode_prompts(PROMPTS)
    assert asked == ["red cat", "a dog", "two fish"]
    assert torch.equal(first.embeds, again.embeds)
    monkeypatch.setattr(pipeline, "CACHE_BYTES", first.embeds[0].nbytes + first.pooled[0].nbytes)
    assert len(backbone.encode_prompts(["a b", "c d", "e f"])) == 3
    asked.clear()
    backbone.encode_prompts(["e f", "a b"])
    assert asked == ["a b"]


@pytest.mark.parametrize("steps", [1, 2, 10, 40])
def test_sigmas_are_the_schedulers(
    backbone: SD3Backbone, plain: StableDiffusion3Pipeline, steps: int
) -> None:
    plain.scheduler.set_timesteps(steps)
    assert torch.equal(backbone.sigmas(steps), plain.scheduler.sigmas.double())
    np.testing.assert_allclose(backbone.sigmas(steps), flow_sigmas(steps, 3.0), atol=1e-6)
    np.testing.assert_allclose(backbone.sigmas(steps, 1.5), flow_sigmas(steps, 1.5), atol=1e-6)


@pytest.mark.parametrize("shift", [0.01, 0.15, 0.2, 100.0])
def test_sigmas_of_any_shift_begin_at_pure_noise(backbone: SD3Backbone, shift: float) -> None:
    """The scheduler's float32 would begin at 1.0000954 for a shift of 0.01, where no profile has a gain."""
    levels = backbone.sigmas(25, shift)
    assert levels[0] == 1.0
    np.testing.assert_allclose(levels, flow_sigmas(25, shift), atol=5e-6)


def test_decode_is_the_image_processors(backbone: SD3Backbone, plain: StableDiffusion3Pipeline) -> None:
    latents = initial_noise(backbone, [1, 2, 3])
    with torch.no_grad():
        pixels = plain.vae.decode(latents / 1.5 + 0.1).sample
    expected = np.stack([np.asarray(image) for image in plain.image_processor.postprocess(pixels)])
    images = backbone.decode(latents)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images, expected)


def test_decoding_in_parts_changes_nothing(backbone: SD3Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = initial_noise(backbone, range(5))
    whole = backbone.decode(latents).astype(int)
    monkeypatch.setattr(pipeline, "DECODE_PIXELS", 2 * 16 * 16)
    assert np.abs(backbone.decode(latents) - whole).max() <= 1


def test_euler_reproduces_a_plain_pipeline_call(
    backbone: SD3Backbone, plain: StableDiffusion3Pipeline
) -> None:
    seeds = [3, 14, 15, 92]
    expected = plain(
        PROMPTS,
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=0,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="np",
    ).images
    conditioning = backbone.encode_prompts(PROMPTS)
    images = backbone.decode(sample(backbone, conditioning, seeds, steps=8, solver="euler"))
    assert images.std() > 1
    assert np.abs(images / 255 - expected).max() <= 1 / 255


def test_evaluations_are_counted_per_image(backbone: SD3Backbone) -> None:
    before = backbone.evaluations
    sample(backbone, backbone.encode_prompts(PROMPTS), [1, 2, 3, 4], steps=5, batch_size=3)
    assert backbone.evaluations - before == 20


def test_encoding_images_is_the_pipelines_own_arithmetic(
    backbone: SD3Backbone, plain: StableDiffusion3Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    with torch.no_grad():
        pixels = plain.image_processor.preprocess(images / np.float32(255))
        expected = (plain.vae.encode(pixels).latent_dist.mode() - 0.1) * 1.5  # the fixture's shift and scale
    latents = backbone.encode_images(images)
    assert latents.shape == (5, *backbone.latent_shape)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    monkeypatch.setattr(pipeline, "DECODE_PIXELS", 2 * 16 * 16)
    torch.testing.assert_close(backbone.encode_images(images), latents, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((1, 16, 16, 3), dtype=np.float32),
        np.zeros((1, 8, 16, 3), dtype=np.uint8),
        np.zeros((1, 3, 16, 16), dtype=np.uint8),
        np.zeros((16, 16, 3), dtype=np.uint8),
    ],
)
def test_images_of_another_shape_are_not_encoded(backbone: SD3Backbone, images: np.ndarray) -> None:
    with pytest.raises(InvalidArgument, match="images"):
        backbone.encode_images(images)
