"""FLUX.1 and Qwen-Image against the plain diffusers pipelines; what holds for every family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor, nn

from recast_engine.backbones import flux, pipeline
from recast_engine.backbones.catalogue import FAMILIES, PIXELS_PER_TOKEN, Family, flow_sigmas
from recast_engine.backbones.flux import GUIDANCE, FluxBackbone
from recast_engine.backbones.pipeline import PipelineBackbone, PromptCache, pack, resident, unpack
from recast_engine.backbones.qwen_image import QwenImageBackbone
from recast_engine.backbones.sampling import initial_noise, sample
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import LoRAConfig
from recast_engine.errors import ConfigError, InvalidArgument
from recast_engine.training.adapters import EMA, POLICY, attached, load_adapter, save_adapter
from recast_engine.training.loop import train
from tests.recast_engine.training.tiny import PROMPTS as PROMPT_SET
from tests.recast_engine.training.tiny import PixelScorer, Recorder, training_config

PROMPTS = ["a red cat", "dogs", "a red cat", "two fish in a bowl"]
SEEDS = [3, 14, 15, 92]


@dataclass(frozen=True)
class Case:
    """A family's tiny pipeline: ours, the plain one, and what its plain call needs to be without guidance."""

    backbone: PipelineBackbone
    plain: Any
    call: dict[str, Any]
    encode: dict[str, Any]

    def latents(self, prompts: list[str], seeds: list[int], steps: int) -> Tensor:
        """What the plain pipeline draws, as (N, C, h, w)."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        result: Tensor = self.plain(
            prompts, num_inference_steps=steps, generator=generators, output_type="latent", **self.call
        ).images
        return result if result.ndim == 4 else unpack(result, *self.backbone.latent_shape[1:])


def _case(family: Family, folder: Path) -> Case:
    classes: dict[Family, type[PipelineBackbone]] = {
        "sd3": SD3Backbone,
        "flux": FluxBackbone,
        "qwen_image": QwenImageBackbone,
    }
    cls = classes[family]
    size = {"height": 64, "width": 64}
    call, encode, absent = {
        "sd3": (
            {"guidance_scale": 1.0, "max_sequence_length": 0},
            {
                "prompt_2": None,
                "prompt_3": None,
                "do_classifier_free_guidance": False,
                "max_sequence_length": 0,
            },
            {"text_encoder_3": None, "tokenizer_3": None},
        ),
        "flux": ({**size, "guidance_scale": GUIDANCE}, {}, {}),
        "qwen_image": ({**size, "true_cfg_scale": 1.0}, {}, {}),
    }[family]
    plain = cls.pipeline_class.from_pretrained(folder, **absent)
    plain.set_progress_bar_config(disable=True)
    resolution = None if family == "sd3" else 64
    return Case(cls.from_pretrained(folder, id=family, resolution=resolution), plain, call, encode)


@pytest.fixture(scope="module", params=["sd3", "flux", "qwen_image"])
def case(request: pytest.FixtureRequest, tiny_pipeline: Path, tiny_flux: Path, tiny_qwen_image: Path) -> Case:
    folders = {"sd3": tiny_pipeline, "flux": tiny_flux, "qwen_image": tiny_qwen_image}
    return _case(request.param, folders[request.param])


def _close(actual: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * scale)


@torch.no_grad()
def test_prompts_are_encoded_as_the_pipeline_encodes_them(case: Case) -> None:
    conditioning = case.backbone.encode_prompts(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        embeds = case.plain.encode_prompt(prompt, **case.encode)[0][0]
        assert torch.equal(conditioning.embeds[row, : len(embeds)], embeds)
        assert not conditioning.embeds[row, len(embeds) :].any()
        if conditioning.mask is not None:
            assert conditioning.mask[row].tolist() == [
                place < len(embeds) for place in range(conditioning.embeds.shape[1])
            ]


@torch.no_grad()
def test_a_batch_is_encoded_as_the_pipeline_encodes_it(case: Case) -> None:
    conditioning = case.backbone.encode_prompts(PROMPTS)
    batch = case.plain.encode_prompt(PROMPTS, **case.encode)
    _close(conditioning.embeds, batch[0])
    if case.backbone.family == "qwen_image":
        assert conditioning.pooled is None
        assert torch.equal(conditioning.mask, batch[1].bool())
    else:
        assert conditioning.mask is None
        _close(conditioning.pooled, batch[2 if case.backbone.family == "sd3" else 1])


def test_euler_draws_the_pipelines_latents_and_image(case: Case) -> None:
    backbone = case.backbone
    conditioning = backbone.encode_prompts(PROMPTS)
    ours = sample(backbone, conditioning, SEEDS, steps=6, solver="euler")
    _close(ours, case.latents(PROMPTS, SEEDS, steps=6))
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    images = case.plain(
        PROMPTS, num_inference_steps=6, generator=generators, output_type="np", **case.call
    ).images
    assert np.abs(backbone.decode(ours) / 255 - images).max() <= 1 / 255
    assert images.std() > 0.01
    assert not torch.allclose(ours[0], ours[2], atol=0.1)  # the seed matters
    same_seed = sample(backbone, conditioning, [3] * 4, steps=6, solver="euler")
    _close(same_seed[0], same_seed[2])
    assert float((same_seed[0] - same_seed[1]).abs().max()) > 1e-3  # and so does the prompt


def test_an_image_does_not_depend_on_its_neighbours_prompts(case: Case) -> None:
    """Longer prompts beside a short one only lengthen the padding that its mask hides."""
    backbone = case.backbone
    conditioning = backbone.encode_prompts(PROMPTS)
    noise = initial_noise(backbone, SEEDS)
    with torch.no_grad():
        together = backbone.velocity(noise, torch.full((4,), 0.7), conditioning)
        alone = backbone.velocity(noise[1:2], torch.tensor([0.7]), conditioning.select([1]))
    _close(alone[0], together[1])
    assert conditioning.select([1]).mask is None
    assert len(conditioning.select([1, 3, 1])) == 3


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_levels_are_the_pipelines_and_the_catalogues(case: Case, steps: int) -> None:
    backbone, family = case.backbone, FAMILIES[case.backbone.family]
    levels = backbone.sigmas(steps)
    assert levels.shape == (steps + 1,)
    assert (levels.diff() < 0).all()
    if family.shift_terminal is None or steps > 1:  # there diffusers divides by zero
        case.latents(["dogs"], [1], steps)
        assert torch.equal(levels, case.plain.scheduler.sigmas.double())
    shift = family.default_shift(backbone.resolution)
    np.testing.assert_allclose(levels, flow_sigmas(steps, shift, family=backbone.family), atol=1e-6)
    other = flow_sigmas(steps, 1.7, family=backbone.family)
    np.testing.assert_allclose(backbone.sigmas(steps, 1.7), other, atol=1e-6)


@pytest.mark.parametrize(("family", "high"), [("flux", (4096, 1.15)), ("qwen_image", (8192, 0.9))])
@pytest.mark.parametrize("resolution", [512, 1024])
def test_the_shift_grows_with_the_resolution_as_the_pipelines_does(
    family: Family, high: tuple[int, float], resolution: int
) -> None:
    tokens = (resolution // PIXELS_PER_TOKEN) ** 2
    mu = calculate_shift(tokens, 256, high[0], 0.5, high[1])
    assert FAMILIES[family].default_shift(resolution) == pytest.approx(np.exp(mu), rel=1e-12)


def test_the_published_shifts() -> None:
    """FLUX.1 at 1024 pixels has 4096 tokens, a log-shift of 1.15; at 256 pixels 256 tokens and 0.5."""
    assert FAMILIES["flux"].default_shift(1024) == pytest.approx(np.exp(1.15))
    assert FAMILIES["flux"].default_shift(256) == pytest.approx(np.exp(0.5))
    assert FAMILIES["sd3"].default_shift(256) == FAMILIES["sd3"].default_shift(1024) == 3.0


def test_packing_is_the_pipelines_and_reversible(case: Case) -> None:
    latents = torch.arange(2 * 4 * 6 * 8.0).reshape(2, 4, 6, 8)
    assert torch.equal(unpack(pack(latents), 6, 8), latents)
    if case.backbone.family != "sd3":
        assert torch.equal(pack(latents), case.plain._pack_latents(latents, 2, 4, 6, 8))


def test_images_are_encoded_by_the_autoencoders_mean(case: Case) -> None:
    backbone = case.backbone
    side = backbone.resolution
    images = np.random.default_rng(0).integers(0, 256, (3, side, side, 3), dtype=np.uint8)
    pixels = case.plain.image_processor.preprocess(images / np.float32(255))
    config = case.plain.vae.config
    with torch.no_grad():
        if backbone.family == "qwen_image":
            mean = case.plain.vae.encode(pixels[:, :, None]).latent_dist.mode()
            where, spread = (
                torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std)
            )
            expected = ((mean - where) / spread)[:, :, 0]
        else:
            expected = (
                case.plain.vae.encode(pixels).latent_dist.mode() - config.shift_factor
            ) * config.scaling_factor
    latents = backbone.encode_images(images)
    assert latents.shape == (3, *backbone.latent_shape)
    _close(latents, expected)
    with pytest.raises(InvalidArgument, match="images"):
        backbone.encode_images(images[:, ::2])


def test_encoding_undoes_decoding(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an autoencoder that loses nothing: what is left is the family's scaling of latents."""
    backbone = case.backbone
    monkeypatch.setattr(backbone.vae, "decode", lambda z: SimpleNamespace(sample=z))
    lossless = lambda x: SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: x))  # noqa: E731
    monkeypatch.setattr(backbone.vae, "encode", lossless)
    latents = initial_noise(backbone, SEEDS)
    decoded = backbone._decode(latents)
    assert float((decoded - latents).abs().max()) > 0.1
    torch.testing.assert_close(backbone._encode_pixels(decoded), latents)


def test_images_are_decoded_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have seams, which rewards would see."""
    monkeypatch.setattr(case.plain.vae, "use_tiling", False)
    case.plain.vae.enable_tiling()
    assert type(case.backbone)(case.plain, id="tiled").vae.use_tiling is False


def test_text_encoders_are_on_the_device_only_while_new_prompts_are_encoded(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, visits = case.backbone, []

    @contextmanager
    def watched(modules: Any, device: torch.device) -> Iterator[None]:
        visits.append("on")
        with resident(modules, device):
            yield
        visits.append("off")

    monkeypatch.setattr(pipeline, "resident", watched)
    first = backbone.encode_prompts(["a new one", "another"])
    again = backbone.encode_prompts(["another", "a new one"])
    assert visits == ["on", "off"]
    length = again.embeds.shape[1]
    assert torch.equal(first.embeds[:, :length], again.embeds[[1, 0]])
    encoders = [getattr(backbone.pipeline, name) for name in backbone.text_encoders]
    assert backbone._encoders == [encoder for encoder in encoders if encoder is not None]


def test_what_was_resident_goes_back_where_it_was_even_after_an_error() -> None:
    """A dtype stands in for the device, which ``to`` takes too: its copy is another tensor as well."""
    module = torch.nn.Linear(2, 2).requires_grad_(False)
    module.register_buffer("offset", torch.ones(2))
    home = {name: value.data_ptr() for name, value in module.state_dict().items()}

    def use() -> None:
        with resident([module], torch.float64):  # type: ignore[arg-type]
            assert module(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
            assert module.offset.dtype == torch.float64
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        use()
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == home
    assert module.weight.dtype == module.offset.dtype == torch.float32


@pytest.fixture
def adapted(case: Case) -> Iterator[Any]:
    with attached(case.backbone, LoRAConfig(rank=4, alpha=12.0), seed=3) as adapters:
        generator = torch.Generator().manual_seed(1)
        for name in (POLICY, EMA):
            for parameter in adapters.parameters(name):
                parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        yield adapters


def test_lora_attaches_to_every_attention_projection_and_learns(case: Case, adapted: Any) -> None:
    backbone, targets = case.backbone, FAMILIES[case.backbone.family].lora_targets
    assert backbone.lora_targets == targets
    attention = {
        name
        for name, module in backbone.transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and ".attn." in name.removesuffix(".base_layer")
        if not name.split(".")[-2].startswith("lora_")
    }
    assert {name.removesuffix(".base_layer") for name in attention} - set(adapted.modules) == set()
    assert {name.split(".attn.")[1] for name in adapted.modules} <= set(targets)
    conditioning = backbone.encode_prompts(["dogs", "a red cat"])
    noise = initial_noise(backbone, [1, 2])
    with adapted.using(POLICY):
        backbone.velocity(noise, torch.tensor([0.4, 0.8]), conditioning).square().mean().backward()
    silent = [
        name for name, value in adapted.state(POLICY).items() if value.grad is None or not value.grad.any()
    ]
    # the last joint block throws its text stream away, and with it whatever only feeds that
    last = f"transformer_blocks.{len(backbone.transformer.transformer_blocks) - 1}.attn."
    assert all(name.startswith(last) and "add" in name for name in silent), silent


def test_a_saved_adapter_has_the_same_effect_in_the_plain_pipeline(
    case: Case, adapted: Any, tmp_path: Path
) -> None:
    backbone, prompts, seeds = case.backbone, PROMPTS[:2], SEEDS[:2]
    base = case.latents(prompts, seeds, steps=4)
    with adapted.using(EMA):
        ours = sample(backbone, backbone.encode_prompts(prompts), seeds, steps=4, solver="euler")
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_adapter(path, adapted.state(EMA), alpha=12.0, provenance={})
    case.plain.load_lora_weights(path)
    try:
        theirs = case.latents(prompts, seeds, steps=4)
    finally:
        case.plain.unload_lora_weights()
    _close(ours, theirs)
    assert float((theirs - base).abs().max()) > 0.02
    _close(case.latents(prompts, seeds, steps=4), base)


def test_a_whole_training_and_the_same_one_resumed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop knows no family; a module without any effect, hence without gradients, resumes too.

    The second epoch, resumed, keeps no activations: each layer runs once more per backward pass, to the same
    bits.
    """
    monkeypatch.setattr(flux, "T5_TOKENS", 16)  # quicker
    monkeypatch.setattr(case.backbone, "_prompts", PromptCache())
    config = training_config({"redness": 1.0}, 2)

    calls = {"without": 0, "with": 0}

    def count(*_: Any) -> None:
        if torch.is_grad_enabled():
            calls["with" if case.backbone.transformer.gradient_checkpointing else "without"] += 1

    layer = next(m for m in case.backbone.transformer.modules() if isinstance(m, nn.ModuleList))[0]
    watch = layer.register_forward_pre_hook(count)

    def adapter(workdir: Path, *, again: bool = False, **options: Any) -> dict[str, Tensor]:
        arguments = {"observer": Recorder(), "workdir": workdir, **options}
        asked = replace(config, gradient_checkpointing=again)
        result = train(case.backbone, PixelScorer("redness"), PROMPT_SET, asked, **arguments)
        return load_adapter(result.adapter).weights

    whole = adapter(tmp_path / "whole")
    first = tmp_path / "whole" / "checkpoints" / "epoch-000001"
    resumed = adapter(tmp_path / "resumed", again=True, resume_from=first)
    watch.remove()
    assert not case.backbone.transformer.gradient_checkpointing
    assert calls["with"] == calls["without"] > 0  # one epoch of two, each layer twice
    assert any(value.any() for name, value in whole.items() if "lora_B" in name)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_the_guidance_embedding_is_an_input_of_flux(tiny_flux: Path) -> None:
    weak = FluxBackbone.from_pretrained(tiny_flux, id="flux", resolution=64, guidance=1.0)
    strong = FluxBackbone.from_pretrained(tiny_flux, id="flux", resolution=64)
    assert (weak.guidance, strong.guidance) == (1.0, 3.5)
    conditioning, noise = weak.encode_prompts(["dogs"]), initial_noise(weak, [1])
    with torch.no_grad():
        levels = [b.velocity(noise, torch.tensor([0.5]), conditioning) for b in (weak, strong)]
    assert float((levels[0] - levels[1]).abs().max()) > 1e-4


def test_a_resolution_that_does_not_divide_into_patches_is_refused(tiny_flux: Path) -> None:
    with pytest.raises(ConfigError, match="resolution: 72 is no multiple of 16"):
        FluxBackbone.from_pretrained(tiny_flux, id="flux", resolution=72)
