"""Memory is bounded before it is taken: that of decoding a picture, and that of a description."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from seps.encoders.text import MAX_CHARACTERS
from seps.images import decoding as images
from seps.images.shards import UnreadableImage
from seps.images.sources import DataError, ImageSource
from seps.photos.indexing.descriptions import read_descriptions
from seps.photos.indexing.gallery import walk
from seps.reid.data import reader
from seps.retrieval.data import lines, load_jsonl
from stores import gallery, index, paint

SIDE = 3000
DECODE = """
import io, resource, sys
from pathlib import Path
from PIL import Image
from seps.images.sources import ImageSource
from seps.images.decoding import decode_picture

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small = io.BytesIO()
Image.new("RGB", (8, 8)).save(small, "PNG")
decode_picture(small.getvalue(), ImageSource(Path("small")), (64, 64))
before = used()
for name in sys.argv[1:]:
    decode_picture(Path(name).read_bytes(), ImageSource(Path(name)), (64, 64))
print(used() - before)
"""


def pictures() -> dict[str, bytes]:
    """Files of a few kilobytes of which each has nine million pixels, in the modes that took most."""
    turned, out = Image.Exif(), {}
    turned[0x0112] = 6
    grey = Image.fromarray(np.zeros((SIDE, SIDE), np.uint16))
    kinds = {
        "transparent.png": (Image.new("P", (SIDE, SIDE)), {"transparency": 0}),
        "sixteen.png": (grey, {}),
        "turned.png": (Image.new("RGB", (SIDE, SIDE)), {"exif": turned}),
        "plain.png": (Image.new("RGB", (SIDE, SIDE)), {}),
    }
    for name, (image, options) in kinds.items():
        buffer = io.BytesIO()
        image.save(buffer, "PNG", **options)
        out[name] = buffer.getvalue()
    return out


@pytest.mark.slow
def test_a_picture_takes_little_more_than_its_pixels(tmp_path: Path) -> None:
    for name, data in pictures().items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", DECODE, *map(str, tmp_path.iterdir())]
    taken = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert taken < 8 * SIDE**2 + 24 * images.STRIP_PIXELS


def encoded(mode: str, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (64, 48)).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "per_pixel"),
    [
        (encoded("RGBA", "PNG"), 8),
        (encoded("P", "PNG"), 5),
        (encoded("RGB", "WEBP"), 18),
        (encoded("RGB", "JPEG", progressive=True), 14),
        (encoded("RGBA", "JPEG2000"), 24),
        (encoded("RGB", "TIFF"), 11),
    ],
)
def test_what_takes_too_much_is_refused_before_it_is_decoded(
    data: bytes, per_pixel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ImageSource(Path("large.img"))
    monkeypatch.setattr(images, "MAX_DECODED_BYTES", per_pixel * 64 * 48)
    images.decode_picture(data, source, (8, 8))
    monkeypatch.setattr(images, "MAX_DECODED_BYTES", per_pixel * 64 * 48 - 1)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(UnreadableImage, match=r"large\.img.*64 x 48") as caught:
        images.decode_picture(data, source, (8, 8))
    assert caught.value.kind == "too large"


def test_a_picture_beyond_the_bound_is_named_and_the_others_are_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gallery(tmp_path / "g", 2)
    paint(folder / "large.png", 5, (300, 200))
    monkeypatch.setattr(images, "MAX_DECODED_BYTES", 8 * 300 * 200 - 1)
    report = index(folder, tmp_path / "s")
    assert report.new == 2
    assert [(problem.name, problem.kind) for problem in report.problems] == [("large.png", "too large")]


def test_strips_change_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (37, 23, 4), dtype=np.uint8)
    wide = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for image in (Image.fromarray(noise), Image.fromarray(noise[..., :3]), wide):
            buffer = io.BytesIO()
            image.save(buffer, "PNG", exif=exif)
            found = []
            for pixels in (10**6, 23 * 5):
                monkeypatch.setattr(images, "STRIP_PIXELS", pixels)
                found.append(np.asarray(images.decode_upright(buffer.getvalue(), ImageSource(Path("a")), 99).image))
            assert np.array_equal(*found)
            assert found[0].shape == ((37, 23, 3) if orientation < 5 else (23, 37, 3))


def test_shots_are_bounded_and_pipes_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    reader._opened_rgb(tmp_path / "a.png")
    monkeypatch.setattr(reader, "MAX_PIXELS", 40 * 30 - 1)
    with pytest.raises(ValueError, match="40 x 30"):
        reader._opened_rgb(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(OSError, match="regular"):
        reader._opened_rgb(tmp_path / "pipe.png")


def described(folder: Path, *rows: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dense.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_long_description_is_cut_and_said(tmp_path: Path) -> None:
    paint(tmp_path / "a.jpg", 1)
    path = described(tmp_path, {"image": "a.jpg", "captions": ["a cat"], "dense": "word " * MAX_CHARACTERS})
    texts = read_descriptions(tmp_path)
    (image,) = walk(tmp_path).images
    assert len(texts.of(image) or "") == MAX_CHARACTERS
    assert [problem.name for problem in texts.problems] == ["dense.jsonl, line 1"]
    with pytest.warns(UserWarning, match=r"dense\.jsonl, line 1"):
        (record,) = load_jsonl(path).records
    assert len(record.dense or "") == MAX_CHARACTERS


def test_a_line_without_end_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        paint(tmp_path / name, 1)
    rows: list[dict[str, object]] = [
        {"image": f"{name}.jpg", "captions": ["a cat"], "dense": "a cat"} for name in "abc"
    ]
    rows[1]["dense"] = "a cat " * 99
    path = described(tmp_path, *rows)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    texts = read_descriptions(tmp_path)
    assert [texts.of(image) for image in walk(tmp_path).images] == ["a cat", None, "a cat"]
    assert [problem.name for problem in texts.problems] == ["dense.jsonl, line 2"]
    with pytest.raises(DataError, match=r"dense\.jsonl, line 2"):
        load_jsonl(path)


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n  ", "\r\n", "\n\n\n"])
def test_lines_are_those_of_the_whole_text(tmp_path: Path, end: str) -> None:
    text = "\ufeffone\u2028still one\r\n\ntwo" + end
    (tmp_path / "a.txt").write_bytes(text.encode())
    whole = text.removeprefix("\ufeff").split("\n")
    if not whole[-1].strip():
        whole.pop()
    assert lines.text_lines(tmp_path / "a.txt") == [line.removesuffix("\r") for line in whole]


def test_a_shard_that_is_not_there_is_ignored_for_loose_pictures(tmp_path: Path) -> None:
    for name in ("a.jpg", "sub/b.jpg", "c.jpg"):
        paint(tmp_path / name, 1)
    rows = [{"image": name, "shard": "train-000.tar", "dense": f"of {name}"} for name in ("a.jpg", "sub/b.jpg")]
    rows += [{"image": "c.jpg", "shard": "x.tar", "dense": "another"}, {"image": "c.jpg", "dense": "of c.jpg"}]
    described(tmp_path, *rows)
    texts, found = read_descriptions(tmp_path), walk(tmp_path)
    assert {image.path: texts.of(image) for image in found.images} == {
        name: f"of {name}" for name in ("a.jpg", "sub/b.jpg", "c.jpg")
    }
    assert len(texts.unused(found)) == 1
    (tmp_path / "train-000.tar").write_bytes(bytes(1024))  # a tar without members: its lines are for it alone
    texts = read_descriptions(tmp_path)
    assert [texts.of(image) for image in found.images] == [None, "of c.jpg", None]
