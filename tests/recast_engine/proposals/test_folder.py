"""Images that somebody made already, matched to prompts by name or manifest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recast_engine.config import ProposalConfig
from recast_engine.errors import ConfigError, ProposalFailure
from recast_engine.observer import Stopped
from recast_engine.prompts import Prompt
from recast_engine.proposals.collection import Proposals, collect
from recast_engine.proposals.folder import file_stem
from tests.recast_engine.proposals.heard import Heard

CIRCLE, CATS = Prompt("A red circle!"), Prompt("two cats, one dog")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


def save(path: Path, red: int, size: tuple[int, int] = (48, 48), format: str = "PNG") -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, (red, 0, 0)).save(path, format=format)


def found(images: Path, per_prompt: int = 2, heard: Heard | None = None) -> Proposals:
    config = ProposalConfig(source="folder", folder=images.name, max_images=1)
    prompts = [CIRCLE, CATS]
    return collect(config, prompts, per_prompt, cache=images.parent, resolution=48, observer=heard)


def reds(proposals: Proposals, prompt: Prompt) -> list[int]:
    return [int(image[5, 7, 0]) for image in proposals.images(prompt)]


def test_files_are_matched_by_name_in_order_of_their_numbers(images: Path) -> None:
    save(images / "a-red-circle.10.png", 30)
    save(images / "a-red-circle.2.png", 20)
    save(images / "A-Red-Circle.PNG", 10)
    save(images / "two-cats-one-dog.0.png", 40)
    save(images / "two-cats-one-dog.1.png", 50)
    save(images / "something-else.png", 60)
    (images / "notes.txt").write_text("not an image")
    heard = Heard()
    proposals = found(images, 2, heard)
    assert reds(proposals, CIRCLE) == [10, 20]
    assert reds(proposals, CATS) == [40, 50]
    assert (heard.phases, heard.done) == ([("proposals", 4)], [1, 2, 3, 4])
    assert (heard.bought, heard.files) == (0, {})


def test_all_three_formats_are_read(images: Path) -> None:
    for suffix, format in (("png", "PNG"), ("jpg", "JPEG"), ("jpeg", "JPEG"), ("webp", "WEBP")):
        for stem in ("a-red-circle", "two-cats-one-dog"):
            save(
                images / f"{stem}.{len(suffix)}{format[0]}.{suffix}", 0, format=format
            )  # no number: no match
            save(images / f"{stem}.{len(list(images.iterdir()))}.{suffix}", 200, format=format)
    proposals = found(images, 4)
    assert reds(proposals, CIRCLE) == pytest.approx([200] * 4, abs=3)


def test_names_follow_from_prompts() -> None:
    assert file_stem("A red circle!") == "a-red-circle"
    assert file_stem("  the word “CAT”  ") == "the-word-cat"
    assert file_stem("Ein Käfer, 3 Bäume") == "ein-käfer-3-bäume"
    assert file_stem("a_b") == "a_b"
    assert len(file_stem("很" * 500).encode()) <= 200


def test_a_manifest_comes_before_names(images: Path) -> None:
    save(images / "a-red-circle.0.png", 1)
    save(images / "x.png", 70)
    save(images / "deep" / "y.png", 80)
    lines = [
        {"file": "x.png", "prompt": CIRCLE.prompt, "model": "painter"},
        {"file": "deep/y.png", "prompt": CATS.prompt},
        {"file": "x.png", "prompt": "of another prompt set"},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (images / "manifest.jsonl").write_text(text, encoding="utf-8-sig")
    proposals = found(images, 1)
    assert (reds(proposals, CIRCLE), reds(proposals, CATS)) == ([70], [80])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{broken", "line 2: wanted"),
        ('{"file": "x.png"}', "line 2: wanted"),
        ('{"file": "", "prompt": "x"}', "line 2: wanted"),
        ('{"file": "gone.png", "prompt": "x"}', "line 2: there is no file 'gone.png'"),
        ('{"file": "../secret.png", "prompt": "x"}', "line 2: '../secret.png' lies outside the folder"),
        ('{"file": "caf\udce9.png", "prompt": "x"}', "line 2: is not UTF-8 text"),
        (json.dumps({"file": "a\0.png", "prompt": "x"}), "line 2: 'a\\x00.png' cannot be a file"),
        (json.dumps({"file": "long" * 99, "prompt": "x"}), "line 2: 'longlong"),
        ('{"file": "circle.png", "prompt": "x"}', "line 2: 'circle.png' cannot be a file"),
        ('{"file": "/etc/hostname", "prompt": "x"}', "line 2: '/etc/hostname' lies outside the folder"),
        ('{"file": "link.png", "prompt": "x"}', "line 2: 'link.png' lies outside the folder"),
    ],
)
def test_a_wrong_manifest_names_its_line(images: Path, line: str, problem: str) -> None:
    save(images.parent / "secret.png", 1)
    save(images / "x.png", 1)
    (images / "link.png").symlink_to(images.parent / "secret.png")
    (images / "circle.png").symlink_to("circle.png")
    good = json.dumps({"file": "x.png", "prompt": CIRCLE.prompt})
    (images / "manifest.jsonl").write_bytes(f"{good}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        found(images, 1)
    assert f"manifest.jsonl, {problem}" in str(caught.value)


@pytest.mark.parametrize("link", ["a-red-circle.0.png", "manifest.jsonl"])
def test_a_link_out_of_the_folder_is_refused_whatever_led_to_it(images: Path, link: str) -> None:
    for stem in ("a-red-circle", "two-cats-one-dog"):
        save(images / f"{stem}.1.png", 1)
    save(images.parent / "secret.png", 1)
    (images / link).symlink_to("../secret.png")
    with pytest.raises(ConfigError) as caught:
        found(images, 1)
    assert str(caught.value) == f"folder 'set': {link!r} lies outside the folder"


def test_links_within_the_folder_and_to_the_folder_are_followed(images: Path) -> None:
    save(images / "deep" / "x.png", 90)
    for stem in ("a-red-circle", "two-cats-one-dog"):
        (images / f"{stem}.0.png").symlink_to("deep/x.png")
    images.rename(images.parent / "elsewhere")
    images.symlink_to("elsewhere")
    assert reds(found(images, 1), CATS) == [90]


def test_what_is_missing_is_named(images: Path) -> None:
    save(images / "a-red-circle.0.png", 1)
    save(images / "two-cats-one-dog.0.png", 1)
    save(images / "two-cats-one-dog.1.png", 1)
    with pytest.raises(ConfigError) as caught:
        found(images, 2)
    assert str(caught.value) == (
        "folder 'set': 1 of 2 prompts have less than 2 images: 'A red circle!' has 1 "
        "(a-red-circle.0.png and so on)"
    )


def test_a_folder_that_is_not_there_is_named_without_its_path(images: Path) -> None:
    config = ProposalConfig(source="folder", folder="none")
    with pytest.raises(ConfigError, match=r"no folder 'none' .*RECAST_PROPOSALS") as caught:
        collect(config, [CIRCLE], 1, cache=images.parent, resolution=48)
    assert str(images.parent) not in str(caught.value)


def test_prompts_that_share_a_name_need_a_manifest(images: Path) -> None:
    config = ProposalConfig(source="folder", folder="set")
    prompts = [Prompt("a red circle"), Prompt("a red circle?")]
    with pytest.raises(ConfigError, match=r"same file name; .* manifest\.jsonl"):
        collect(config, prompts, 1, cache=images.parent, resolution=48)


# Upright after a quarter turn, and a resolution that is no number: Pillow trips over it with a TypeError.
ODD_EXIF = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + (
    b"\x12\x01\x03\0\x01\0\0\0\x06\0\0\0" + b"\x1a\x01\x02\0\x02\0\0\0x\0\0\0" + b"\0\0\0\0"
)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: save(path, 1, (47, 60)), "has 47 x 60 pixels, less than 48 a side"),
        (lambda path: save(path, 1, format="GIF"), "is no intact PNG, JPEG or WebP image"),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "is no intact PNG, JPEG or WebP image"),
        (lambda path: path.write_bytes(b""), "is no intact PNG, JPEG or WebP image"),
        (
            lambda path: Image.new("RGB", (48, 48)).save(path, exif=ODD_EXIF),
            "is no intact PNG, JPEG or WebP image",
        ),
        (lambda path: Image.new("I;16", (48, 48)).save(path), "has more than 8 bits a channel"),
        (lambda path: Image.new("1", (8000, 8000)).save(path), "has 8000 x 8000 pixels, more than 33554432"),
        (lambda path: Image.new("1", (20000, 20000)).save(path), "has more than 33554432 pixels"),
    ],
)
def test_a_bad_file_shows_before_anything_is_measured(images: Path, spoil: object, problem: str) -> None:
    for stem in ("a-red-circle", "two-cats-one-dog"):
        save(images / f"{stem}.png", 1)
    spoil(images / "two-cats-one-dog.png")  # type: ignore[operator]
    with pytest.raises(ConfigError) as caught:
        found(images, 1)
    assert str(caught.value) == f"folder 'set': two-cats-one-dog.png {problem}"


def test_images_are_cropped_in_the_middle_turned_upright_and_put_on_white(images: Path) -> None:
    wide = np.zeros((48, 96, 3), dtype=np.uint8)
    wide[:, 24:72] = 255  # the middle square
    Image.fromarray(wide).save(images / "a-red-circle.png")
    lying = Image.new("RGBA", (60, 50), (0, 0, 0, 0))
    lying.paste((255, 0, 0, 255), (0, 0, 60, 25))  # the upper half red, the lower transparent
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    lying.save(images / "two-cats-one-dog.png", exif=exif)
    proposals = found(images, 1)
    assert (proposals.images(CIRCLE) == 255).all()
    turned = proposals.images(CATS)[0]
    assert tuple(turned[2, 24]) == (255, 255, 255)
    assert tuple(turned[45, 24]) == (255, 0, 0)


def test_a_file_that_changes_meanwhile_is_noticed(images: Path) -> None:
    for stem in ("a-red-circle", "two-cats-one-dog"):
        save(images / f"{stem}.png", 1)
    proposals = found(images, 1)
    (images / "a-red-circle.png").write_bytes(b"")
    with pytest.raises(ProposalFailure, match=r"a-red-circle\.png changed"):
        proposals.images(CIRCLE)


def test_checking_a_folder_can_be_stopped(images: Path) -> None:
    for stem in ("a-red-circle", "two-cats-one-dog"):
        save(images / f"{stem}.png", 1)
    with pytest.raises(Stopped):
        found(images, 1, Heard(stop_after=0))
