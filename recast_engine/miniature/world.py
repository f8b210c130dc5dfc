"""The miniature world: scenes, their captions, their GenEval metadata and their renders.

A scene is what an image shows, reduced to symbols. Everything else follows from it: the caption
(`Scene.caption`), the metadata that a GenEval-style checker needs (`Scene.metadata`) and any
number of renders (`render`). `parse` inverts `Scene.caption`.

The world is small on purpose: a two-core machine learns it in about an hour, and a tiny model is
then right about half of the time, which is what reinforcement learning needs to show an effect.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

RESOLUTION = 48
_SUPERSAMPLE = 4
_CANVAS = RESOLUTION * _SUPERSAMPLE

Kind = Literal["single", "count", "relation", "text"]
RGB = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle")
COLORS: dict[str, RGB] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (45, 70, 220),
    "yellow": (240, 210, 40),
}
BACKGROUNDS: dict[str, RGB] = {"light": (222, 222, 222), "dark": (42, 42, 42)}
NUMBERS = {2: "two", 3: "three", 4: "four"}
RELATIONS = ("above", "below", "left of", "right of")
WORDS = (
    "GO", "UP", "HI", "OK", "NO", "SO",
    "CAT", "DOG", "SUN", "BUS", "HAT", "MAP", "BOX", "CUP", "PIG", "ZIP", "KEY", "ICE", "TAP", "GUM",
    "FISH", "BEAR", "MILK", "SHOP", "WOLF", "KING", "STOP", "FORK", "GOLD", "JUMP", "LAMP", "DRUM",
)  # fmt: skip
TEXT_COLORS: dict[str, RGB] = {"white": (250, 250, 250), "yellow": (245, 220, 50)}
TEXT_BACKGROUNDS: dict[str, RGB] = {
    "red": (190, 35, 35),
    "green": (30, 130, 50),
    "blue": (40, 60, 190),
    "black": (20, 20, 20),
}
KIND_WEIGHTS: dict[Kind, float] = {"single": 0.15, "count": 0.20, "relation": 0.40, "text": 0.25}


@dataclass(frozen=True)
class Scene:
    """One scene. Fields that its kind does not use keep their defaults.

    `objects` holds (colour, shape): one for "single" and "count", two for "relation", where the
    first stands `relation` of the second. "text" shows `word` in `foreground` on `background`.
    """

    kind: Kind
    objects: tuple[tuple[str, str], ...] = ()
    count: int = 1
    relation: str = ""
    word: str = ""
    foreground: str = ""
    background: str = ""

    @property
    def caption(self) -> str:
        if self.kind == "text":
            return f'the word "{self.word}" in {self.foreground} on {self.background}'
        color, shape = self.objects[0]
        if self.kind == "count":
            return f"{NUMBERS[self.count]} {color} {shape}s"
        if self.kind == "single":
            return f"a {color} {shape}"
        other_color, other_shape = self.objects[1]
        return f"a {color} {shape} {self.relation} a {other_color} {other_shape}"

    def metadata(self) -> dict[str, Any]:
        """The prompt row in GenEval's published form; a row for a word carries `text` instead.

        As in GenEval, the object that a position refers to comes first in `include`, and counting
        rows exclude one object more than asked for.
        """
        if self.kind == "text":
            return {"prompt": self.caption, "tag": "text", "text": self.word}
        color, shape = self.objects[0]
        if self.kind == "relation":
            other_color, other_shape = self.objects[1]
            include = [
                {"class": other_shape, "count": 1, "color": other_color},
                {"class": shape, "count": 1, "color": color, "position": [self.relation, 0]},
            ]
            return {"prompt": self.caption, "tag": "position", "include": include}
        include = [{"class": shape, "count": self.count, "color": color}]
        row: dict[str, Any] = {"prompt": self.caption, "tag": "colors", "include": include}
        if self.kind == "count":
            row |= {"tag": "counting", "exclude": [{"class": shape, "count": self.count + 1}]}
        return row


_RELATION = re.compile(rf"^a (\w+) (\w+) ({'|'.join(RELATIONS)}) a (\w+) (\w+)$")
_COUNT = re.compile(rf"^({'|'.join(NUMBERS.values())}) (\w+) (\w+)s$")
_TEXT = re.compile(r'^the word "(\w+)" in (\w+) on (\w+)$')
_SINGLE = re.compile(r"^a (\w+) (\w+)$")


def parse(caption: str) -> Scene:
    """The scene that a caption describes. Raises ValueError for a caption of another form."""
    if m := _RELATION.match(caption):
        return Scene("relation", objects=((m[1], m[2]), (m[4], m[5])), relation=m[3])
    if m := _COUNT.match(caption):
        count = next(n for n, name in NUMBERS.items() if name == m[1])
        return Scene("count", objects=((m[2], m[3]),), count=count)
    if m := _TEXT.match(caption):
        return Scene("text", word=m[1], foreground=m[2], background=m[3])
    if m := _SINGLE.match(caption):
        return Scene("single", objects=((m[1], m[2]),))
    raise ValueError(f"not a caption of the miniature world: {caption!r}")


def every_scene(kind: Kind) -> list[Scene]:
    """All scenes of a kind, in a fixed order.

    Relations join different shapes and different colours: GenEval looks an object up by its class,
    so two objects of one class could not be told apart.
    """
    things = [(color, shape) for color in COLORS for shape in SHAPES]
    if kind == "single":
        return [Scene("single", objects=(thing,)) for thing in things]
    if kind == "count":
        return [Scene("count", objects=(thing,), count=n) for n in NUMBERS for thing in things]
    if kind == "relation":
        return [
            Scene("relation", objects=(a, b), relation=relation)
            for relation in RELATIONS
            for a in things
            for b in things
            if a[0] != b[0] and a[1] != b[1]
        ]
    return [
        Scene("text", word=word, foreground=fg, background=bg)
        for word in WORDS
        for fg in TEXT_COLORS
        for bg in TEXT_BACKGROUNDS
    ]


_scenes = cache(every_scene)


def sample_scene(rng: random.Random, kind: Kind | None = None) -> Scene:
    """A scene drawn uniformly within `kind`, which itself follows `KIND_WEIGHTS` when not given."""
    if kind is None:
        kind = rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
    return rng.choice(_scenes(kind))


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans Mono Bold as shipped inside matplotlib, so that every machine draws the same."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    return ImageFont.truetype(str(path), size)


def _jitter(color: RGB, rng: random.Random, amount: int = 8) -> RGB:
    red, green, blue = (min(255, max(0, c + rng.randint(-amount, amount))) for c in color)
    return red, green, blue


def _grey(rng: random.Random) -> RGB:
    shift = rng.randint(-10, 10)
    red, green, blue = BACKGROUNDS[rng.choice(list(BACKGROUNDS))]
    return red + shift, green + shift, blue + shift


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corner points of a square or triangle; for a circle the two corners of its bounding box."""
    if shape == "circle":
        return [(x - radius, y - radius), (x + radius, y + radius)]
    if shape == "square":
        half = 0.88 * radius
        return [(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)]
    low = y + 0.85 * radius
    return [(x, y - radius), (x + radius, low), (x - radius, low)]


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, center: tuple[float, float], radius: float, fill: RGB
) -> None:
    points = [(x * _SUPERSAMPLE, y * _SUPERSAMPLE) for x, y in outline(shape, *center, radius)]
    if shape == "circle":
        draw.ellipse([points[0], points[1]], fill=fill)
    else:
        draw.polygon(points, fill=fill)


def _draw_text(scene: Scene, rng: random.Random) -> Image.Image:
    image = Image.new("RGB", (_CANVAS, _CANVAS), _jitter(TEXT_BACKGROUNDS[scene.background], rng, 6))
    face = font({2: 30, 3: 24, 4: 18}[len(scene.word)] * _SUPERSAMPLE)
    _, top, _, bottom = face.getbbox("H")
    x = (_CANVAS - face.getlength(scene.word)) / 2 + rng.uniform(-1, 1) * _SUPERSAMPLE
    y = (_CANVAS - top - bottom) / 2 + rng.uniform(-2, 2) * _SUPERSAMPLE
    fill = _jitter(TEXT_COLORS[scene.foreground], rng, 5)
    ImageDraw.Draw(image).text((x, y), scene.word, font=face, fill=fill)
    return image


def _layout(scene: Scene, rng: random.Random) -> list[tuple[tuple[float, float], float]]:
    """(centre, radius) in pixels for every object drawn; at least 2 px stay free between any two."""
    u = rng.uniform
    if scene.kind == "single":
        return [((u(20, 28), u(20, 28)), u(11, 14))]
    if scene.kind == "count":
        cells = [(13, 13), (35, 13), (13, 35), (35, 35)]
        rng.shuffle(cells)
        return [((x + u(-1, 1), y + u(-1, 1)), u(7.5, 9)) for x, y in cells[: scene.count]]
    near, far, across = u(12, 13.5), u(34.5, 36), (u(20, 28), u(20, 28))
    first, second = (near, far) if scene.relation in ("above", "left of") else (far, near)
    if scene.relation in ("above", "below"):
        centers = [(across[0], first), (across[1], second)]
    else:
        centers = [(first, across[0]), (second, across[1])]
    return [(center, u(8, 9.5)) for center in centers]


def render(scene: Scene, rng: random.Random) -> Image.Image:
    """One RGB render of the scene, 48 x 48 px; `rng` decides positions, sizes and tints."""
    if scene.kind == "text":
        image = _draw_text(scene, rng)
    else:
        image = Image.new("RGB", (_CANVAS, _CANVAS), _grey(rng))
        draw = ImageDraw.Draw(image)
        things = scene.objects if scene.kind == "relation" else scene.objects * scene.count
        for (color, shape), (center, radius) in zip(things, _layout(scene, rng), strict=True):
            _draw_shape(draw, shape, center, radius, _jitter(COLORS[color], rng))
    return image.resize((RESOLUTION, RESOLUTION), Image.Resampling.BOX)


def render_many(scenes: Sequence[Scene], rng: random.Random) -> NDArray[np.uint8]:
    """One render per scene: uint8 [N, 48, 48, 3]."""
    return np.stack([np.asarray(render(scene, rng)) for scene in scenes])


def contact_sheet(images: NDArray[np.uint8], columns: int = 8, scale: int = 3) -> Image.Image:
    """Images uint8 [N, H, W, 3] side by side, enlarged without smoothing, for looking at."""
    n, height, width, _ = images.shape
    rows = -(-n // columns)
    sheet = np.zeros((rows * (height + 2), columns * (width + 2), 3), np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * (height + 2), index % columns * (width + 2)
        sheet[top : top + height, left : left + width] = image
    picture = Image.fromarray(sheet)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
