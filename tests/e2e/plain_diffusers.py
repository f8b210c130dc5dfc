"""Draws images with a plain diffusers pipeline and a LoRA file: reads a JSON request, writes a .npy array.

Run as a process of its own; imports nothing of this project.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline


def main(request_path: str, output_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    torch.set_num_threads(1)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        request["pipeline"], text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline.load_lora_weights(request["adapter"])
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        [image["prompt"] for image in request["images"]],
        generator=[torch.Generator().manual_seed(image["seed"]) for image in request["images"]],
        num_inference_steps=request["steps"],
        guidance_scale=1.0,
        max_sequence_length=0,
        output_type="np",
    ).images
    np.save(output_path, (images * 255).round().astype(np.uint8))


if __name__ == "__main__":
    main(*sys.argv[1:])
