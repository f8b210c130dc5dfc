"""Rewards of other packages: decorated, installed, listed, and kept from doing harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recast_engine.errors import ConfigError
from recast_engine.prompts import Prompt
from recast_engine.rewards import catalogue
from recast_engine.rewards.info import RewardInfo
from recast_engine.rewards.plugins import reward
from recast_engine.rewards.settings import RewardsFile, read_rewards_file

ROOT = Path(__file__).parents[3]
IMAGES = np.stack([np.full((4, 4, 3), level, np.uint8) for level in (0, 51, 255)])
PROMPTS = [Prompt("x")] * 3

PACKAGE = '''
from recast_engine.rewards.plugins import reward


@reward("redness", objective="appearance", range=(0, 1), licence="MIT", summary="share of red light")
def redness(images, prompts):
    return images[..., 0].mean(axis=(1, 2)) / 255


@reward("darkness", objective="appearance", range=(0, 1), licence="MIT", role="held_out")
class Darkness:
    """How dark an image is."""

    def __init__(self, device, gain=1.0):
        self.device, self.gain = device, gain

    def score(self, images, prompts):
        return self.gain * (1 - images.mean(axis=(1, 2, 3)) / 255)


plain = len
'''
ENTRY_POINTS = """
[recast.rewards]
redness = tiny_rewards:redness
darkness = tiny_rewards:Darkness
missing = tiny_rewards_that_is_not_there:x
plain = tiny_rewards:plain
"""
SCRIPT = """
import json, sys
import numpy as np
from recast_engine.prompts import Prompt
from recast_engine.rewards.catalogue import REWARDS, resolve_budgets
loaded = "torch" in sys.modules
from recast_engine.rewards.scoring import load_scorer
images = np.stack([np.full((4, 4, 3), level, np.uint8) for level in (0, 51, 255)])
scores = load_scorer(["redness", "darkness"], "public", device="cpu")(images, [Prompt("x")] * 3)
print(json.dumps({
    "torch": loaded,
    "scores": scores.values.tolist(),
    "summary": REWARDS["darkness"].summary,
    "problems": {id: REWARDS[id].problem for id in ("redness", "missing", "plain")},
    "budgets": resolve_budgets({"redness": 3, "clipscore": 1}, "miniature"),
}))
"""


def installed(folder: Path) -> Path:
    """A tiny package as pip leaves it in site-packages."""
    (folder / "tiny_rewards.py").write_text(PACKAGE)
    info = folder / "tiny_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def test_an_installed_package_adds_its_rewards(tmp_path):
    options = tmp_path / "rewards.toml"
    options.write_text("[options.darkness]\ngain = 2.0\n")
    paths = [str(installed(tmp_path)), str(ROOT)]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RECAST_REWARDS": str(options)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    np.testing.assert_allclose(found["scores"], [[0, 0.2, 1], [2, 1.6, 0]])
    assert found["torch"] is False
    assert found["summary"] == "How dark an image is."
    assert found["budgets"] == {"clipscore": 0.25, "redness": 0.75}
    assert found["problems"] == {
        "redness": None,
        "missing": "plug-in tiny_rewards_that_is_not_there:x cannot be loaded (ModuleNotFoundError)",
        "plain": "plug-in tiny_rewards:plain is not marked with @reward",
    }


@reward("grey", objective="appearance", range=(0, 255), licence="MIT", needs_metadata=("text",))
def grey(images, prompts):
    """Mean grey level.

    More text.
    """
    return images.mean(axis=(1, 2, 3))


def test_a_decorated_function_is_still_a_function_and_a_catalogue_entry():
    np.testing.assert_array_equal(grey(IMAGES, PROMPTS), [0, 51, 255])
    info = grey.recast_reward
    assert isinstance(info, RewardInfo)
    assert (info.summary, info.needs_metadata) == ("Mean grey level.", ("text",))
    loaded = info.load("public", "cpu")
    assert loaded.id == "grey"
    assert loaded.score(IMAGES, PROMPTS).dtype == np.float64


@pytest.mark.parametrize("id", ["", "Red", "red-ness", "9lives", "a" * 41, "red ness"])
def test_ids_are_plain_words(id):
    with pytest.raises(ConfigError, match="no reward id"):
        reward(id, objective="appearance", range=(0, 1), licence="MIT")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"needs_metadata": ["txt"]}, "needs_metadata"),
        ({"needs_metadata": "text"}, "needs_metadata"),
        ({"worlds": ["mars"]}, "worlds"),
        ({"role": "judge"}, "role"),
        ({"range": (1, 0)}, "range"),
        ({"range": (0, float("inf"))}, "range"),
        ({"objective": "Good looks"}, "objective"),
        ({"licence": " "}, "licence"),
    ],
)
def test_a_decoration_that_the_catalogue_cannot_show_is_refused_by_name(change, name):
    fields = {"objective": "appearance", "range": (0, 1), "licence": "MIT"} | change
    with pytest.raises(ConfigError, match=f"reward 'mine': {name} must be"):
        reward("mine", **fields)


def test_a_plug_in_works_in_the_lane_that_it_names():
    @reward("far", objective="appearance", range=(0, 1), licence="MIT")
    class Far:
        lane = "remote"

        def score(self, images, prompts):
            return np.zeros(len(images))

    assert Far.recast_reward.load("public", "cpu").lane == "remote"
    assert grey.recast_reward.load("public", "cpu").lane == "device"


def test_options_that_a_reward_does_not_know_are_refused_by_name():
    @reward("gained", objective="appearance", range=(0, 1), licence="MIT")
    class Gained:
        def __init__(self, device, gain=1.0):
            pass

        def score(self, images, prompts):
            return np.zeros(len(images))

    for info, options in (
        (grey.recast_reward, {"gain": 2}),
        (Gained.recast_reward, {"gian": 2}),
        (catalogue.REWARDS["pickscore"], {"divisr": 26}),
    ):
        with pytest.raises(ConfigError, match=rf"options\.{info.id}: .*{next(iter(options))}"):
            replace(info, options=options).load("public", "cpu")
    Gained.recast_reward.load("public", "cpu")


def test_a_plug_in_cannot_take_the_place_of_another_reward(caplog):
    @reward("ocr", objective="appearance", range=(0, 1), licence="MIT")
    def ocr(images, prompts):
        return images[:, 0, 0, 0]

    rewards = catalogue.build(RewardsFile(), [ocr.recast_reward])
    assert rewards["ocr"].objective == "text_accuracy"
    assert "ocr" in caplog.text


def test_the_operators_file_adds_http_rewards_and_options(tmp_path, monkeypatch):
    path = tmp_path / "rewards.toml"
    monkeypatch.setenv("RECAST_REWARDS", str(path))
    path.write_text(
        '[options.pickscore]\ndivisor = 26\n[http.judge]\nurl = "http://judge:8700/v1/score"\n'
        'objective = "appearance"\nrange = [0, 1]\nlicence = "MIT"\nrole = "held_out"\n'
    )
    rewards = catalogue.build(read_rewards_file(), [])
    assert rewards["pickscore"].options == {"divisor": 26}
    assert (rewards["judge"].role, rewards["judge"].missing("miniature")) == ("held_out", None)
    assert list(rewards)[: len(catalogue.BUILT_IN)] == [info.id for info in catalogue.BUILT_IN]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[options.pickscore", "not TOML"),
        ("[rewards.x]\n", "unknown rewards"),
        ("options = 3\n", "one table per reward"),
        ("[options.beauty]\nx = 1\n", r"options\.beauty"),
        ('[http.ocr]\nurl = "http://x/"\n', "built-in"),
        ("[http.judge]\nurl = 3\n", r"http\.judge\.url"),
    ],
)
def test_a_wrong_file_is_refused_naming_the_place(content, message, tmp_path, monkeypatch):
    path = tmp_path / "rewards.toml"
    monkeypatch.setenv("RECAST_REWARDS", str(path))
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        catalogue.build(read_rewards_file(), [])


def test_a_file_that_is_named_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("RECAST_REWARDS", str(tmp_path / "no.toml"))
    with pytest.raises(ConfigError, match="RECAST_REWARDS"):
        read_rewards_file()
    monkeypatch.delenv("RECAST_REWARDS")
    monkeypatch.setenv("RECAST_HOME", str(tmp_path))
    assert read_rewards_file() == RewardsFile()


def test_pickscores_scale_is_an_option_of_the_operator(clip_folder, monkeypatch):
    from recast_engine.rewards import pickscore
    from recast_engine.rewards.clip import ClipEmbedder

    embedder = ClipEmbedder.load(clip_folder)
    monkeypatch.setattr(ClipEmbedder, "load_for", lambda *a, **k: embedder)
    plain = pickscore.load("public", "cpu").score(IMAGES, PROMPTS)
    scaled = pickscore.load("public", "cpu", divisor=26).score(IMAGES, PROMPTS)
    np.testing.assert_allclose(scaled, plain / 26)
    with pytest.raises(ConfigError, match="divisor"):
        pickscore.load("public", "cpu", divisor=0)


def test_jpeg_size_by_hand():
    import io

    from PIL import Image

    from recast_engine.rewards import jpeg_size

    noise = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    flat = np.full((1, 64, 64, 3), 90, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise[0]).save(buffer, format="JPEG", quality=95)
    scores = jpeg_size.load("public", "cpu").score(np.concatenate([noise, flat]), PROMPTS[:2])
    assert scores[0] == -len(buffer.getvalue()) / 1000
    assert -1.0 < scores[1] < 0.0


def test_what_scores_follow_from_is_part_of_a_rewards_identity(tmp_path, monkeypatch):
    from dataclasses import replace

    from recast_engine.rewards.catalogue import reward_info

    assert set(reward_info("ocr").identity("public")) == {"rapidocr", "onnxruntime"}
    weights = reward_info("hpsv2").identity("miniature")["weights"]
    assert weights.startswith("sha256:")
    assert weights != reward_info("pickscore").identity("miniature")["weights"]
    monkeypatch.setenv("RECAST_REWARD_WEIGHTS", str(tmp_path))
    (tmp_path / "hpsv2").mkdir()
    (tmp_path / "hpsv2" / "model.safetensors").write_bytes(b"one")
    first = reward_info("hpsv2").identity("public")
    (tmp_path / "hpsv2" / "model.safetensors").write_bytes(b"other")
    assert reward_info("hpsv2").identity("public") != first
    strict = replace(reward_info("geneval"), options={"strict": True})
    assert strict.identity("miniature") != reward_info("geneval").identity("miniature")
    table = {"objective": "appearance", "range": [0, 1], "licence": "MIT"}
    near = catalogue.http_config.info("judge", table | {"url": "http://near/"})
    far = catalogue.http_config.info("judge", table | {"url": "http://far/"})
    assert near.identity("public") != far.identity("public")
    assert "near" not in str(near.identity("public"))


def test_the_documentations_ten_lines_are_a_reward():
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 10
    names: dict = {}
    exec(code, names)
    info = names["redness"].recast_reward
    np.testing.assert_allclose(info.load("miniature", "cpu").score(IMAGES, PROMPTS), [0, 0.2, 1])
    assert info.id in catalogue.build(RewardsFile(), [info])


def test_the_documentations_file_is_one(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    path = tmp_path / "rewards.toml"
    path.write_text(
        next(part for part in page.split("```toml\n") if part.startswith("[http.judge]")).split("```")[0]
    )
    monkeypatch.setenv("RECAST_REWARDS", str(path))
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    rewards = catalogue.build(read_rewards_file(), [])
    assert rewards["judge"].missing("public") is None
    assert rewards["pickscore"].options == {"divisor": 26}
