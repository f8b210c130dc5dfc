"""Proposals drawn here: by a base model of the catalogue, and by any pipeline in the local cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from huggingface_hub import constants

from recast_engine.backbones.base import Backbone
from recast_engine.backbones.load import load_backbone
from recast_engine.config import ProposalConfig
from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.observer import Stopped
from recast_engine.prompts import Prompt
from recast_engine.proposals.collection import collect
from recast_engine.proposals.keys import image_key, image_seed, prompt_key
from tests.recast_engine.proposals.heard import Heard

PROMPTS = [Prompt("a red circle"), Prompt("two green triangles"), Prompt("a blue square")]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def miniature() -> Backbone:
    return load_backbone("miniature")


@pytest.fixture
def hub(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of ``someone/tiny``, a pipeline of 16 x 16 pixels, in a hub cache of its own."""
    cache = tmp_path / "hub"
    repository = cache / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(tiny_pipeline, snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return snapshot


def test_the_base_itself_draws_each_image_from_a_seed_of_its_own(miniature: Backbone, tmp_path: Path) -> None:
    config = ProposalConfig(source="diffusers", model="miniature", steps=4)
    heard = Heard()
    before = miniature.evaluations
    proposals = collect(config, PROMPTS, 2, cache=tmp_path, resolution=48, observer=heard, backbone=miniature)
    assert miniature.evaluations - before == heard.evaluations == 6 * 4
    assert heard.bought == len(heard.files) == 6
    images = np.concatenate([proposals.images(prompt) for prompt in PROMPTS])
    assert images.shape == (6, 48, 48, 3)
    assert len({image.tobytes() for image in images}) == 6
    alone = tmp_path / "alone"
    again = collect(config, PROMPTS[2:], 1, cache=alone, resolution=48, backbone=miniature)
    difference = again.images(PROMPTS[2])[0].astype(int) - images[4]
    assert np.abs(difference).max() <= 2  # the same seed, in a batch of another size


def test_stopping_keeps_what_was_drawn(miniature: Backbone, tmp_path: Path) -> None:
    config = ProposalConfig(source="diffusers", model="miniature", steps=2)
    first, rest = Heard(stop_after=2), Heard()
    with pytest.raises(Stopped):
        collect(config, PROMPTS, 2, cache=tmp_path, resolution=48, observer=first, backbone=miniature)
    collect(config, PROMPTS, 2, cache=tmp_path, resolution=48, observer=rest, backbone=miniature)
    assert (len(first.files), len(rest.files)) == (2, 4)
    assert not set(first.files) & set(rest.files)


def test_any_cached_pipeline_draws_what_a_plain_call_draws(hub: Path, tmp_path: Path) -> None:
    config = ProposalConfig(source="diffusers", model="someone/tiny", steps=3, size=16)
    proposals = collect(config, PROMPTS[:2], 1, cache=tmp_path / "cache", resolution=16)
    plain = StableDiffusion3Pipeline.from_pretrained(
        hub, text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32
    )
    plain.set_progress_bar_config(disable=True)
    for prompt in PROMPTS[:2]:
        seed = image_seed(image_key(prompt_key(config, prompt.prompt), 0))
        generator = torch.Generator().manual_seed(seed)
        expected = np.asarray(plain(prompt.prompt, num_inference_steps=3, generator=generator).images[0])
        assert np.abs(proposals.images(prompt)[0].astype(int) - expected).max() <= 2


def test_a_pipeline_that_draws_too_small_is_refused(hub: Path, tmp_path: Path) -> None:
    config = ProposalConfig(source="diffusers", model="someone/tiny", steps=1)
    with pytest.raises(ConfigError, match="someone/tiny draws 16 x 16 pixels, less than 48 a side"):
        collect(config, PROMPTS, 1, cache=tmp_path / "cache", resolution=48)


def test_a_model_that_is_not_cached_names_the_remedy(hub: Path, tmp_path: Path) -> None:
    config = ProposalConfig(source="diffusers", model="someone/else")
    with pytest.raises(WeightsUnavailable, match="run hf download someone/else"):
        collect(config, PROMPTS, 1, cache=tmp_path / "cache", resolution=16)


def test_pickled_weights_are_never_loaded(hub: Path, tmp_path: Path) -> None:
    weights = hub / "transformer" / "diffusion_pytorch_model.safetensors"
    torch.save({"x": torch.zeros(1)}, weights.with_suffix(".bin"))
    weights.unlink()
    config = ProposalConfig(source="diffusers", model="someone/tiny")
    with pytest.raises(WeightsUnavailable, match="without safetensors"):
        collect(config, PROMPTS, 1, cache=tmp_path / "cache", resolution=16)


@pytest.mark.parametrize("name", [["pipeline", "Mine"], "AutoencoderKL", "os", "Mine"])
def test_only_pipelines_of_diffusers_itself_are_run(hub: Path, tmp_path: Path, name: object) -> None:
    (hub / "pipeline.py").write_text("raise AssertionError('remote code ran')")
    index = json.loads((hub / "model_index.json").read_text())
    (hub / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    config = ProposalConfig(source="diffusers", model="someone/tiny")
    with pytest.raises(WeightsUnavailable, match="no diffusers pipeline"):
        collect(config, PROMPTS, 1, cache=tmp_path / "cache", resolution=16)


def test_a_base_model_draws_no_other_size(miniature: Backbone, tmp_path: Path) -> None:
    config = ProposalConfig(source="diffusers", model="miniature", size=64)
    with pytest.raises(ConfigError, match="size: miniature draws 48 pixels a side"):
        collect(config, PROMPTS, 1, cache=tmp_path, resolution=48, backbone=miniature)
