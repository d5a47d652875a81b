"""Stores of real libraries: videos by their frames, and what is passed over, counted by reason."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import formats
from messages import mentions, naming
from seps.cli.main import main
from seps.images.formats import Reader, video
from seps.images.formats.video import frame_times, read_frame, sampled_times, seconds_of, time_code
from seps.images.shards import UnreadableImage, read_source
from seps.images.sources import ImageSource, row_id
from seps.photos.captions.images import list_images
from seps.photos.indexing import gallery as gallery_module
from seps.photos.indexing.gallery import walk
from seps.photos.indexing.maintenance import verify
from seps.photos.search.explaining import find_image
from seps.photos.search.searcher import Searcher
from seps.photos.store.store import Store
from stores import index, model_folder, paint

RED, GREEN, BLUE = (200, 30, 30), (30, 180, 40), (40, 40, 210)


def colour(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)), float).mean(axis=(0, 1))


def is_colour(data: bytes, wanted: tuple[int, int, int]) -> bool:
    return bool(np.abs(colour(data) - wanted).max() < 12)


def frames(store: Path) -> dict[str, tuple[str, str]]:
    """Name -> (id, digest) of all rows."""
    return {
        f"{file.path}@{file.member}" if file.member else file.path: (file.id, file.sha256)
        for file in Store.open(store).known().values()
    }


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: Reader) -> None:
    """As if the packages of some readers, or of all, were not installed."""
    monkeypatch.setattr(gallery_module, "installed", lambda reader: bool(hidden) and reader not in hidden)


@pytest.mark.parametrize(
    "seconds, codes",
    [
        (0.0, ["00:00:00"]),
        (3.0, ["00:00:01"]),
        (30.0, ["00:00:05", "00:00:15", "00:00:25"]),
        (25.0, ["00:00:04", "00:00:12", "00:00:20"]),
    ],
)
def test_the_times_of_frames(seconds: float, codes: list[str]) -> None:
    assert sampled_times(seconds) == codes


def test_times_are_bounded_and_read_back() -> None:
    long = sampled_times(90_000.0)
    assert len(long) == video.MOST_FRAMES and long[0] == "00:18:45" and long[-1] == "24:41:15"
    assert [seconds_of(time_code(value)) for value in (0, 59, 3600, 400_000)] == [0, 59, 3600, 400_000]
    for wrong in ("", "1:00:00", "00:60:00", "../x", "00:00:00.5"):
        with pytest.raises(ValueError, match="video"):
            seconds_of(wrong)


@pytest.mark.parametrize(
    "name, format, codec",
    [
        ("a.mp4", "mp4", "libx264"),
        ("a.MOV", "mov", "libx264"),
        ("a.mkv", "matroska", "mpeg4"),
        ("a.webm", "webm", "libvpx"),
        ("a.avi", "avi", "mpeg4"),
        ("a.mts", "mpegts", "libx264"),
        ("a.wmv", "asf", "wmv2"),
    ],
)
def test_a_frame_is_the_one_shown_at_its_time(tmp_path: Path, name: str, format: str, codec: str) -> None:
    file = tmp_path / name
    file.write_bytes(formats.video([RED, GREEN, BLUE], format=format, codec=codec, rate=5))
    assert frame_times(file) == ["00:00:05", "00:00:15", "00:00:25"]
    shown = [read_source(ImageSource(file, code)) for code in frame_times(file)]
    assert [is_colour(data, wanted) for data, wanted in zip(shown, (RED, GREEN, BLUE), strict=True)] == [True] * 3
    assert is_colour(read_frame(file, "00:00:09"), RED) and is_colour(read_frame(file, "00:00:11"), GREEN)


@pytest.mark.parametrize("clockwise", [90, 270])
def test_a_video_of_an_upright_phone_is_upright(tmp_path: Path, clockwise: int) -> None:
    picture = formats.corners()
    file = tmp_path / "a.mp4"
    file.write_bytes(formats.turned_video(formats.video([RED], image=picture), clockwise))
    shown = Image.open(io.BytesIO(read_frame(file, "00:00:05")))
    wanted = picture.rotate(-clockwise, expand=True)
    assert shown.size == (64, 96)
    assert np.abs(np.asarray(shown, float) - np.asarray(wanted, float)).mean() < 6


def test_a_broken_video_is_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = formats.video([RED, GREEN])
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.mov").write_bytes(b"")
    # A list of other files: FFmpeg reads such under any name, unless it is told the container.
    (tmp_path / "list.mp4").write_bytes(
        b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n/etc/passwd\n#EXT-X-ENDLIST\n"
    )
    (tmp_path / "good.mp4").write_bytes(whole)
    gallery = walk(tmp_path)
    assert [str(found) for found in gallery.images] == ["good.mp4 @ 00:00:05", "good.mp4 @ 00:00:15"]
    assert [problem.name for problem in gallery.problems] == ["cut.mp4", "empty.mov", "list.mp4"]
    assert all("damaged" in problem.kind for problem in gallery.problems)
    monkeypatch.setattr(video, "MAX_FRAME_PIXELS", 96 * 64 - 1)
    with pytest.raises(UnreadableImage, match=naming("96", "64", "pixels")):
        read_source(ImageSource(tmp_path / "good.mp4", "00:00:05"))


def test_decoding_stops_after_a_bounded_number_of_packets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(formats.video([RED, GREEN, BLUE]))  # one key frame for each colour at least
    monkeypatch.setattr(video, "MOST_PACKETS", 3)
    assert is_colour(read_frame(file, "00:00:09"), RED)


def test_a_changed_video_replaces_all_its_frames(tmp_path: Path) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    paint(folder / "p.jpg", 1)
    (folder / "a.mp4").write_bytes(formats.video([RED, GREEN, BLUE]))
    report = index(folder, store)
    assert (report.new, report.problems) == (4, [])
    first = frames(store)
    assert sorted(first) == ["a.mp4@00:00:05", "a.mp4@00:00:15", "a.mp4@00:00:25", "p.jpg"]
    assert first["a.mp4@00:00:05"][0] == row_id("a.mp4", "00:00:05")
    assert index(folder, store).unchanged == 4
    assert verify(Store.open(store)) == []

    (folder / "a.mp4").write_bytes(formats.video([BLUE]))  # three of four rows change or go: no loss, the file is there
    report = index(folder, store)
    assert (report.changed, report.deleted, report.unchanged) == (1, 2, 1)
    second = frames(store)
    assert sorted(second) == ["a.mp4@00:00:05", "p.jpg"]
    assert second["a.mp4@00:00:05"][1] != first["a.mp4@00:00:05"][1]
    row = Store.open(store).get(second["a.mp4@00:00:05"][0], ["thumbnail", "width", "height"])
    assert row is not None and (row["width"], row["height"]) == (96, 64) and is_colour(row["thumbnail"], BLUE)

    os.rename(folder / "a.mp4", folder / "b.mp4")
    report = index(folder, store)
    assert (report.moved, report.deleted) == (1, 1) and sorted(frames(store)) == ["b.mp4@00:00:05", "p.jpg"]
    os.remove(folder / "b.mp4")
    assert index(folder, store, prune=True).deleted == 1 and sorted(frames(store)) == ["p.jpg"]


def test_rows_whose_reader_is_gone_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    paint(folder / "p.jpg", 1)
    (folder / "a.mp4").write_bytes(formats.video([RED, GREEN]))
    (folder / "a.heic").write_bytes(formats.heic(formats.corners()))
    with tarfile.open(folder / "t.tar", "w") as tar:
        tar.add(folder / "a.heic", "in.heic")
        tar.add(folder / "a.mp4", "in.mp4")
    report = index(folder, store)
    assert report.new == 5 and list(report.skipped.values()) == [["t.tar:in.mp4"]]
    hide(monkeypatch)
    report = index(folder, store)
    assert (report.kept, report.deleted, len(frames(store))) == (4, 0, 5)
    skipped = {tuple(names): why for why, names in report.skipped.items()}
    for names in (("a.heic", "t.tar:in.heic"), ("a.mp4",)):
        assert "pip install 'seps[formats]'" in skipped[names]


def test_the_summary_counts_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "g"
    paint(folder / "p.jpg", 1)
    for number in range(12):
        (folder / f"IMG_{number}.HEIC").write_bytes(b"x")
    (folder / "a.nef").write_bytes(b"x")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "cut.jpg").write_bytes((folder / "p.jpg").read_bytes()[:300])
    (folder / "torn.jpg").write_bytes((folder / "p.jpg").read_bytes()[:290])
    (folder / "text.png").write_bytes(b"this is no picture at all")
    hide(monkeypatch)
    words = ["index", str(folder), "--store", str(tmp_path / "s"), "--model", model_folder(), "--no-bank"]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert mentions(told, "12", "HEIC", "seps[formats]", "IMG_0.HEIC")
    assert mentions(told, "RAW", "seps[formats]", "a.nef")
    assert mentions(told, "4", "2", "1")
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert sorted(answer["unread"].values()) == [1, 1, 2] and answer["unread"]["empty"] == 1


def test_a_frame_has_a_name_in_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = tmp_path / "g", tmp_path / "s"
    for name, colours in (("one.mp4", [RED, GREEN]), ("two.mp4", [BLUE])):
        (folder / "sub").mkdir(parents=True, exist_ok=True)
        (folder / "sub" / name).write_bytes(formats.video(colours))
    lines = [{"image": "sub/one.mp4 @ 00:00:15", "dense": "A green wall."}]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [item.id for item in list_images(folder)] == [
        "sub/one.mp4 @ 00:00:05",
        "sub/one.mp4 @ 00:00:15",
        "sub/two.mp4 @ 00:00:05",
    ]
    report = index(folder, store)
    assert (report.described, report.description_problems) == (1, [])
    opened = Store.open(store)
    found = find_image(opened, "sub/one.mp4 @ 00:00:15")
    assert found == find_image(opened, str(folder / "sub" / "one.mp4 @ 00:00:15")) == row_id("sub/one.mp4", "00:00:15")
    assert opened.folders() == ["sub"]
    row = opened.get(found, ["path", "member", "dense"])
    assert row is not None and row["dense"] == "A green wall."
    assert is_colour(read_source(Searcher(store, model_folder()).image_source(row)), GREEN)
    assert main(["search", "a wall", "--store", str(store), "--model", model_folder(), "-k", "3"]) == 0
    assert "sub/one.mp4 @ 00:00:15" in capsys.readouterr().out
