"""What GenEval's detectors can name: other classes and colours would never be found. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recast_engine.backbones.catalogue import RewardWorld
from recast_engine.miniature import world
from recast_engine.prompts import Prompt

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""The colours of GenEval's published evaluation."""
_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella,
handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,
surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,
broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv,
laptop, computer mouse, tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink,
refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
"""
CLASSES = tuple(name.strip() for name in _NAMES.split(","))
"""COCO's 80 classes in their order, under the names that GenEval's prompts use."""


@dataclass(frozen=True)
class Vocabulary:
    """Names of classes and colours that a detector gives."""

    classes: tuple[str, ...]
    colors: tuple[str, ...]

    def unknown(self, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """Place (such as ``include[0].class``) and name of everything that the prompt asks for in vain."""
        for clauses, name in ((prompt.include, "include"), (prompt.exclude, "exclude")):
            for index, clause in enumerate(clauses):
                if clause["class"] not in self.classes:
                    yield f"{name}[{index}].class", clause["class"]
                if "color" in clause and clause["color"] not in self.colors:
                    yield f"{name}[{index}].color", clause["color"]


VOCABULARIES: Mapping[RewardWorld, Vocabulary] = {
    "public": Vocabulary(CLASSES, COLORS),
    "miniature": Vocabulary(world.SHAPES, tuple(world.COLORS)),
}


def unknown_names(prompts: Sequence[Prompt], vocabulary: Vocabulary) -> Iterator[tuple[int, str, str]]:
    """Index of the prompt, place and name of everything outside ``vocabulary``."""
    for index, prompt in enumerate(prompts):
        for place, name in vocabulary.unknown(prompt):
            yield index, place, name
