"""All proposals of a profile: what is there already, and the rest bought, drawn or found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recast_engine.config import ProposalConfig
from recast_engine.errors import ConfigError, ProposalFailure
from recast_engine.observer import NullObserver, Observer, Stopped
from recast_engine.prompts import Prompt
from recast_engine.proposals.folder import find_images
from recast_engine.proposals.images import UnusableImage, fitted, read_image, write_png
from recast_engine.proposals.keys import prompt_key
from recast_engine.proposals.provider import Provider
from recast_engine.proposals.purchase import Purchase, Wanted

if TYPE_CHECKING:  # it loads torch
    from recast_engine.backbones.base import Backbone


@dataclass(frozen=True)
class Proposals:
    """Images by prompt, read when asked for.

    Attributes:
        files: prompt text -> its image files, none for a prompt that was refused.
        resolution: pixels a side that images are fitted to.
        bought: images that this collection added, of those the unusable ones too.
    """

    files: Mapping[str, Sequence[Path]]
    resolution: int
    bought: int = 0

    def __bool__(self) -> bool:
        """Whether there is any image at all."""
        return any(self.files.values())

    def images(self, prompt: Prompt) -> NDArray[np.uint8]:
        """uint8 (n, H, W, 3): the middle square of each image of ``prompt``; n = 0 when it was refused.

        Raises:
            KeyError: a prompt that was not collected.
            ProposalFailure: a file changed since it was collected.
        """
        files = self.files[prompt.prompt]
        images = np.zeros((len(files), self.resolution, self.resolution, 3), dtype=np.uint8)
        for number, path in enumerate(files):
            try:
                images[number] = fitted(read_image(path), self.resolution)
            except (UnusableImage, OSError):
                raise ProposalFailure(f"proposal {path.name} changed while it was in use") from None
        return images


def collect(
    config: ProposalConfig,
    prompts: Sequence[Prompt],
    per_prompt: int,
    *,
    cache: Path,
    resolution: int,
    observer: Observer | None = None,
    backbone: Backbone | None = None,
) -> Proposals:
    """``per_prompt`` images of each of ``prompts``.

    Prompts of the same text share their images. A prompt that moderation refuses is left out whole, with a
    warning.

    Args:
        cache: folder of images by key; new ones are added. Below it lie, by name, the folders that source
            ``folder`` reads.
        resolution: pixels a side of the model that is profiled.
        observer: hears the phase "proposals", every new image as a file, and its cost.
        backbone: the model that is profiled, without an adapter; source ``diffusers`` may ask for it.

    Raises:
        ConfigError: the request cannot work as configured.
        ProposalFailure: images cannot be had. What was bought is kept.
        WeightsUnavailable: the model of source ``diffusers`` is not on this machine.
        Stopped: the observer asked to stop.
    """
    observer = observer or NullObserver()
    texts = list(dict.fromkeys(prompt.prompt for prompt in prompts))
    total = len(texts) * per_prompt
    if config.source == "folder":
        observer.phase("proposals", total)
        return _found(config, texts, per_prompt, cache, resolution, observer)
    _check_size_and_budget(config, total, resolution)
    observer.phase("proposals", total)
    collection = _Collection(config, texts, per_prompt, cache, resolution, observer)
    if collection.missing and config.source == "diffusers":
        collection.draw(backbone)
    elif collection.missing:
        collection.buy()
    _tell_refused(texts, collection.refused, observer)
    return Proposals(collection.files(), resolution, collection.bought)


def _check_size_and_budget(config: ProposalConfig, images: int, resolution: int) -> None:
    if config.size is not None and config.size < resolution:
        raise ConfigError(f"size: {config.size} is less than the model's {resolution} pixels a side")
    if images > config.max_images:
        raise ConfigError(
            f"max_images: {images} images are needed and {config.max_images} are allowed; raise it, or lower "
            "prompts or images_per_prompt"
        )


class _Collection:
    """The images that are made for the purpose: those in the cache, and those still missing."""

    def __init__(
        self,
        config: ProposalConfig,
        texts: Sequence[str],
        per_prompt: int,
        cache: Path,
        resolution: int,
        observer: Observer,
    ) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self.config, self.cache, self.resolution, self.observer = config, cache, resolution, observer
        self.wanted = [
            Wanted(key, text, number)
            for text, key in ((text, prompt_key(config, text)) for text in texts)
            for number in range(per_prompt)
        ]
        self.missing = [item for item in self.wanted if not self._kept(item)]
        self.kept = len(self.wanted) - len(self.missing)
        self.refused: set[str] = set()
        self.bought = 0
        observer.advance(self.kept)

    def _path(self, item: Wanted) -> Path:
        return self.cache / f"{item.key}.png"

    def _kept(self, item: Wanted) -> bool:
        """Whether the cache holds the image, whole."""
        if not self._path(item).is_file():
            return False
        try:
            read_image(self._path(item), at_least=self.resolution)
        except UnusableImage:
            return False
        return True

    def buy(self) -> None:
        """Ask the provider for what is missing."""
        with closing(_provider(self.config)) as provider:
            purchase = Purchase(
                provider,
                self.config,
                cache=self.cache,
                observer=self.observer,
                allowance=self.config.max_images - self.kept,
                at_least=self.resolution,
            )
            purchase.run(self.missing, self.kept)
        self.refused, self.bought = purchase.refused, purchase.spent

    def draw(self, backbone: Backbone | None) -> None:
        """Draw what is missing here."""
        from recast_engine.proposals.pipeline import draw

        drawn = draw(self.config, self.missing, backbone, self.observer)
        for done, (item, image) in enumerate(drawn, start=self.kept + 1):
            if image is None:
                self.refused.add(item.prompt)
            elif min(image.size) < self.resolution:
                sides = f"{image.width} x {image.height}"
                raise ConfigError(
                    f"model: {self.config.model} draws {sides} pixels, less than {self.resolution} a side"
                )
            else:
                write_png(image.convert("RGB"), self._path(item))
                path = self._path(item)
                self.observer.cost(proposal_images=1)
                self.observer.file("proposal", path.name, path, item.metadata(self.config))
                self.bought += 1
            self.observer.advance(done)
            if self.observer.should_stop():
                raise Stopped

    def files(self) -> dict[str, list[Path]]:
        """Prompt text -> files, none for a prompt that was refused."""
        files: dict[str, list[Path]] = {item.prompt: [] for item in self.wanted}
        for item in self.wanted:
            if item.prompt not in self.refused:
                files[item.prompt].append(self._path(item))
        return files


def _provider(config: ProposalConfig) -> Provider:
    if config.source == "openai":
        from recast_engine.proposals.openai import OpenAIProvider

        return OpenAIProvider(config)
    from recast_engine.proposals.google import GoogleProvider

    return GoogleProvider(config)


def _found(
    config: ProposalConfig,
    texts: Sequence[str],
    per_prompt: int,
    cache: Path,
    resolution: int,
    observer: Observer,
) -> Proposals:
    """Of source ``folder``: every file is read once, so that a bad one shows before anything is measured."""
    name = str(config.folder)
    files = find_images(name, cache / name, texts, per_prompt)
    for done, path in enumerate((path for paths in files.values() for path in paths), start=1):
        try:
            read_image(path, at_least=resolution)
        except UnusableImage as error:
            raise ConfigError(f"folder {name!r}: {path.name} {error}") from None
        observer.advance(done)
        if observer.should_stop():
            raise Stopped
    return Proposals(files, resolution)


def _tell_refused(texts: Sequence[str], refused: set[str], observer: Observer) -> None:
    if not refused:
        return
    named = next(text for text in texts if text in refused)
    others = " and others" if len(refused) > 1 else ""
    observer.finding(
        "warning",
        {
            "text": f"proposals: moderation refused {len(refused)} of {len(texts)} prompts, which are left "
            f"out ({named[:100]!r}{others})"
        },
    )
