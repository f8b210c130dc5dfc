"""The catalogue: what it says about models that are not here, and models that the operator adds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from recast_engine.backbones.catalogue import (
    BUILT_IN,
    FAMILIES,
    VARIABLE,
    flow_sigmas,
    model_info,
    models,
)
from recast_engine.backbones.flux import FluxBackbone
from recast_engine.backbones.load import BACKBONES, load_backbone
from recast_engine.backbones.operator import read_models
from recast_engine.backbones.qwen_image import QwenImageBackbone
from recast_engine.backbones.sd3 import SD3Backbone
from recast_engine.errors import ConfigError, WeightsUnavailable

Add = Callable[[str], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Makes a TOML text the operator's file."""

    def write(text: str) -> None:
        file = tmp_path / "models.toml"
        file.write_text(text, encoding="utf-8")
        monkeypatch.setenv(VARIABLE, str(file))
        models.cache_clear()

    yield write
    models.cache_clear()


def test_every_published_model_is_pinned_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    published = [info for info in BUILT_IN if info.repository]
    assert {info.id for info in published} >= {
        "sd3-medium", "sd3.5-medium", "sd3.5-large", "flux.1-dev", "qwen-image",
    }  # fmt: skip
    for info in published:
        assert len(info.revision or "") == 40
        assert set(info.revision or "") <= set("0123456789abcdef")
        reason = info.missing() or ""
        assert f"run hf download {info.repository} --revision {info.revision}" in reason
        assert ("accept its licence" in reason) == info.gated
        assert info.shift == FAMILIES[info.family].default_shift(info.resolution)
        with pytest.raises(WeightsUnavailable, match="hf download"):
            load_backbone(info.id)
    assert set(BACKBONES) == set(FAMILIES)


def test_levels_by_hand() -> None:
    """Even levels 1, 1/2; a shift of 3 takes 1/2 to 3/4; a terminal level of 0.02 stretches that to it."""
    np.testing.assert_allclose(flow_sigmas(2, 3.0, family="flux"), [1.0, 0.75, 0.0])
    np.testing.assert_allclose(flow_sigmas(2, 3.0, family="qwen_image"), [1.0, 0.02, 0.0])
    # three steps: 1, 2/3, 1/3 -> 1, 6/7, 3/5; distances from 1: 0, 1/7, 2/5, times 0.98 / (2/5)
    np.testing.assert_allclose(flow_sigmas(3, 3.0, family="qwen_image"), [1.0, 0.65, 0.02, 0.0])
    np.testing.assert_allclose(flow_sigmas(1, 3.0, family="qwen_image"), [1.0, 0.0])


@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_a_local_folder_is_a_model(family: str, add: Add, tiny_flux: Path, tiny_qwen_image: Path) -> None:
    folder, cls = {"flux": (tiny_flux, FluxBackbone), "qwen_image": (tiny_qwen_image, QwenImageBackbone)}[
        family
    ]
    add(f'[models.own]\nfamily = "{family}"\nsource = "{folder}"\nresolution = 64\n')
    info = model_info("own")
    assert info.missing() is None
    assert info.repository is None
    assert (info.reward_world, info.licence, info.default_steps) == ("public", "not stated", 40)
    backbone = load_backbone("own")
    assert isinstance(backbone, cls)
    assert (backbone.id, backbone.resolution, backbone.latent_shape) == ("own", 64, (4, 8, 8))
    np.testing.assert_allclose(backbone.sigmas(7), info.sigmas(7), atol=1e-6)


def test_guidance_and_folders_seen_from_the_file(add: Add, tiny_flux: Path, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(tiny_flux)
    add('[models.own]\nfamily = "flux"\nsource = "./here"\nresolution = 64\nguidance = 2.0\n')
    backbone = load_backbone("own")
    assert isinstance(backbone, FluxBackbone)
    assert backbone.guidance == 2.0


def test_an_entry_must_say_the_schedulers_noise_levels(add: Add, tiny_pipeline: Path) -> None:
    entry = f'[models.own]\nfamily = "sd3"\nsource = "{tiny_pipeline}"\nresolution = 16\nshift = '
    add(entry + "3.0\n")
    assert isinstance(load_backbone("own"), SD3Backbone)
    add(entry + "2.5\n")
    with pytest.raises(ConfigError, match=r"models\.own\.shift: 2\.5 gives .* scheduler has shift 3"):
        load_backbone("own")


def test_incomplete_weights_are_said_to_be(add: Add, tmp_path: Path) -> None:
    entry = '[models.own]\nfamily = "flux"\nsource = "./absent"\nresolution = 64\n'
    add(entry)
    assert "'absent' holds no model_index.json: mend the entry in RECAST_MODELS" in (
        model_info("own").missing() or ""
    )
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "model_index.json").write_text(
        json.dumps({"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]})
    )
    assert model_info("own").missing() is None
    with pytest.raises(WeightsUnavailable, match="own: not all of its files are here: copy"):
        load_backbone("own")


def test_an_entry_with_a_built_in_id_takes_its_place(add: Add, tmp_path: Path) -> None:
    add('[models."sd3.5-medium"]\nfamily = "sd3"\nsource = "/srv/sd35"\nresolution = 768\ngated = true\n')
    info = model_info("sd3.5-medium")
    assert (info.source, info.resolution, info.shift) == ("/srv/sd35", 768, 3.0)
    assert set(models()) == {info.id for info in BUILT_IN}


def test_json_reads_like_toml(tmp_path: Path) -> None:
    entry = {"family": "qwen_image", "source": "Qwen/Qwen-Image-2512", "resolution": 1024, "revision": "abc"}
    (tmp_path / "m.json").write_text(json.dumps({"models": {"q": entry}}), encoding="utf-8")
    (tmp_path / "m.toml").write_text(
        "[models.q]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in entry.items()),
        encoding="utf-8",
    )
    assert read_models(tmp_path / "m.json") == read_models(tmp_path / "m.toml")
    assert read_models(tmp_path / "m.json")[0].repository == "Qwen/Qwen-Image-2512"


GOOD = 'family = "sd3"\nsource = "a/b"\nresolution = 512\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[models.x]\n" + GOOD.replace("sd3", "sdxl"), r"models\.x: .*family: .*'flux' or 'qwen_image'"),
        ("[models.x]\n" + GOOD + "colour = 1\n", r"models\.x: colour: .*"),
        ("[models.x]\n" + GOOD.replace("512", "500"), r"models\.x: resolution: .*multiple of 16"),
        ("[models.x]\n" + GOOD.replace("512", "1000000000"), r"models\.x: .*resolution: .*4096"),
        ("[models.x]\n" + GOOD.replace("a/b", "somewhere"), r"models\.x: source: .*"),
        ("[models.x]\n" + GOOD + "shift = -1.0\n", r"models\.x: shift: .*greater than or equal to 0.01"),
        ("[models.x]\n" + GOOD + "guidance = 3.5\n", r"models\.x: guidance: .*only .* flux"),
        ("[models.x]\n" + GOOD + 'id = "y"\n', r"models\.x: expected a table of fields without 'id'"),
        ('[models."X y"]\n' + GOOD, r"models\.X y: id: .*"),
        ('[models.x]\nfamily = ["sd3"]\nsource = 3\n', r"models\.x: family: .*; source: .*; resolution: .*"),
        ("models = 3\n", r"expected one table 'models'"),
        ("[model.x]\n" + GOOD, r"expected one table 'models'"),
        ("[models.x\n", r"models\.toml: "),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name_and_field(text: str, problem: str, add: Add) -> None:
    add(text)
    with pytest.raises(ConfigError, match=rf"RECAST_MODELS: .*{problem}"):
        models()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RECAST_MODELS: .*none\.toml: .*No such file"):
        read_models(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="give an absolute path"):
        read_models(Path("models.toml"))
