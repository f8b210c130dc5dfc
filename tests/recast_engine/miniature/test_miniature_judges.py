"""What judges learn from: spoilt images, neighbouring scenes, redrawn images."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch

from recast_engine.miniature import PIPELINE, architecture, world
from recast_engine.miniature import rewards as judges
from recast_engine.miniature.degrade import FAMILIES, Degradation
from recast_engine.miniature.evaluate import edit_distance, spelling
from recast_engine.miniature.measure import flow_of
from recast_engine.miniature.redraw import Redrawer

WAYS = [way for family in FAMILIES.values() for way in family]


def renders(n: int) -> np.ndarray:
    rng = random.Random(6)
    return world.render_many([world.sample_scene(rng) for _ in range(n)], rng)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(float) - b).mean())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_damage_grows_with_severity_and_repeats_with_the_seed(way: Degradation) -> None:
    images = renders(24)

    def spoilt(severity: float) -> np.ndarray:
        return np.stack([way(image, severity, np.random.default_rng(i)) for i, image in enumerate(images)])

    damage = [distance(spoilt(severity), images) for severity in (0.1, 0.5, 1.0)]
    assert 0 < damage[0] < damage[1] < damage[2]
    assert spoilt(0.5).shape == images.shape
    assert spoilt(0.5).dtype == np.uint8
    assert np.array_equal(spoilt(0.5), spoilt(0.5))


def test_families_share_no_way() -> None:
    for a, b in combinations(FAMILIES.values(), 2):
        assert not set(a) & set(b)


def test_neighbours_differ_in_one_word() -> None:
    rng = random.Random(2)
    for kind in world.KIND_WEIGHTS:
        for _ in range(20):
            scene = world.sample_scene(rng, kind)
            words, others = scene.caption.split(), judges.neighbour(scene, rng).caption.split()
            assert len(words) == len(others)
            assert sum(a != b for a, b in zip(words, others, strict=True)) == 1


def test_pools_keep_wrong_scenes_clean_and_record_severity() -> None:
    pool = judges.make_pool("pickscore", 40, seed=3, wrong_scene=0.5)
    wrong = np.array([a != b for a, b in zip(pool.captions, pool.others, strict=True)])
    assert 5 < wrong.sum() < 35
    assert (pool.severity[wrong] == 0).all()
    assert (pool.severity[~wrong] >= judges.MIN_SEVERITY).all()
    assert torch.equal(pool.ids[~wrong], pool.other_ids[~wrong])


def test_redrawing_departs_further_from_noisier_starts() -> None:
    torch.set_num_threads(1)
    pipeline = architecture.load_pipeline(PIPELINE)
    redraw = Redrawer(flow_of(pipeline), pipeline.vae)
    images = renders(12)
    rng = random.Random(6)
    captions = [world.sample_scene(rng).caption for _ in range(12)]

    def departure(sigma: float) -> float:
        levels = np.full(12, sigma, np.float32)
        return distance(redraw(images, captions, levels, 5, torch.Generator().manual_seed(1)), images)

    assert departure(0.02) < departure(0.5) < departure(1.0)


def test_preference_loss_is_log_two_for_equal_images() -> None:
    model = judges.create(seed=1)
    pool = judges.make_pool("hpsv2", 8, seed=1)
    equal = judges._preference_loss(model, pool.good, pool.good, pool.ids)
    anchor = judges._contrastive_loss(model, judges.image_embeddings(model, pool.good), pool.ids)
    assert equal.item() == pytest.approx(np.log(2) + judges.ANCHOR_WEIGHT * anchor.item(), abs=1e-4)


def test_equal_captions_share_the_contrastive_target() -> None:
    model = judges.create(seed=1)
    ids = architecture.tokenize(judges.tokens.create(), ["a red circle"] * 4)
    same = judges.image_embeddings(model, np.repeat(renders(1), 4, axis=0))
    # Four equal pairs cannot be told apart and need not be: the loss is the entropy of the target.
    assert judges._contrastive_loss(model, same, ids).item() == pytest.approx(np.log(4), abs=1e-4)


def test_spelling_by_hand() -> None:
    assert edit_distance("KITTEN", "SITTING") == 3
    assert (spelling("CAT", "CAT").strict, spelling("CAT", "CAT").soft) == (1, 1)
    assert (spelling("CAT", "CAP").strict, spelling("CAT", "CAP").soft) == (0, pytest.approx(2 / 3))
    assert spelling("CAT", "").soft == 0
    assert spelling("GO", "ABCDEF").soft == 0
