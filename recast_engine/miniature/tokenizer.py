"""A CLIP tokenizer whose vocabulary is the miniature world's: words of captions, and letters."""

from __future__ import annotations

from typing import Any

from transformers import CLIPTokenizer

from recast_engine.miniature import world

MAX_TOKENS = 14
"""Every caption of the world fits: the longest, a four-letter word, takes all."""

_START, _END, _UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<|unused|>"
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz\"'.,"


def _caption_words() -> list[str]:
    """Words with a token of their own. Words to be *written* are left out: they go letter by letter."""
    shapes = [name for shape in world.SHAPES for name in (shape, f"{shape}s")]
    colors = dict.fromkeys([*world.COLORS, *world.TEXT_COLORS, *world.TEXT_BACKGROUNDS])
    relations = dict.fromkeys(word for relation in world.RELATIONS for word in relation.split())
    rest = ["the", "word", "in", "on"]
    return [*colors, *shapes, *world.NUMBERS.values(), *relations, *rest]


def create() -> CLIPTokenizer:
    """Byte-pair tokenizer that lower-cases, pads with the end token and truncates at 14 tokens.

    Each caption word is merged from its end to its start. A merge is therefore a suffix of a caption
    word; no word of `world.WORDS` ends in one, which a test checks.
    """
    vocabulary = {_START: 0, _END: 1, _UNKNOWN: 2}  # id 2 means "old CLIP" to transformers as an end token
    for character in _CHARACTERS:
        vocabulary.setdefault(character, len(vocabulary))
        vocabulary.setdefault(f"{character}</w>", len(vocabulary))
    merges: dict[tuple[str, str], None] = {}
    for word in _caption_words():
        suffix = f"{word[-1]}</w>"
        for character in reversed(word[:-1]):
            merges.setdefault((character, suffix))
            suffix = character + suffix
            vocabulary.setdefault(suffix, len(vocabulary))
    pairs: Any = list(merges)  # transformers annotates list[str], and documents pairs
    return CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=MAX_TOKENS)
