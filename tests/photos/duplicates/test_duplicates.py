"""Groups of duplicates: against a slow twin, on real copies of pictures, and what the command writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance

import formats
from messages import mentions
from seps.cli.main import call, main
from seps.photos.duplicates import duplicates as module
from seps.photos.duplicates import likeness
from seps.photos.duplicates.contact_sheet import SHEET_GROUPS, sheet
from seps.photos.duplicates.duplicates import find_duplicates, group
from seps.photos.duplicates.likeness import ComparedPictures, CopyKind, Looks, looks_of, read_gallery
from seps.photos.indexing.build import IndexOptions, index_folder
from seps.photos.library import Library
from seps.photos.search.ranking import fold
from seps.photos.search.searcher import Searcher
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from seps.retrieval.embedded import EMBEDDED, NEAR_DUPLICATE_COSINES, embedded_folder
from seps.retrieval.pretrained import from_pretrained
from stores import TEXTS, index

ASSETS = Path(module.__file__).parents[2] / "assets" / "gallery"
PHOTOS = sorted(ASSETS.glob("*.jpg"))


def made_up(count: int, seed: int, kinds: int = 6) -> ComparedPictures:
    """Rows around a few centres, so that every kind of link and chains of them occur."""
    draw = np.random.default_rng(seed)
    centre = draw.integers(0, kinds, count)
    base = draw.integers(0, 255, (kinds, 3 * likeness.SIDE**2))
    noise = draw.normal(0, 1, (count, base.shape[1])) * draw.choice([1.0, 20.0, 60.0], (count, 1))
    pixels = np.clip(base[centre] + noise, 0, 255).astype(np.uint8)
    pixels[draw.random(count) < 0.1] = draw.choice([0, 2, 90], 1)[0]
    hashes = np.array([centre[i] * 7919 for i in range(count)], np.uint64)
    hashes ^= np.uint64(1) << draw.integers(0, 40, count).astype(np.uint64)
    hashes ^= np.where(draw.random(count) < 0.2, np.uint64(0xFFFF << 40), np.uint64(0))
    floats = pixels.astype(np.float32)
    shapes = draw.choice([0.0, 0.05, 0.4], count).astype(np.float32)
    spread = draw.choice([0.05, 0.4], (count, 1))
    vectors = draw.normal(0, 1, (kinds, 16))[centre] + draw.normal(0, 1, (count, 16)) * spread
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    videos = np.where(draw.random(count) < 0.3, draw.integers(0, 3, count), -1)
    facts = [
        {
            "id": f"{i:020x}",
            "path": f"v{videos[i]}.mp4" if videos[i] >= 0 else f"p{i:04}.jpg",
            "member": f"00:00:{i % 60:02}" if videos[i] >= 0 else None,
            "size": 100,
            "mtime": int(draw.integers(0, 20)) * 10**9,
            "sha256": f"{draw.integers(0, count)}",
            "width": 8,
            "height": 8,
        }
        for i in range(count)
    ]
    return ComparedPictures(facts, Looks(hashes, pixels, floats.mean(1), floats.std(1), shapes), vectors, videos)


def slow_kind(
    gallery: ComparedPictures, a: int, b: int, kind: CopyKind, least: float, within: float | None
) -> str | None:
    """What `b` is to `a`, in plain Python."""
    looks = gallery.looks
    if gallery.videos[a] >= 0 and gallery.videos[a] == gallery.videos[b]:
        return None
    if gallery.facts[a]["sha256"] == gallery.facts[b]["sha256"]:
        return "file"
    left, right = (looks.pixels[i].astype(np.float64) for i in (a, b))
    moved = (left - left.mean()) @ (right - right.mean()) / len(left)
    correlation = moved / max(left.std(), 1e-3) / max(right.std(), 1e-3)
    if kind != "file" and abs(looks.shapes[a] - looks.shapes[b]) <= likeness.SHAPE:
        if left.std() < likeness.FLAT:
            if right.std() < likeness.FLAT and np.sqrt(((left - right) ** 2).mean()) < likeness.FLAT / 2:
                return "picture"
        elif bin(int(looks.hashes[a]) ^ int(looks.hashes[b])).count("1") <= likeness.HASH_BITS:
            ratio = max(right.std(), 1e-3) / left.std()
            if correlation >= likeness.CORRELATION and 1 / likeness.CONTRAST <= ratio <= likeness.CONTRAST:
                return "picture"
    close = within is None or abs(gallery.facts[a]["mtime"] - gallery.facts[b]["mtime"]) <= within * 1e9
    if kind == "near" and close and float(gallery.vectors[a] @ gallery.vectors[b]) >= least:
        shape = abs(looks.shapes[a] - looks.shapes[b]) <= likeness.NEAR_SHAPE
        return "near" if shape and correlation >= likeness.LAYOUT else None
    return None


def slow_groups(
    gallery: ComparedPictures, kind: CopyKind, least: float, within: float | None
) -> dict[str, dict[str, str]]:
    taken: set[int] = set()
    groups = {}
    for a in range(len(gallery.facts)):
        if a in taken:
            continue
        links = {b: slow_kind(gallery, a, b, kind, least, within) for b in range(a + 1, len(gallery.facts))}
        found = {b: link for b, link in links.items() if link is not None and b not in taken}
        if found:
            taken |= {a, *found}
            groups[gallery.facts[a]["id"]] = {gallery.facts[b]["id"]: link for b, link in found.items()}
    return groups


def as_mapping(groups: Sequence[module.Group]) -> dict[str, dict[str, str]]:
    return {found.keep.id: {copy.id: str(copy.kind) for copy in found.others} for found in groups}


@pytest.mark.parametrize("kind", likeness.KINDS)
@pytest.mark.parametrize("within", [None, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_groups_are_those_of_the_slow_twin(
    kind: CopyKind, within: float | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = made_up(150, seed)
    monkeypatch.setattr(likeness, "PICTURES_AT_ONCE", 16)
    monkeypatch.setattr(module, "_sorted", list)  # the twin does not fold the frames of two videos
    wanted = slow_groups(gallery, kind, 0.9, within)
    links = {link for found in wanted.values() for link in found.values()}
    assert len(wanted) > 3 and links == set(likeness.KINDS[: likeness.KINDS.index(kind) + 1])
    assert as_mapping(group(gallery, kind, 0.9, within)) == wanted
    monkeypatch.setattr(likeness, "PICTURES_AT_ONCE", 1000)
    assert as_mapping(group(gallery, kind, 0.9, within)) == wanted


def saved_again(folder: Path) -> dict[str, str]:
    """Five photos in several forms; by name of a copy the name of the photo with the most pixels."""
    best = {}
    for photo in PHOTOS[:5]:
        image, name = Image.open(photo).convert("RGB"), photo.stem
        width, height = image.size
        (folder / "large").mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, folder / "large" / f"{name}.jpg")
        shutil.copy(photo, folder / f"{name}-same.jpg")
        image.save(folder / f"{name}-q40.jpg", quality=40)
        image.resize((width // 2, height // 2)).save(folder / f"{name}-small.png")
        ImageEnhance.Brightness(image).enhance(1.15).save(folder / f"{name}-bright.webp")
        (folder / f"{name}.heic").write_bytes(formats.heic(image, quality=30))
        best.update(
            {f"{name}-{form}": f"{name}-same.jpg" for form in ("q40.jpg", "small.png", "bright.webp")}
            | {f"{name}.heic": f"{name}-same.jpg", f"large/{name}.jpg": f"{name}-same.jpg"}
        )
    for photo in PHOTOS[5:25]:
        shutil.copy(photo, folder / photo.name)
    return best


def test_copies_of_real_photos_are_found_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = saved_again(tmp_path / "g")
    before = sorted((file, file.stat().st_mtime_ns) for file in (tmp_path / "g").rglob("*"))
    assert index(tmp_path / "g", tmp_path / "s").problems == []
    store = Store.open(tmp_path / "s")
    exact = find_duplicates(store, kind="file")
    assert [[str(copy) for copy in found.pictures] for found in exact] == [
        [f"{photo.stem}-same.jpg", f"large/{photo.stem}.jpg"] for photo in PHOTOS[:5]
    ]
    assert {copy.likeness for found in exact for copy in found.others} == {1.0}
    groups = find_duplicates(store, kind="picture")
    assert {str(copy): str(found.keep) for found in groups for copy in found.others} == best
    assert all(found.kind == "picture" and found.keep.kind is None for found in groups)

    words = ["--store", str(tmp_path / "s"), "--kind", "picture"]
    page, drawing = tmp_path / "page.html", tmp_path / "sheet.jpg"
    assert call("duplicates", [*words, "--html", str(page), "--sheet", str(drawing)]) == 0
    told = capsys.readouterr().out
    name = PHOTOS[0].stem
    assert f"   keep  {name}-same.jpg  (keep, " in told and f"{name}.heic" in told
    assert mentions(told, "5", "25", len(store))
    text = page.read_text()
    assert text.count("<section>") == 5 and text.count("<img") == 30 and "http" not in text
    assert Image.open(drawing).size == (172 * 6 + 8, 200 * 5 + 8)
    assert call("duplicates", [*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [found["keep"]["path"] for found in answer] == [f"{photo.stem}-same.jpg" for photo in PHOTOS[:5]]
    assert sorted((file, file.stat().st_mtime_ns) for file in (tmp_path / "g").rglob("*")) == before


def test_flat_pictures_are_told_apart_by_their_colour() -> None:
    def thumb(colour: Any) -> bytes:
        return formats.encoded(Image.new("RGB", (160, 120), colour), "JPEG", quality=80)

    data = [thumb("white"), thumb((253, 253, 253)), thumb("black"), thumb((200, 255, 200)), b"no picture"]
    looks = looks_of([data], lambda: [(4, 3)] * len(data))
    assert [looks.same_picture(i).tolist() for i in range(4)] == [[1], [], [4], []]


def test_two_copies_of_a_video_are_one_group_and_its_own_frames_none(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    folder.mkdir()
    still = formats.video([(1, 1, 1)] * 3, image=formats.corners())
    (folder / "a.mp4").write_bytes(still)
    index(folder, tmp_path / "s")
    assert find_duplicates(Store.open(tmp_path / "s")) == []
    (folder / "b.mp4").write_bytes(still)
    index(folder, tmp_path / "s")
    (found,) = find_duplicates(Store.open(tmp_path / "s"))
    assert {copy.path for copy in found.pictures} == {"a.mp4", "b.mp4"} and str(found.keep) == "a.mp4 @ 00:00:05"


def test_nearly_the_same_needs_the_model_and_the_layout_and_the_time(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    folder.mkdir()
    photo = Image.open(PHOTOS[0]).convert("RGB")
    width, height = photo.size
    photo.save(folder / "one.jpg", quality=90)
    photo.crop((0, 0, round(width * 0.86), round(height * 0.86))).save(folder / "two.jpg", quality=90)
    os.utime(folder / "one.jpg", (1_700_000_000, 1_700_000_000))
    os.utime(folder / "two.jpg", (1_700_000_005, 1_700_000_005))
    index(folder, tmp_path / "s")
    gallery = read_gallery(Store.open(tmp_path / "s"))
    cosine = float(gallery.vectors[0] @ gallery.vectors[1])
    store = Store.open(tmp_path / "s")
    assert find_duplicates(store, kind="picture") == []
    (found,) = find_duplicates(store, threshold=cosine - 0.01)
    assert [str(copy) for copy in found.pictures] == ["one.jpg", "two.jpg"] and found.kind == "near"
    assert found.others[0].likeness == pytest.approx(cosine, abs=1e-5)
    assert find_duplicates(store, threshold=min(1.0, cosine + 0.001)) == []
    assert find_duplicates(store, threshold=cosine - 0.01, within=4.9) == []
    assert len(find_duplicates(store, threshold=cosine - 0.01, within=5.0)) == 1
    looks = gallery.looks
    looks.pixels[1], looks.means[1] = (
        255 - looks.pixels[1],
        255 - looks.means[1],
    )  # the model's answer alone: too little
    assert group(gallery, "near", cosine - 0.01) == []


def test_bad_input_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "g"
    folder.mkdir()
    index(folder, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert find_duplicates(store) == []  # an empty store has none
    for wrong in ({"kind": "same"}, {"threshold": 1.5}, {"threshold": -1.0}, {"within": -1.0}):
        with pytest.raises(StoreError):
            find_duplicates(store, **wrong)  # type: ignore[arg-type]
    assert main(["duplicates", "--store", str(tmp_path / "none")]) == 2
    assert "store" in capsys.readouterr().err
    assert main(["duplicates", "--store", str(tmp_path / "s"), "--sheet", str(tmp_path / "x.gif")]) == 2
    assert mentions(capsys.readouterr().err, ".jpg", ".png")
    assert main(["duplicates", "--store", str(tmp_path / "s")]) == 0
    assert "0 groups" in capsys.readouterr().out
    assert sheet([], Library(store=tmp_path / "s").thumbnails([])).size[0] > 0 and SHEET_GROUPS == 60


def as_paths(groups: Sequence[module.Group]) -> list[list[str]]:
    return [[copy.path for copy in found.pictures] for found in groups]


def test_descriptions_and_the_name_of_the_model_change_no_group(tmp_path: Path) -> None:
    """Only pixels count, and the threshold is that of the weights."""
    folder = tmp_path / "g"
    folder.mkdir()
    for number, photo in enumerate(PHOTOS[:3]):
        image = Image.open(photo).convert("RGB")
        width, height = image.size
        image.save(folder / f"{number}.jpg", quality=90)
        image.crop((0, 0, round(width * 0.93), round(height * 0.93))).save(folder / f"{number}-cut.jpg", quality=90)
    mini, plain = from_pretrained("mini"), IndexOptions(bank=False, workers=1)
    wanted = [[f"{i}.jpg", f"{i}-cut.jpg"] for i in range(3)]
    index_folder(folder, tmp_path / "plain", mini, "mini", options=plain)
    assert as_paths(find_duplicates(Store.open(tmp_path / "plain"))) == wanted
    lines = [json.dumps({"image": f"{i}-cut.jpg", "dense": TEXTS[i]}) for i in range(3)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    index_folder(folder, tmp_path / "described", mini, "/models/another-name", options=plain)
    store = Store.open(tmp_path / "described")
    assert store.described() == 3 and as_paths(find_duplicates(store)) == wanted
    before, after = (read_gallery(Store.open(tmp_path / name)).vectors for name in ("plain", "described"))
    assert after == pytest.approx(before, abs=1e-3)
    # The page and the commands fold by the same relation; the first of the ranking stands for the others.
    hits = Searcher(store, mini).search("a photo")
    entries = fold(store, hits)
    assert [[replace(hit, folded=()), *hit.folded] for hit in entries] == [
        [hit for hit in hits if hit.path[0] == number] for number in dict.fromkeys(hit.path[0] for hit in hits)
    ]
    assert [len(hit.folded) for hit in entries] == [1, 1, 1]
    assert fold(store, []) == []


def test_measured_thresholds_are_those_of_the_shipped_weights() -> None:
    """After a change of a shipped model, measure again: python -m benchmarks.quality.duplicates."""
    stated = [json.loads((embedded_folder(name) / "sentences.json").read_text()) for name in EMBEDDED]
    assert {entry["model_hash"] for entry in stated} == set(NEAR_DUPLICATE_COSINES)


def test_excluded_pictures_are_no_duplicates(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    (folder / "old").mkdir(parents=True)
    for name in ("a.jpg", "old/b.jpg"):
        shutil.copy(PHOTOS[0], folder / name)
    index(folder, tmp_path / "s")
    assert len(find_duplicates(Store.open(tmp_path / "s"))) == 1
    index(folder, tmp_path / "s", exclude=("old/",))
    assert find_duplicates(Store.open(tmp_path / "s")) == []
