"""Tiny CLIP models that judge miniature images: how they are trained and how well they judge.

| name | stands in for | trained on |
| --- | --- | --- |
| clipscore | CLIPScore | captions, contrastively |
| hpsv2, pickscore | HPSv2, PickScore | captions, then preferences (Bradley-Terry) |
| aesthetic | an aesthetic head, kept for evaluation | captions, then quality 0..10 of spoilt renders |
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel

from recast_engine.miniature import tokenizer as tokens
from recast_engine.miniature import world
from recast_engine.miniature.architecture import tokenize
from recast_engine.miniature.checkpoint import generator, warm_then_decay, write_json
from recast_engine.miniature.degrade import spoil
from recast_engine.miniature.redraw import Redrawer
from recast_engine.miniature.vae import to_pixels
from recast_engine.miniature.world import Scene

Images = NDArray[np.uint8]
FAMILY = {"clipscore": "hpsv2", "hpsv2": "hpsv2", "pickscore": "pickscore", "aesthetic": "aesthetic"}
REDRAW_STEPS = {"hpsv2": 4, "pickscore": 10, "aesthetic": 6}
REDRAWN_SEVERITY = 0.7  # of an image drawn by the base model from pure noise
SEEDS = {"clipscore": 101, "hpsv2": 211, "pickscore": 307, "aesthetic": 401}
PEAK_RATE = 1e-3
ANCHOR_WEIGHT = 0.2  # of the contrastive loss beside the preference loss
HEAD_FACTOR = 30.0  # the head maps unit vectors to 0..10, so its weights must travel far
MIN_SEVERITY = 0.1
MAX_LOGIT_SCALE = 4.6052  # log 100, CLIP's own bound (arXiv 2103.00020, section 2.5)


@dataclass(frozen=True)
class RewardBudget:
    """Steps of the contrastive start and of the preference or quality stage after it."""

    contrastive: int = 700
    judgement: int = 900
    batch: int = 96
    pool: int = 6_000


def create(seed: int) -> CLIPModel:
    """An untrained CLIP of about 0.4 M parameters for 48 px images and 14 tokens."""
    torch.manual_seed(seed)
    tokenizer = tokens.create()
    shared = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 3, "hidden_act": "gelu"}
    text = shared | {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = shared | {"num_hidden_layers": 3, "image_size": world.RESOLUTION, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


@cache
def _neighbours(scene: Scene) -> tuple[Scene, ...]:
    words = scene.caption.split()
    others = [(other, other.caption.split()) for other in world.every_scene(scene.kind)]
    return tuple(
        other
        for other, theirs in others
        if len(theirs) == len(words) and sum(a != b for a, b in zip(words, theirs, strict=True)) == 1
    )


def neighbour(scene: Scene, rng: random.Random) -> Scene:
    """A scene whose caption differs in one word: the hardest thing to tell apart."""
    return rng.choice(_neighbours(scene))


@dataclass(frozen=True)
class Pool:
    """Renders in memory. Item i: a caption, a good image, a worse one, and how spoilt the worse one is.

    `severity` [N] is 0 where the worse image is a clean render of a neighbouring scene; `others`
    are the captions of what `worse` shows.
    """

    captions: list[str]
    ids: torch.Tensor
    good: Images
    others: list[str]
    other_ids: torch.Tensor
    worse: Images
    severity: NDArray[np.float32]


def make_pool(
    name: str,
    size: int,
    seed: int,
    wrong_scene: float = 0.3,
    redraw: Redrawer | None = None,
) -> Pool:
    """Random scenes with a clean render and a worse image.

    Worse is: for a share `wrong_scene` a clean render of a neighbour; of the rest, every second one
    redrawn by the base model when `redraw` is given; all others spoilt by the family of judge `name`.
    """
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    scenes = [world.sample_scene(rng) for _ in range(size)]
    wrong = np.array([rng.random() < wrong_scene for _ in scenes])
    shown = [neighbour(s, rng) if w else s for s, w in zip(scenes, wrong, strict=True)]
    good, worse = world.render_many(scenes, rng), world.render_many(shown, rng)
    level = noise.uniform(MIN_SEVERITY, 1, size).astype(np.float32)
    redrawn = ~wrong & (noise.random(size) < 0.5) if redraw else np.zeros(size, bool)
    captions, others = [s.caption for s in scenes], [s.caption for s in shown]
    for i in np.flatnonzero(~wrong & ~redrawn):
        worse[i] = spoil(worse[i], FAMILY[name], float(level[i]), noise)
    if redraw and redrawn.any():
        own = [captions[i] for i in np.flatnonzero(redrawn)]
        draw = torch.Generator().manual_seed(seed)
        worse[redrawn] = redraw(worse[redrawn], own, level[redrawn], REDRAW_STEPS[name], draw)
    severity = np.where(wrong, 0, np.where(redrawn, REDRAWN_SEVERITY * level, level)).astype(np.float32)
    tokenizer = tokens.create()
    ids, other_ids = tokenize(tokenizer, captions), tokenize(tokenizer, others)
    return Pool(captions, ids, good, others, other_ids, worse, severity)


def image_embeddings(model: CLIPModel, images: Images) -> torch.Tensor:
    """L2-normalised image embeddings [N, 64]."""
    states = model.vision_model(pixel_values=to_pixels(images)).pooler_output
    return functional.normalize(model.visual_projection(states), dim=-1)


def text_embeddings(model: CLIPModel, ids: torch.Tensor) -> torch.Tensor:
    """L2-normalised text embeddings [N, 64] of token ids [N, 14]."""
    states = model.text_model(input_ids=ids).pooler_output
    return functional.normalize(model.text_projection(states), dim=-1)


def _contrastive_loss(model: CLIPModel, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """CLIP's symmetric cross-entropy of embeddings [N, 64] and token ids [N, 14].

    Pairs with equal captions share the target evenly.
    """
    logits = model.logit_scale.exp() * images @ text_embeddings(model, ids).T
    same = (ids[:, None] == ids[None]).all(-1).float()
    target = same / same.sum(1, keepdim=True)
    return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2


def _preference_loss(model: CLIPModel, good: Images, worse: Images, ids: torch.Tensor) -> torch.Tensor:
    """Bradley-Terry: -log sigmoid(s(good, c) - s(worse, c)), s = logit_scale * cosine (PickScore).

    A share of the contrastive loss on the good images keeps the captions told apart.
    """
    better, poorer = image_embeddings(model, np.concatenate([good, worse])).chunk(2)
    margin = model.logit_scale.exp() * ((better - poorer) * text_embeddings(model, ids)).sum(-1)
    return -functional.logsigmoid(margin).mean() + ANCHOR_WEIGHT * _contrastive_loss(model, better, ids)


def _quality_loss(
    model: CLIPModel, head: nn.Linear, images: Images, severity: NDArray[np.float32]
) -> torch.Tensor:
    """Squared error of head(embedding) against quality 10 (1 - severity), in units of 3 points."""
    predicted: torch.Tensor = head(image_embeddings(model, images))[:, 0]
    return ((predicted - torch.from_numpy(10 * (1 - severity))) / 3).square().mean()


def _judgement_loss(
    name: str, model: CLIPModel, head: nn.Linear, pool: Pool, chosen: NDArray[np.int64]
) -> torch.Tensor:
    """The second stage's loss on half a batch of items of the pool."""
    chosen = chosen[: len(chosen) // 2]
    if name == "aesthetic":
        images = np.concatenate([pool.good[chosen], pool.worse[chosen]])
        severity = np.concatenate([np.zeros(len(chosen), np.float32), pool.severity[chosen]])
        return _quality_loss(model, head, images, severity)
    return _preference_loss(model, pool.good[chosen], pool.worse[chosen], pool.ids[chosen])


def train(name: str, budget: RewardBudget, redraw: Redrawer | None = None) -> tuple[CLIPModel, nn.Linear]:
    """Train one judge from scratch; the head means something for `aesthetic` only.

    Contrastive batches hold scenes and, in the same batch, their neighbours as hard negatives: the
    clean half of the pool's worse images.
    """
    seed = SEEDS[name]
    model, head = create(seed), nn.Linear(64, 1)
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, 7.0)
    pairs = make_pool(name, budget.pool, seed, wrong_scene=1.0)
    judged = pairs if name == "clipscore" else make_pool(name, budget.pool, seed + 1, redraw=redraw)
    parameters = [*model.parameters(), *head.parameters()]
    groups = [
        {"params": list(model.parameters()), "factor": 1.0},
        {"params": list(head.parameters()), "factor": HEAD_FACTOR, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    extra = 0 if name == "clipscore" else budget.judgement
    total = budget.contrastive + extra
    for step in range(total):
        draw = generator(seed, step)
        chosen = torch.randint(budget.pool, (budget.batch,), generator=draw).numpy()
        if step < budget.contrastive:
            half = chosen[: len(chosen) // 2]
            images = np.concatenate([pairs.good[half], pairs.worse[half]])
            ids = torch.cat([pairs.ids[half], pairs.other_ids[half]])
            loss = _contrastive_loss(model, image_embeddings(model, images), ids)
        else:
            loss = _judgement_loss(name, model, head, judged, chosen)
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * warm_then_decay(step, total, PEAK_RATE, 100, 0.4)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        model.logit_scale.data.clamp_(max=MAX_LOGIT_SCALE)
        if step % 150 == 0:
            print(f"{name} {step}/{total} loss {loss.item():.4f}", flush=True)
    return model.eval(), head.eval()


_PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": world.RESOLUTION},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": world.RESOLUTION, "width": world.RESOLUTION},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def save(name: str, model: CLIPModel, head: nn.Linear, folder: Path) -> None:
    """Write the model in fp16, its tokenizer and preprocessor, and for `aesthetic` the head."""
    model.half().save_pretrained(folder)
    model.float()
    tokens.create().save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", _PREPROCESSOR)
    if name == "aesthetic":
        save_file({k: v.half() for k, v in head.state_dict().items()}, folder / "head.safetensors")


def load(folder: Path) -> tuple[CLIPModel, nn.Linear | None]:
    """A saved judge in float32, with its head when it has one."""
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    if not (folder / "head.safetensors").exists():
        return model, None
    head = nn.Linear(64, 1)
    head.load_state_dict({k: v.float() for k, v in load_file(folder / "head.safetensors").items()})
    return model, head


@torch.inference_mode()
def scores(model: CLIPModel, head: nn.Linear | None, images: Images, captions: Sequence[str]) -> torch.Tensor:
    """One score per image [N]: the head's quality, or else the cosine with the caption."""
    embeddings = image_embeddings(model, images)
    if head is not None:
        quality: torch.Tensor = head(embeddings)[:, 0]
        return quality
    return (embeddings * text_embeddings(model, tokenize(tokens.create(), captions))).sum(-1)


@torch.inference_mode()
def recall_at_1(model: CLIPModel, seed: int = 4242, size: int = 64) -> tuple[float, float]:
    """Image-to-text and text-to-image recall@1 among `size` scenes with different captions."""
    rng = random.Random(seed)
    scenes: dict[str, Scene] = {}
    while len(scenes) < size:
        scene = world.sample_scene(rng)
        scenes[scene.caption] = scene
    images = image_embeddings(model, world.render_many(list(scenes.values()), rng))
    similarity = images @ text_embeddings(model, tokenize(tokens.create(), list(scenes))).T
    truth = torch.arange(size)
    to_text = (similarity.argmax(1) == truth).float().mean()
    return float(to_text), float((similarity.argmax(0) == truth).float().mean())


def validate(name: str, model: CLIPModel, head: nn.Linear | None, size: int = 512) -> dict[str, float]:
    """Figures on fresh renders: share of pairs ordered rightly, and for a judge of captions recall@1 and
    pairs of scenes, for a judge of quality alone the correlation of its score with minus the severity."""
    spoilt = make_pool(name, size, SEEDS[name] + 77, wrong_scene=0.0)
    good, worse = (scores(model, head, images, spoilt.captions) for images in (spoilt.good, spoilt.worse))
    figures = {"pair_accuracy_spoilt": float((good > worse).float().mean())}
    if head is not None:
        return figures | {"quality_correlation": float(np.corrcoef(worse.numpy(), -spoilt.severity)[0, 1])}
    wrong = make_pool(name, size, SEEDS[name] + 78, wrong_scene=1.0)
    good, worse = (scores(model, head, images, wrong.captions) for images in (wrong.good, wrong.worse))
    to_text, to_image = recall_at_1(model)
    return figures | {
        "pair_accuracy_wrong_scene": float((good > worse).float().mean()),
        "recall_image_to_text": to_text,
        "recall_text_to_image": to_image,
    }
