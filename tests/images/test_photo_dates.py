"""When a photo was taken: EXIF with its offset, the file's time where it does not say, and which of the two it was."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from seps.images.dates import local_time, nanoseconds, nanoseconds_of
from seps.images.metadata import read_metadata
from seps.images.sources import ImageSource
from seps.photos.search.searcher import Searcher
from seps.photos.store.filters import Filters
from seps.photos.store.store import Store
from stores import index, model_folder

ORIGINAL, OFFSET, PARTS, DIGITIZED, CHANGED = 0x9003, 0x9011, 0x9291, 0x9004, 0x0132
DAY = 86_400 * 10**9


@pytest.fixture
def in_lisbon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Lisbon")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def photo(path: Path, tags: dict[int, str], form: str = "JPEG", shade: int = 90) -> Path:
    """A picture with EXIF tags, those of the camera in their own block."""
    exif = Image.Exif()
    camera = exif.get_ifd(0x8769)
    for tag, value in tags.items():
        if tag == CHANGED:
            exif[tag] = value
        else:
            camera[tag] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (60, 44), (shade, 20, 200 - shade)).save(path, form, exif=exif)
    return path


def date_taken(source: ImageSource) -> int | None:
    return read_metadata(source.path.read_bytes(), source).taken


def utc(*parts: int) -> int:
    return int(datetime(*parts, tzinfo=timezone.utc).timestamp()) * 10**9  # type: ignore[arg-type,misc]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_the_offset_of_the_camera_counts(tmp_path: Path, form: str) -> None:
    tags = {ORIGINAL: "2024:05:31 18:20:05", OFFSET: "+09:00", PARTS: "25", CHANGED: "2025:01:01 00:00:00"}
    file = photo(tmp_path / "a", tags, form)
    assert date_taken(ImageSource(file)) == utc(2024, 5, 31, 9, 20, 5) + 250_000_000


@pytest.mark.usefixtures("in_lisbon")
def test_without_an_offset_it_is_the_clock_of_this_machine(tmp_path: Path) -> None:
    summer = photo(tmp_path / "s.jpg", {ORIGINAL: "2024:07:01 12:00:00"})
    winter = photo(tmp_path / "w.jpg", {ORIGINAL: "2024:01:01 12:00:00"})
    assert date_taken(ImageSource(summer)) == utc(2024, 7, 1, 11)
    assert date_taken(ImageSource(winter)) == utc(2024, 1, 1, 12)
    # and it is shown as the camera wrote it, whatever the season
    assert local_time(utc(2024, 7, 1, 11)) == "2024-07-01T12:00:00"
    assert local_time(utc(2024, 1, 1, 12)) == "2024-01-01T12:00:00"


def test_other_tags_stand_in_and_broken_dates_do_not(tmp_path: Path) -> None:
    stand_in = photo(tmp_path / "a.jpg", {ORIGINAL: "0000:00:00 00:00:00", DIGITIZED: "2020:02:29 10:00:00"})
    assert date_taken(ImageSource(stand_in)) == nanoseconds("2020-02-29T10:00:00")
    changed = photo(tmp_path / "b.tif", {CHANGED: "2019:03:04 05:06:07"}, "TIFF")
    assert date_taken(ImageSource(changed)) == nanoseconds("2019-03-04T05:06:07")
    for bad in ("    :  :     :  :  ", "2021:02:30 10:00:00", "yesterday", "", "9999:99:99 99:99:99"):
        assert date_taken(ImageSource(photo(tmp_path / "c.jpg", {ORIGINAL: bad}))) is None
    (tmp_path / "no.jpg").write_bytes(b"\xff\xd8 no picture")
    assert date_taken(ImageSource(tmp_path / "no.jpg")) is None


@given(st.one_of(st.text(max_size=25), st.binary(max_size=25), st.none(), st.integers()), st.text(max_size=8))
def test_any_tag_gives_a_date_or_none(value: object, more: str) -> None:
    found = nanoseconds_of(value, more, more)
    assert found is None or abs(found) < 2**63


def dated_gallery(folder: Path) -> Path:
    """Three photos with dates by EXIF in 2001, 2002 and 2003, one without; all files are of today."""
    for year in (2001, 2002, 2003):
        photo(folder / f"y{year}.jpg", {ORIGINAL: f"{year}:06:01 12:00:00"}, shade=year % 200)
    photo(folder / "none.jpg", {}, shade=5)
    return folder


def test_hits_say_their_date_and_its_source_and_filters_use_it(tmp_path: Path) -> None:
    folder = dated_gallery(tmp_path / "g")
    os.utime(folder / "none.jpg", ns=(nanoseconds("2002-01-01"),) * 2)
    index(folder, tmp_path / "s")
    searcher = Searcher(tmp_path / "s", model_folder())
    hits = {hit.path: hit for hit in searcher.search("a dog")}
    assert {name: (hit.date, hit.date_source) for name, hit in hits.items()} == {
        "y2001.jpg": ("2001-06-01T12:00:00", "exif"),
        "y2002.jpg": ("2002-06-01T12:00:00", "exif"),
        "y2003.jpg": ("2003-06-01T12:00:00", "exif"),
        "none.jpg": ("2002-01-01T00:00:00", "file"),
    }
    assert hits["none.jpg"].as_dict()["date_source"] == "file"
    for exact in (False, True):
        filters = Filters(since=nanoseconds("2001-12-31"), until=nanoseconds("2003-01-01"))
        found = searcher.search("a dog", filters=filters, exact=exact)
        assert {hit.path for hit in found} == {"y2002.jpg", "none.jpg"}


def test_a_moved_photo_keeps_its_date(tmp_path: Path) -> None:
    folder = dated_gallery(tmp_path / "g")
    index(folder, tmp_path / "s")
    (folder / "new").mkdir()
    os.replace(folder / "y2001.jpg", folder / "new" / "x.jpg")
    assert index(folder, tmp_path / "s").moved == 1
    (row,) = [
        row for some in Store.open(tmp_path / "s").scan(["path", "taken"]) for row in some.rows() if "/" in row["path"]
    ]
    assert row["taken"] == nanoseconds("2001-06-01T12:00:00")
