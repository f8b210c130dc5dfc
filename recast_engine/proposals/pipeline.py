"""Proposals drawn here, by a base model of the catalogue or any text-to-image pipeline of diffusers."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

from recast_engine.backbones.base import Backbone
from recast_engine.backbones.catalogue import model_info, models
from recast_engine.backbones.load import load_backbone
from recast_engine.backbones.sampling import sample
from recast_engine.config import ProposalConfig
from recast_engine.errors import ConfigError, WeightsUnavailable
from recast_engine.observer import Observer
from recast_engine.proposals.keys import image_seed
from recast_engine.proposals.purchase import Wanted

BATCH = 4
"""Images drawn at once: generators need more memory than the model that is profiled, or less."""

Drawn = tuple[Wanted, Image.Image | None]
"""An image, or None where the pipeline's own safety checker blanked it."""


def draw(
    config: ProposalConfig, wanted: Sequence[Wanted], backbone: Backbone | None, observer: Observer
) -> Iterator[Drawn]:
    """Draw ``wanted``, each from a seed of its own.

    Args:
        backbone: used when it is the model asked for, without an adapter.

    Raises:
        ConfigError: a size that the model does not draw.
        WeightsUnavailable: the model is not in the local cache, or not as safetensors.
    """
    if config.model in models():
        return _with_backbone(config, wanted, backbone, observer)
    return _with_pipeline(config, wanted, observer)


def _with_backbone(
    config: ProposalConfig, wanted: Sequence[Wanted], backbone: Backbone | None, observer: Observer
) -> Iterator[Drawn]:
    model = str(config.model)
    if backbone is None or backbone.id != model:
        backbone = load_backbone(model)
    if config.size not in (None, backbone.resolution):
        raise ConfigError(f"size: {model} draws {backbone.resolution} pixels a side; leave it out")
    steps = config.steps or model_info(model).default_steps
    for batch in _batches(wanted):
        start, before = time.perf_counter(), backbone.evaluations
        conditioning = backbone.encode_prompts([item.prompt for item in batch])
        latents = sample(backbone, conditioning, [image_seed(item.key) for item in batch], steps=steps)
        images = backbone.decode(latents)
        observer.cost(
            model_evaluations=backbone.evaluations - before, device_seconds=time.perf_counter() - start
        )
        yield from ((item, Image.fromarray(image)) for item, image in zip(batch, images, strict=True))


def _with_pipeline(config: ProposalConfig, wanted: Sequence[Wanted], observer: Observer) -> Iterator[Drawn]:
    pipeline = _load(str(config.model))
    options: dict[str, Any] = {}
    if config.steps is not None:
        options["num_inference_steps"] = config.steps
    if config.size is not None:
        options |= {"height": config.size, "width": config.size}
    for batch in _batches(wanted):
        start = time.perf_counter()
        generators = [torch.Generator("cpu").manual_seed(image_seed(item.key)) for item in batch]
        output = pipeline(prompt=[item.prompt for item in batch], generator=generators, **options)
        blanked = getattr(output, "nsfw_content_detected", None) or [False] * len(batch)
        observer.cost(device_seconds=time.perf_counter() - start)
        for item, image, bad in zip(batch, output.images, blanked, strict=True):
            yield item, None if bad else image


def _load(model: str) -> Any:
    """The pipeline, from the local cache, from safetensors, running no code but diffusers' own."""
    try:
        folder = snapshot_download(model, local_files_only=True)
    except LocalEntryNotFoundError:
        raise WeightsUnavailable(
            f"model: {model} is not in the worker's local cache: run hf download {model} there"
        ) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        kind, absent = _kind(folder)
        options = {"torch_dtype": dtype, "local_files_only": True, "use_safetensors": True, **absent}
        pipeline = kind.from_pretrained(folder, **options)
    except (OSError, ValueError):
        raise WeightsUnavailable(
            f"model: {model} is in the local cache, but incomplete, without safetensors, or no diffusers "
            "pipeline"
        ) from None
    if "prompt" not in inspect.signature(kind.__call__).parameters:
        raise ConfigError(f"model: {model} ({kind.__name__}) does not draw from a text prompt")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def _kind(folder: str) -> tuple[Any, dict[str, None]]:
    """The pipeline's class, one of diffusers' own, and the parts that this copy was saved without.

    Raises:
        OSError, ValueError: it is not such a pipeline.
    """
    index = DiffusionPipeline.load_config(folder, local_files_only=True)
    kind = getattr(diffusers, str(index.get("_class_name")), None)
    if not (inspect.isclass(kind) and issubclass(kind, DiffusionPipeline)):
        raise ValueError(f"not a pipeline of diffusers: {index.get('_class_name')}")
    saved = {name for name, part in index.items() if not isinstance(part, list) or part[0] is not None}
    needed = {
        part.name
        for part in inspect.signature(kind.__init__).parameters.values()
        if part.default is part.empty and part.kind is part.POSITIONAL_OR_KEYWORD
    }
    return kind, dict.fromkeys(needed - saved - {"self"})


def _batches(wanted: Sequence[Wanted]) -> Iterator[Sequence[Wanted]]:
    return (wanted[start : start + BATCH] for start in range(0, len(wanted), BATCH))
