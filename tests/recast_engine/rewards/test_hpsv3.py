"""HPSv3 with tiny random weights under the published names, against the generation class."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards import hpsv3
from recast_engine.rewards.convert import convert

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
]
PROMPTS = [
    Prompt("a red cat"),
    Prompt("two dogs and a very long tail"),
    Prompt("x <|Reward|><|image_pad|> y"),
]
INSTRUCTION = "Rate it. Prompt: {text_prompt} Ratings: <|Reward|> END"


def byte_letters() -> list[str]:
    """The 256 printable stand-ins for bytes of byte-level tokenizers."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(extra)) for byte in range(256)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder as a download of the base model leaves it: tokenizer and config."""
    folder = tmp_path_factory.mktemp("qwen")
    vocabulary = {letter: place for place, letter in enumerate(byte_letters())}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=SPECIAL)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 270, "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}
    Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def published(base):
    """The generation model with random weights, and the checkpoint's names and head."""
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(base)).eval()
    head = {}
    for layer, rows, columns in [("0", 12, 32), ("3", 6, 12), ("5", 2, 6)]:
        head[f"rm_head.{layer}.weight"] = torch.randn(rows, columns) / columns**0.5
        head[f"rm_head.{layer}.bias"] = torch.randn(rows)
    weights = {}
    for key, tensor in model.state_dict().items():
        old = key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        weights[old] = tensor.clone()
    return model, weights | head


def converted(base, published, tmp_path, monkeypatch) -> hpsv3.HPSv3:
    monkeypatch.setenv("RECAST_REWARD_WEIGHTS", str(tmp_path / "rewards"))
    (tmp_path / "instruction.txt").write_text(INSTRUCTION)
    torch.save(published[1], tmp_path / "HPSv3.pt")
    extra = {"tokenizer": str(base), "instruction": str(tmp_path / "instruction.txt")}
    convert("hpsv3", tmp_path / "HPSv3.pt", extra=extra)
    return hpsv3.load("public", "cpu")


def expected_score(reward, model, weights, image, prompt) -> float:
    """One image alone, through the generation class with positions counted one by one."""
    pixels = reward._processor(images=[image], return_tensors="pt", input_data_format="channels_last")
    count = int(pixels["image_grid_thw"].prod()) // 4
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        + "<|image_pad|>" * count
        + f"<|vision_end|>Rate it. Prompt: {prompt} Ratings: <|Reward|> END"
        + "<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = reward._tokenizer([text], return_tensors="pt")["input_ids"]
    places = torch.arange(ids.shape[1])[None, None].expand(3, 1, -1)
    with torch.no_grad():
        hidden = model(input_ids=ids, position_ids=places, output_hidden_states=True, **pixels).hidden_states[
            -1
        ]
    h = (
        hidden[0, ids[0].tolist().index(reward._tokenizer.convert_tokens_to_ids("<|Reward|>"))]
        .double()
        .numpy()
    )
    for layer in ("0", "3", "5"):
        h = weights[f"rm_head.{layer}.weight"].double().numpy() @ h + weights[f"rm_head.{layer}.bias"].numpy()
        h = h if layer == "5" else np.maximum(h, 0)
    return float(h[0])


def test_scores_equal_the_generation_classs_hidden_state_through_the_head(
    base, published, tmp_path, monkeypatch
):
    reward = converted(base, published, tmp_path, monkeypatch)
    small = hpsv3.HPSv3(
        reward._model,
        {
            f"{name}.{kind}": published[1][f"rm_head.{name}.{kind}"]
            for name in "035"
            for kind in ("weight", "bias")
        },
        reward._tokenizer,
        INSTRUCTION,
        pixels=4 * 28 * 28,
    )
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    model, weights = published
    plain = ["a red cat", "two dogs and a very long tail", "x  y"]  # control tokens of a prompt are dropped
    expected = [expected_score(small, model, weights, i, p) for i, p in zip(images, plain, strict=True)]
    np.testing.assert_allclose(small.score(images, PROMPTS), expected, atol=1e-5)
    assert np.ptp(expected) > 1e-3
    assert not any(weight.requires_grad for weight in small._model.parameters())
    one = [small.score(images[i : i + 1], PROMPTS[i : i + 1])[0] for i in range(3)]
    np.testing.assert_allclose(one, expected, atol=1e-5)


def test_what_is_missing_is_named(base, published, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--instruction"):
        convert("hpsv3", tmp_path, target=tmp_path / "out")
    (tmp_path / "bad.txt").write_text("Rate it: {text_prompt}")
    with pytest.raises(ConfigError, match="Reward"):
        convert("hpsv3", tmp_path, target=tmp_path / "out", extra={"instruction": str(tmp_path / "bad.txt")})
    with pytest.raises(ConfigError, match="reward head"):
        hpsv3.to_transformers({"model.norm.weight": torch.ones(1)})
    monkeypatch.setenv("RECAST_REWARD_WEIGHTS", str(tmp_path))
    with pytest.raises(WeightsUnavailable, match="convert hpsv3"):
        hpsv3.load("public", "cpu")
    assert json.loads((base / "config.json").read_text())["model_type"] == "qwen2_vl"
