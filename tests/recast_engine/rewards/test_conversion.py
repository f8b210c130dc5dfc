"""Published checkpoints under their own names, computed open-coded, against what the conversion gives."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import BertTokenizer

from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.prompts import Prompt
from recast_engine.rewards import aesthetic, hpsv2, imagereward
from recast_engine.rewards.clip import ClipEmbedder
from recast_engine.rewards.convert import convert, folded_head, read_weights

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
VISION, TEXT, EMBED, CONTEXT, SIDE, PATCH = 160, 128, 24, 12, 28, 14
LETTERS = {c: 3 + 2 * i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")}
WORDS = 3 + 2 * 26 + 2  # three signs, letters within and at the end of a word; start and end come last
PROMPTS = [Prompt("a red cat"), Prompt("dog"), Prompt("two big blue dogs")]


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(3).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.fixture
def weights_root(tmp_path, monkeypatch):
    monkeypatch.setenv("RECAST_REWARD_WEIGHTS", str(tmp_path / "rewards"))
    return tmp_path / "rewards"


def pixels_of(images: np.ndarray) -> torch.Tensor:
    return torch.tensor((images / 255 - MEAN) / STD, dtype=torch.float32).permute(0, 3, 1, 2)


def random(generator: torch.Generator, *shape: int, scale: float = 0.2) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * scale


def open_clip_weights() -> dict[str, torch.Tensor]:
    """A tiny model under open_clip's names: queries, keys and values fused, projections from the right."""
    g = torch.Generator().manual_seed(1)
    weights = {
        "logit_scale": torch.tensor(2.0),
        "attn_mask": torch.zeros(CONTEXT, CONTEXT),
        "positional_embedding": random(g, CONTEXT, TEXT),
        "token_embedding.weight": random(g, WORDS, TEXT),
        "text_projection": random(g, TEXT, EMBED),
        "ln_final.weight": 1 + random(g, TEXT),
        "ln_final.bias": random(g, TEXT),
        "visual.class_embedding": random(g, VISION),
        "visual.positional_embedding": random(g, (SIDE // PATCH) ** 2 + 1, VISION),
        "visual.proj": random(g, VISION, EMBED),
        "visual.conv1.weight": random(g, VISION, 3, PATCH, PATCH),
    }
    for name in ("visual.ln_pre", "visual.ln_post"):
        weights |= {f"{name}.weight": 1 + random(g, VISION), f"{name}.bias": random(g, VISION)}
    for tower, width in (("visual.transformer", VISION), ("transformer", TEXT)):
        for layer in range(2):
            name = f"{tower}.resblocks.{layer}"
            for part, shape in {
                "attn.in_proj_weight": (3 * width, width),
                "attn.in_proj_bias": (3 * width,),
                "attn.out_proj.weight": (width, width),
                "attn.out_proj.bias": (width,),
                "ln_1.bias": (width,),
                "ln_2.bias": (width,),
                "mlp.c_fc.weight": (2 * width, width),
                "mlp.c_fc.bias": (2 * width,),
                "mlp.c_proj.weight": (width, 2 * width),
                "mlp.c_proj.bias": (width,),
            }.items():
                weights[f"{name}.{part}"] = random(g, *shape, scale=0.1)
            weights |= {f"{name}.ln_{i}.weight": 1 + random(g, width) for i in (1, 2)}
    return weights


def open_clip_tower(w, prefix, x, width, heads, mask):
    """Pre-norm blocks with torch's own fused multi-head attention."""
    for layer in range(2):
        name = f"{prefix}.resblocks.{layer}."
        h = functional.layer_norm(x, (width,), w[name + "ln_1.weight"], w[name + "ln_1.bias"])
        attended, _ = functional.multi_head_attention_forward(
            *(h.transpose(0, 1),) * 3, width, heads,
            w[name + "attn.in_proj_weight"], w[name + "attn.in_proj_bias"], None, None, False, 0.0,
            w[name + "attn.out_proj.weight"], w[name + "attn.out_proj.bias"],
            training=False, attn_mask=mask, need_weights=False,
        )  # fmt: skip
        x = x + attended.transpose(0, 1)
        h = functional.layer_norm(x, (width,), w[name + "ln_2.weight"], w[name + "ln_2.bias"])
        h = functional.gelu(functional.linear(h, w[name + "mlp.c_fc.weight"], w[name + "mlp.c_fc.bias"]))
        x = x + functional.linear(h, w[name + "mlp.c_proj.weight"], w[name + "mlp.c_proj.bias"])
    return x


def open_clip_image(w, pixels):
    x = functional.conv2d(pixels, w["visual.conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    x = torch.cat([w["visual.class_embedding"].expand(len(x), 1, -1), x], dim=1)
    x = x + w["visual.positional_embedding"]
    x = functional.layer_norm(x, (VISION,), w["visual.ln_pre.weight"], w["visual.ln_pre.bias"])
    x = open_clip_tower(w, "visual.transformer", x, VISION, VISION // 80, None)
    x = functional.layer_norm(x[:, 0], (VISION,), w["visual.ln_post.weight"], w["visual.ln_post.bias"])
    return functional.normalize(x @ w["visual.proj"], dim=-1)


def open_clip_text(w, texts):
    rows = []
    for text in texts:
        ids = [LETTERS[c] + (i == len(word) - 1) for word in text.split() for i, c in enumerate(word)]
        ids = [WORDS - 2, *ids[: CONTEXT - 2], WORDS - 1]
        rows.append(ids + [0] * (CONTEXT - len(ids)))  # open_clip pads with 0
    tokens = torch.tensor(rows)
    x = w["token_embedding.weight"][tokens] + w["positional_embedding"]
    causal = torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1)
    x = open_clip_tower(w, "transformer", x, TEXT, TEXT // 64, causal)
    x = functional.layer_norm(x, (TEXT,), w["ln_final.weight"], w["ln_final.bias"])
    return functional.normalize(x[torch.arange(len(x)), tokens.argmax(1)] @ w["text_projection"], dim=-1)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    """CLIP's tokenizer with start and end as the last words, as in the published vocabulary."""
    from transformers import CLIPTokenizer

    vocabulary = {"!": 0, "#": 1, "$": 2}
    for character, place in LETTERS.items():
        vocabulary |= {character: place, f"{character}</w>": place + 1}
    vocabulary |= {"<|startoftext|>": WORDS - 2, "<|endoftext|>": WORDS - 1}
    folder = tmp_path_factory.mktemp("tokenizer")
    CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CONTEXT).save_pretrained(folder)
    return folder


def test_hpsv2_from_open_clip_equals_open_clips_computation(tmp_path, weights_root, tokenizer_folder, images):
    weights = open_clip_weights()
    source = tmp_path / "HPS_tiny.pt"
    torch.save({"state_dict": weights, "epoch": 3}, source)
    folder = convert("hpsv2", source, extra={"tokenizer": str(tokenizer_folder)})
    assert folder == weights_root / "hpsv2"
    reward = hpsv2.load("public", "cpu")
    image, text = (
        open_clip_image(weights, pixels_of(images)),
        open_clip_text(weights, [p.prompt for p in PROMPTS]),
    )
    expected = (image * text).sum(1).numpy()
    np.testing.assert_allclose(reward.score(images, PROMPTS), expected, atol=1e-5)
    assert np.ptp(expected) > 0.05  # the comparison could have failed
    one = [reward.score(images[i : i + 1], PROMPTS[i : i + 1])[0] for i in range(3)]
    np.testing.assert_allclose(one, expected, atol=1e-5)


def test_checkpoints_of_another_shape_are_refused_by_name(tmp_path, weights_root, tokenizer_folder):
    extra = {"tokenizer": str(tokenizer_folder)}
    for change, message in [
        ({"visual.attnpool.weight": torch.zeros(1)}, r"visual\.attnpool\.weight"),
        ({"text_projection": None}, "text_projection"),
        ({"ln_final.bias": None}, r"final_layer_norm\.bias"),
    ]:
        weights = {k: v for k, v in (open_clip_weights() | change).items() if v is not None}
        torch.save(weights, tmp_path / "bad.pt")
        with pytest.raises(ConfigError, match=message):
            convert("hpsv2", tmp_path / "bad.pt", extra=extra)
    assert not (weights_root / "hpsv2").exists()
    assert list(weights_root.iterdir()) == []


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_pickle_with_more_than_tensors_is_refused_and_runs_nothing(tmp_path, weights_root, capsys):
    torch.save({"state_dict": {"weight": torch.zeros(1)}, "extra": Harmful()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="more than tensors"):
        read_weights(tmp_path / "evil.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ConfigError, match=r"text\.pt"):
        read_weights(tmp_path / "text.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(ConfigError, match="no tensors"):
        read_weights(tmp_path / "empty.pt")
    assert "executed" not in capsys.readouterr().out


def test_a_conversion_is_not_overwritten_unless_asked(tmp_path, weights_root):
    source = tmp_path / "head.pth"
    torch.save({"weight": torch.ones(1, 4), "bias": torch.zeros(1)}, source)
    convert("aesthetic", source)
    with pytest.raises(ConfigError, match="exists"):
        convert("aesthetic", source)
    torch.save({"weight": 2 * torch.ones(1, 4), "bias": torch.zeros(1)}, source)
    convert("aesthetic", source, replace=True)
    assert load_file(weights_root / "aesthetic" / "head.safetensors")["weight"].tolist() == [[2.0] * 4]
    with pytest.raises(ConfigError, match="no conversion; there are aesthetic"):
        convert("clipscore", source)
    with pytest.raises(ConfigError, match="does not exist"):
        convert("aesthetic", tmp_path / "nothing")
    torch.save(open_clip_weights(), source)
    with pytest.raises(WeightsUnavailable, match="hf download no/where"):
        convert("hpsv2", source, extra={"tokenizer": "no/where"})


def test_layers_without_anything_between_fold_into_one(clip_folder, images, tmp_path, weights_root):
    torch.manual_seed(2)
    layers = nn.Sequential(
        nn.Linear(16, 12), nn.Dropout(), nn.Linear(12, 8), nn.Dropout(), nn.Linear(8, 1)
    ).eval()
    torch.save({f"layers.{k}": v for k, v in layers.state_dict().items()}, tmp_path / "head.pth")
    convert("aesthetic", tmp_path / "head.pth")
    embedder = ClipEmbedder.load(clip_folder)
    reward = aesthetic.Aesthetic.load(embedder, weights_root / "aesthetic")
    with torch.no_grad():
        expected = layers(embedder.images(images))[:, 0].numpy()
    np.testing.assert_allclose(reward.score(images, PROMPTS), expected, atol=1e-5)


def test_a_head_that_is_no_chain_to_one_number_is_refused():
    with pytest.raises(ConfigError, match="not one"):
        folded_head({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
    with pytest.raises(ConfigError, match="chain"):
        folded_head({"weight": torch.ones(1, 4)})
    with pytest.raises(ConfigError, match="chain"):
        folded_head({f"layers.{i}.{k}": v for i in (0, 2) for k, v in nn.Linear(4, 1).state_dict().items()})


BLIP = 128  # two heads of 64, in both towers
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "cat", "dog", "two", "big", "blue", "dogs"]


def blip_weights() -> collections.OrderedDict[str, torch.Tensor]:
    """A tiny ImageReward under the published names."""
    g = torch.Generator().manual_seed(5)
    v, t = "blip.visual_encoder.", "blip.text_encoder."
    w = collections.OrderedDict()
    w[v + "cls_token"] = random(g, 1, 1, BLIP)
    w[v + "pos_embed"] = random(g, 1, 5, BLIP)
    w[v + "patch_embed.proj.weight"] = random(g, BLIP, 3, PATCH, PATCH)
    w[v + "patch_embed.proj.bias"] = random(g, BLIP)
    w[v + "norm.weight"], w[v + "norm.bias"] = 1 + random(g, BLIP), random(g, BLIP)
    for layer in range(2):
        block = f"{v}blocks.{layer}."
        for part, rows, columns in [
            ("attn.qkv", 3, 1),
            ("attn.proj", 1, 1),
            ("mlp.fc1", 2, 1),
            ("mlp.fc2", 1, 2),
        ]:
            w[f"{block}{part}.weight"] = random(g, rows * BLIP, columns * BLIP, scale=0.1)
            w[f"{block}{part}.bias"] = random(g, rows * BLIP)
        for part in ("norm1", "norm2"):
            w[f"{block}{part}.weight"], w[f"{block}{part}.bias"] = 1 + random(g, BLIP), random(g, BLIP)
    w[t + "embeddings.position_ids"] = torch.arange(40)[None]
    w[t + "embeddings.word_embeddings.weight"] = random(g, len(VOCABULARY), BLIP)
    w[t + "embeddings.position_embeddings.weight"] = random(g, 40, BLIP)
    names = ["embeddings.LayerNorm"]
    for layer in range(2):
        block = f"encoder.layer.{layer}."
        for kind in ("attention", "crossattention"):
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                w[f"{t}{block}{kind}.{part}.weight"] = random(g, BLIP, BLIP, scale=0.1)
                w[f"{t}{block}{kind}.{part}.bias"] = random(g, BLIP)
            names.append(f"{block}{kind}.output.LayerNorm")
        for part, rows, columns in [("intermediate.dense", 2, 1), ("output.dense", 1, 2)]:
            w[f"{t}{block}{part}.weight"] = random(g, rows * BLIP, columns * BLIP, scale=0.1)
            w[f"{t}{block}{part}.bias"] = random(g, rows * BLIP)
        names.append(f"{block}output.LayerNorm")
    for name in names:
        w[f"{t}{name}.weight"], w[f"{t}{name}.bias"] = 1 + random(g, BLIP), random(g, BLIP)
    w["blip.vision_proj.weight"] = torch.zeros(4, BLIP)
    for number, (rows, columns) in {0: (16, BLIP), 2: (8, 16), 4: (4, 8), 6: (2, 4), 7: (1, 2)}.items():
        w[f"mlp.layers.{number}.weight"] = random(g, rows, columns)
        w[f"mlp.layers.{number}.bias"] = random(g, rows)
    return w


def linear(w, name, x):
    return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(w, name, x, eps):
    return functional.layer_norm(x, (BLIP,), w[f"{name}.weight"], w[f"{name}.bias"], eps)


def attention(q, k, v, allowed=None):
    """Two heads of 64, spelled out; q (N, L, 128), allowed (N, K) marks the keys that may be seen."""
    q, k, v = (x.unflatten(-1, (2, 64)).transpose(1, 2) for x in (q, k, v))
    logits = q @ k.transpose(-1, -2) / 8
    if allowed is not None:
        logits = logits.masked_fill(~allowed[:, None, None], -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


def blip_score(w, pixels, texts):
    v, t = "blip.visual_encoder.", "blip.text_encoder."
    x = functional.conv2d(
        pixels, w[v + "patch_embed.proj.weight"], w[v + "patch_embed.proj.bias"], stride=PATCH
    )
    x = torch.cat([w[v + "cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
    x = x + w[v + "pos_embed"]
    for layer in range(2):
        block = f"{v}blocks.{layer}."
        q, k, value = linear(w, block + "attn.qkv", norm(w, block + "norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(w, block + "attn.proj", attention(q, k, value))
        h = functional.gelu(linear(w, block + "mlp.fc1", norm(w, block + "norm2", x, 1e-6)))
        x = x + linear(w, block + "mlp.fc2", h)
    seen = norm(w, v + "norm", x, 1e-6)
    rows = [[2, *(VOCABULARY.index(word) for word in text.split()), 3] for text in texts]
    tokens = torch.tensor([row + [0] * (35 - len(row)) for row in rows])
    h = (
        w[t + "embeddings.word_embeddings.weight"][tokens]
        + w[t + "embeddings.position_embeddings.weight"][:35]
    )
    h = norm(w, t + "embeddings.LayerNorm", h, 1e-12)
    for layer in range(2):
        block = f"{t}encoder.layer.{layer}."
        for kind, keys, allowed in (("attention", None, tokens != 0), ("crossattention", seen, None)):
            name = f"{block}{kind}."
            keys = h if keys is None else keys
            found = attention(
                linear(w, name + "self.query", h), linear(w, name + "self.key", keys),
                linear(w, name + "self.value", keys), allowed,
            )  # fmt: skip
            h = norm(w, name + "output.LayerNorm", linear(w, name + "output.dense", found) + h, 1e-12)
        inner = linear(w, block + "output.dense", functional.gelu(linear(w, block + "intermediate.dense", h)))
        h = norm(w, block + "output.LayerNorm", inner + h, 1e-12)
    out = h[:, 0]
    for number in (0, 2, 4, 6, 7):
        out = linear(w, f"mlp.layers.{number}", out)
    return ((out[:, 0] - 0.16717362830052426) / 1.0333394966054072).numpy()


def test_imagereward_from_the_published_names_equals_blips_computation(tmp_path, weights_root, images):
    vocabulary = tmp_path / "bert"
    vocabulary.mkdir()
    (vocabulary / "vocab.txt").write_text("\n".join(VOCABULARY))
    BertTokenizer(vocab=str(vocabulary / "vocab.txt")).save_pretrained(vocabulary)
    weights = blip_weights()
    torch.save(weights, tmp_path / "ImageReward.pt")
    folder = convert("imagereward", tmp_path / "ImageReward.pt", extra={"tokenizer": str(vocabulary)})
    reward = imagereward.load("public", "cpu")
    expected = blip_score(weights, pixels_of(images), [p.prompt for p in PROMPTS])
    np.testing.assert_allclose(reward.score(images, PROMPTS), expected, atol=1e-5)
    assert np.ptp(expected) > 0.01
    towers = (reward._vision, reward._text)
    assert not any(weight.requires_grad for tower in towers for weight in tower.parameters())
    one = [reward.score(images[i : i + 1], PROMPTS[i : i + 1])[0] for i in range(3)]
    np.testing.assert_allclose(one, expected, atol=1e-5)
    large = np.asarray(Image.fromarray(images[0]).resize((56, 56), Image.Resampling.NEAREST))
    resized = np.asarray(Image.fromarray(large).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(
        reward.score(large[None], PROMPTS[:1]), reward.score(resized[None], PROMPTS[:1]), atol=1e-5
    )
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsUnavailable, match="recast rewards convert imagereward"):
        imagereward.load("public", "cpu")


def test_a_checkpoint_that_is_not_imagerewards_is_refused(tmp_path, weights_root):
    torch.save({k: v for k, v in blip_weights().items() if "cls_token" not in k}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"embeddings\.class_embedding"):
        convert("imagereward", tmp_path / "x.pt", extra={"tokenizer": "no/where"})
    torch.save(
        {"mlp.layers.0.weight": torch.ones(1, 4), "mlp.layers.0.bias": torch.ones(1)}, tmp_path / "y.pt"
    )
    with pytest.raises(ConfigError, match="not ImageReward's"):
        convert("imagereward", tmp_path / "y.pt")
