"""LoRA adapters: switching, saving in the diffusers format, loading back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from recast_engine.backbones.sampling import sample
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.config import LoRAConfig
from recast_engine.errors import ConfigError
from recast_engine.training.adapters import (
    EMA,
    OLD,
    POLICY,
    AdapterSet,
    attached,
    load_adapter,
    loaded_adapter,
    save_adapter,
)

LORA = LoRAConfig(rank=4, alpha=8.0)


@pytest.fixture
def backbone(tiny_pipeline: Path) -> SD3Backbone:
    return SD3Backbone.from_pretrained(tiny_pipeline, id="tiny")


@pytest.fixture
def adapters(backbone: SD3Backbone) -> Iterator[AdapterSet]:
    with attached(backbone, LORA, seed=3) as attachment:
        yield attachment


@torch.no_grad()
def _scramble(adapters: AdapterSet, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapters.parameters(name):
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def _velocity(backbone: SD3Backbone) -> Tensor:
    latents = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(1))
    return backbone.velocity(latents, torch.tensor([0.3, 0.8]), backbone.encode_prompts(["a cat", "dogs"]))


def test_every_attention_projection_carries_an_adapter(adapters: AdapterSet) -> None:
    first = {name.split("attn.")[1] for name in adapters.modules if "blocks.0." in name}
    last = {name.split("attn.")[1] for name in adapters.modules if "blocks.1." in name}
    context = {"add_q_proj", "add_k_proj", "add_v_proj"}
    assert first == {"to_q", "to_k", "to_v", "to_out.0", "to_add_out"} | context
    assert last == first - {"to_add_out"}  # the last block has no context output


def test_a_new_adapter_is_gaussian_and_changes_nothing(backbone: SD3Backbone) -> None:
    base = _velocity(backbone)
    with attached(backbone, LoRAConfig(rank=16, alpha=32.0), seed=5) as adapters:
        state = adapters.state(POLICY)
        inner = torch.cat([value.flatten() for name, value in state.items() if "lora_A" in name])
        outer = [value for name, value in state.items() if "lora_B" in name]
        assert float(inner.detach().std()) == pytest.approx(1 / 16, rel=0.05)
        assert not any(value.any() for value in outer)
        for name in (POLICY, OLD, EMA):
            for key, value in adapters.state(name).items():
                assert torch.equal(value, state[key])
            with adapters.using(name):
                assert torch.equal(_velocity(backbone), base)


def test_using_switches_and_restores(backbone: SD3Backbone, adapters: AdapterSet) -> None:
    base = _velocity(backbone)
    for seed, name in enumerate((POLICY, OLD)):
        _scramble(adapters, name, seed)
    assert adapters.active is None
    with adapters.using(POLICY):
        policy = _velocity(backbone)
        with adapters.using(OLD):
            old = _velocity(backbone)
            with adapters.using(None):
                assert torch.equal(_velocity(backbone), base)
            assert torch.equal(_velocity(backbone), old)
        assert adapters.active == POLICY
        assert torch.equal(_velocity(backbone), policy)
    assert torch.equal(_velocity(backbone), base)
    assert min(float((policy - base).abs().max()), float((policy - old).abs().max())) > 0.05
    with pytest.raises(RuntimeError, match="inside"), adapters.using(OLD):
        raise RuntimeError("inside")
    assert adapters.active is None


def test_only_the_policy_is_trained(backbone: SD3Backbone, adapters: AdapterSet) -> None:
    trainable = [name for name, p in backbone.transformer.named_parameters() if p.requires_grad]
    assert len(trainable) == len(adapters.parameters(POLICY))
    assert all(".policy." in name for name in trainable)
    latents, conditioning = torch.ones(1, *backbone.latent_shape), backbone.encode_prompts(["a"])
    with adapters.using(POLICY):
        loss = backbone.velocity(latents, torch.tensor([0.5]), conditioning).square().mean()
    with adapters.using(OLD), torch.no_grad():
        backbone.velocity(latents, torch.tensor([0.5]), conditioning)
    loss.backward()
    # the last block drops its context output, so the query of its context has no effect
    idle = "transformer_blocks.1.attn.add_q_proj.lora_B.weight"
    outer = [p for name, p in adapters.state(POLICY).items() if "lora_B" in name and name != idle]
    assert all(p.grad is not None and bool(p.grad.any()) for p in outer)
    assert all(p.grad is None for name in (OLD, EMA) for p in adapters.parameters(name))


def test_blend(adapters: AdapterSet) -> None:
    _scramble(adapters, POLICY, 1)
    before = {key: value.clone() for key, value in adapters.state(EMA).items()}
    adapters.blend(EMA, POLICY, 0.9)
    for key, value in adapters.state(EMA).items():
        torch.testing.assert_close(value, 0.9 * before[key] + 0.1 * adapters.state(POLICY)[key])
    adapters.blend(OLD, POLICY, 0.0)
    for key, value in adapters.state(OLD).items():
        torch.testing.assert_close(value, adapters.state(POLICY)[key])


def test_detaching_leaves_the_very_model(backbone: SD3Backbone) -> None:
    modules = dict(backbone.transformer.named_modules())
    base = _velocity(backbone)
    weights = {name: value.clone() for name, value in backbone.transformer.state_dict().items()}
    with attached(backbone, LORA) as adapters:
        _scramble(adapters, EMA, 1)
        with adapters.using(EMA):
            _velocity(backbone)
        with pytest.raises(ConfigError, match="already"):
            AdapterSet(backbone, LORA)
    after = dict(backbone.transformer.named_modules())
    assert list(after) == list(modules)
    assert all(after[name] is modules[name] for name in modules)
    assert all(torch.equal(value, weights[name]) for name, value in backbone.transformer.state_dict().items())
    assert torch.equal(_velocity(backbone), base)


def test_custom_targets_and_unknown_ones(backbone: SD3Backbone) -> None:
    with attached(backbone, LoRAConfig(rank=2, alpha=2.0, targets=("to_q",))) as adapters:
        assert [name.rsplit(".", 1)[1] for name in adapters.modules] == ["to_q", "to_q"]
    with pytest.raises(ConfigError, match="no_such_layer"):
        AdapterSet(backbone, LoRAConfig(targets=("no_such_layer",)))
    assert _velocity(backbone).isfinite().all()


def test_a_saved_adapter_loads_back(backbone: SD3Backbone, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "adapter.safetensors"
    with attached(backbone, LoRAConfig(rank=4, alpha=12.0, targets=("to_v",))) as adapters:
        _scramble(adapters, EMA, 1)
        with adapters.using(EMA):
            expected = _velocity(backbone)
        save_adapter(path, adapters.state(EMA), alpha=12.0, provenance={"recast.seed": "7"})
    base = _velocity(backbone)
    loaded = load_adapter(path)
    assert (loaded.rank, loaded.alpha, loaded.metadata["recast.seed"]) == (4, 12.0, "7")
    assert [module.rsplit(".", 1)[1] for module in loaded.modules] == ["to_v", "to_v"]
    with loaded_adapter(backbone, path) as same:
        assert same is backbone
        assert torch.equal(_velocity(backbone), expected)
    with loaded_adapter(backbone, None):
        assert torch.equal(_velocity(backbone), base)
    assert torch.equal(_velocity(backbone), base)


def test_the_same_adapter_is_the_same_bytes(tmp_path: Path) -> None:
    """The library writes metadata in an order that changes from one call to the next."""
    weights = {"to_z.lora_B.weight": torch.ones(8, 2), "to_z.lora_A.weight": torch.arange(16.0).reshape(2, 8)}
    provenance = {f"recast.{name}": name for name in "edcba"}
    for number in range(4):
        save_adapter(tmp_path / f"{number}.safetensors", weights, alpha=2.0, provenance=provenance)
    files = {(tmp_path / f"{number}.safetensors").read_bytes() for number in range(4)}
    assert len(files) == 1
    loaded = load_adapter(tmp_path / "0.safetensors")
    assert {name: loaded.metadata[name] for name in provenance} == provenance
    assert loaded.alpha == 2.0
    for name, tensor in weights.items():
        assert torch.equal(loaded.weights[name], tensor)


def test_files_that_are_no_adapters_are_refused(backbone: SD3Backbone, tmp_path: Path) -> None:
    junk, tensor = tmp_path / "junk.safetensors", tmp_path / "tensor.safetensors"
    junk.write_bytes(b"not safetensors")
    save_file({"transformer.to_q.weight": torch.zeros(2, 2)}, tensor)
    for path, message in ((junk, "readable"), (tensor, "LoRA"), (tmp_path / "absent", "readable")):
        with pytest.raises(ConfigError, match=message):
            load_adapter(path)
    foreign = tmp_path / "foreign.safetensors"
    weights = {"to_z.lora_A.weight": torch.zeros(2, 8), "to_z.lora_B.weight": torch.zeros(8, 2)}
    save_adapter(foreign, weights, alpha=2.0, provenance={})
    with pytest.raises(ConfigError), loaded_adapter(backbone, foreign):
        pass
    assert not hasattr(backbone.transformer, "peft_config")


@pytest.mark.parametrize(
    ("a", "scale", "message"),
    [
        (torch.full((2, 8), torch.nan), "{}", "no finite matrices"),
        (torch.tensor(1.0), "{}", "no finite matrices"),
        (torch.zeros(2, 8), "{", "finite lora_alpha"),
        (torch.zeros(2, 8), "[]", "finite lora_alpha"),
        (torch.zeros(2, 8), '{"transformer.lora_alpha": "wide"}', "finite lora_alpha"),
        (torch.zeros(2, 8), '{"transformer.lora_alpha": NaN}', "finite lora_alpha"),
        (torch.zeros(2, 8), '{"transformer.lora_alpha": 0}', "alpha: Input should be greater than 0"),
        (torch.zeros(0, 8), "{}", "rank: Input should be greater than or equal to 1"),
        (torch.zeros(513, 8), "{}", "rank: Input should be less than or equal to 512"),
        (torch.full((2, 8), torch.nan).to(torch.float8_e4m3fn), "{}", "no finite matrices"),
        (torch.full((2, 8), 1e300, dtype=torch.float64), "{}", "no finite matrices"),
        (torch.zeros(2, 8, dtype=torch.complex64), "{}", "no finite matrices"),
        (torch.zeros(2, 8, dtype=torch.bool), "{}", "no finite matrices"),
    ],
)
def test_adapters_that_could_not_be_computed_with_are_refused(
    tmp_path: Path, a: torch.Tensor, scale: str, message: str
) -> None:
    path = tmp_path / "adapter.safetensors"
    weights = {"transformer.to_q.lora_A.weight": a, "transformer.to_q.lora_B.weight": torch.zeros(8, 2)}
    save_file(weights, path, {"lora_adapter_metadata": scale})
    with pytest.raises(ConfigError, match=message):
        load_adapter(path)


PLAIN_DIFFUSERS = """
import sys, numpy, torch
from diffusers import StableDiffusion3Pipeline
folder, adapter, target = sys.argv[1:]
torch.set_num_threads(1)
pipeline = StableDiffusion3Pipeline.from_pretrained(
    folder, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
pipeline.load_lora_weights(adapter)
images = pipeline(["a cat", "dogs"], num_inference_steps=6, guidance_scale=1.0, max_sequence_length=0,
    generator=[torch.Generator().manual_seed(seed) for seed in (5, 6)], output_type="np").images
numpy.save(target, images)
"""


def test_plain_diffusers_applies_the_adapter_at_full_strength(
    backbone: SD3Backbone, tiny_pipeline: Path, tmp_path: Path
) -> None:
    """Rank 32, alpha 64: loaded in another process that knows nothing of this package."""
    path = tmp_path / "pytorch_lora_weights.safetensors"
    conditioning = backbone.encode_prompts(["a cat", "dogs"])
    with attached(backbone, LoRAConfig(rank=32, alpha=64.0)) as adapters:
        _scramble(adapters, EMA, 1)
        with adapters.using(EMA):
            ours = backbone.decode(sample(backbone, conditioning, [5, 6], steps=6, solver="euler"))
        save_adapter(path, adapters.state(EMA), alpha=64.0, provenance={"recast.seed": "1"})
        half = {k: v / 2 if "lora_B" in k else v for k, v in adapters.state(EMA).items()}
        adapters.load_state(OLD, half)
        with adapters.using(OLD):
            at_half_strength = backbone.decode(
                sample(backbone, conditioning, [5, 6], steps=6, solver="euler")
            )
    command = [
        sys.executable,
        "-c",
        PLAIN_DIFFUSERS,
        str(tiny_pipeline),
        str(path),
        str(tmp_path / "theirs.npy"),
    ]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    theirs = np.load(tmp_path / "theirs.npy") * 255
    assert np.abs(theirs - ours).max() <= 2
    assert np.abs(at_half_strength - theirs).max() > 10
