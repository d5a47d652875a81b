"""The demo gallery that ships with the package: complete, readable, described and attributed."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

GALLERY = Path(str(files("seps"))) / "assets" / "gallery"
RECORDS: list[dict[str, Any]] = [
    json.loads(line) for line in (GALLERY / "gallery.jsonl").read_text(encoding="utf-8").splitlines()
]
NAMES = [str(record["image"]) for record in RECORDS]


def attribution_rows() -> dict[str, list[str]]:
    """File name to its other table cells (title, author, licence, source) in ATTRIBUTION.md."""
    rows = {}
    for line in (GALLERY / "ATTRIBUTION.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].endswith(".jpg"):
            rows[cells[0]] = cells[1:]
    return rows


def test_gallery_is_big_enough_sorted_and_without_repeats() -> None:
    assert len(NAMES) >= 36
    assert sorted(set(NAMES)) == NAMES
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.jpg", name) for name in NAMES)


def test_every_photo_has_a_line_and_every_line_a_photo() -> None:
    assert sorted(path.name for path in GALLERY.iterdir()) == sorted([*NAMES, "ATTRIBUTION.md", "gallery.jsonl"])


@pytest.mark.parametrize("name", NAMES)
def test_photo_decodes_at_gallery_size_without_metadata(name: str) -> None:
    with Image.open(GALLERY / name) as image:
        image.load()
        assert image.format == "JPEG"
        assert image.mode == "RGB"
        assert 256 <= min(image.size) <= 320
        assert max(image.size) <= 2 * min(image.size)
        # Camera data can hold places and names; the gallery ships none.
        assert len(image.getexif()) == 0


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_texts_have_the_promised_shape(record: dict[str, Any]) -> None:
    assert set(record) == {"image", "captions", "dense"}
    captions = record["captions"]
    assert 2 <= len(captions) <= 3
    assert len(set(captions)) == len(captions)
    assert all(4 <= len(caption.split()) <= 25 for caption in captions)
    assert 40 <= len(record["dense"].split()) <= 130


def test_dense_texts_are_all_different() -> None:
    assert len({record["dense"] for record in RECORDS}) == len(RECORDS)


def test_every_photo_is_attributed_with_a_free_licence() -> None:
    rows = attribution_rows()
    assert list(rows) == NAMES
    for name, cells in rows.items():
        assert len(cells) == 4, name
        assert all(cells), name
        assert re.fullmatch(r"public domain|CC0 1\.0|CC BY(-SA)? \d\.\d|MIT|BSD 2-clause", cells[2]), name


def test_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in GALLERY.iterdir()) < 1.7e6
