"""Images of the miniature's world through its backbone: encoded, decoded, and the same again."""

import random

import numpy as np

from recast_engine.backbones.load import load_backbone
from recast_engine.miniature import world


def test_decoding_inverts_encoding() -> None:
    rng = random.Random(0)
    images = world.render_many([world.sample_scene(rng) for _ in range(32)], rng)
    backbone = load_backbone("miniature")
    latents = backbone.encode_images(images)
    error = backbone.decode(latents).astype(float) - images
    psnr = 10 * np.log10(255**2 / np.mean(error**2, axis=(1, 2, 3)))
    assert psnr.min() > 27  # measured: 29.9 at worst, 36.3 on average
    assert psnr.mean() > 34
    assert 0.8 < latents.std() < 1.25  # on the scale of the noise, which shift and scale are there for
