"""Decoding real and broken files, tar shards at random and from threads, and the check before training."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from messages import naming
from seps.images.decoding import ImageReader, decode_image, read_image
from seps.images.shards import UnreadableImage, shard_members
from seps.images.sources import DataError, ImageSource
from seps.retrieval.data import ImageRecord, RetrievalDataset, check_dataset, decode_all, drop_bad


def colour(value: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.new("RGB", size, (value, 255 - value, value // 2))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photo(seed: int = 0, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Smooth noise, so that JPEG and resizing change little."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def saved(path: Path, data: bytes) -> ImageSource:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return ImageSource(path)


def make_shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as shard:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            shard.addfile(info, io.BytesIO(data))
    return path


def test_size_is_height_then_width_and_pixels_are_those_of_the_file(tmp_path: Path) -> None:
    image = photo()
    pixels = read_image(saved(tmp_path / "a.png", encoded(image)), (120, 160), "resize")
    assert pixels.shape == (3, 120, 160) and pixels.dtype == torch.uint8 and pixels.is_contiguous()
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(image))


def test_center_crop_keeps_the_shape_and_resize_stretches(tmp_path: Path) -> None:
    image = Image.new("RGB", (90, 30), (255, 0, 0))
    image.paste((0, 0, 255), (30, 0, 60, 30))  # red, blue, red
    source = saved(tmp_path / "a.png", encoded(image))
    crop = read_image(source, (30, 30), "center-crop")
    assert crop[2].min() == 255 and crop[0].max() == 0
    stretched = read_image(source, (30, 30))
    assert stretched[0, 15, 2] > 250 and stretched[2, 15, 15] > 250 and stretched[0, 15, 27] > 250


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    image = photo(3)
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # what undoes what the viewer must do
    stored = image if orientation == 1 else image.transpose(Image.Transpose(back[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, "JPEG", quality=95, exif=exif)
    pixels = read_image(saved(tmp_path / "a.jpg", data), (60, 80)).float()
    upright = torch.from_numpy(np.array(image.resize((80, 60), Image.Resampling.BICUBIC))).permute(2, 0, 1)
    assert (pixels - upright).abs().mean() < 4


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_spoil_the_pixels(tmp_path: Path) -> None:
    data = encoded(colour(200), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert abs(int(read_image(saved(tmp_path / "a.jpg", data), (8, 8))[0].float().mean()) - 200) < 4


@pytest.mark.parametrize(
    ("mode", "kind", "fill", "expected"),
    [
        ("RGBA", "PNG", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", "PNG", (255, 0, 0, 255), (255, 0, 0)),
        ("LA", "PNG", (0, 0), (255, 255, 255)),
        ("L", "PNG", 100, (100, 100, 100)),
        ("1", "PNG", 1, (255, 255, 255)),
        ("P", "GIF", 0, (0, 0, 0)),
        ("CMYK", "JPEG", (0, 255, 255, 0), (255, 0, 0)),
        ("I;16", "PNG", 0x8000, (128, 128, 128)),
        ("RGB", "WEBP", (0, 255, 0), (0, 255, 0)),
        ("RGB", "BMP", (1, 2, 3), (1, 2, 3)),
        ("RGB", "TIFF", (1, 2, 3), (1, 2, 3)),
    ],
)
def test_every_mode_becomes_rgb(
    tmp_path: Path, mode: str, kind: str, fill: object, expected: tuple[int, int, int]
) -> None:
    source = saved(tmp_path / "x", encoded(Image.new(mode, (20, 20), fill), kind))
    pixels = read_image(source, (5, 5))
    assert (pixels.float().mean((1, 2)) - torch.tensor(expected)).abs().max() <= 3


@pytest.mark.parametrize(("mode", "fill"), [("F", 0.5), ("I", 1 << 20), ("I", -1)])
def test_numbers_of_an_unknown_range_are_refused_and_not_made_white_or_black(
    tmp_path: Path, mode: str, fill: float
) -> None:
    source = saved(tmp_path / "x.tif", encoded(Image.new(mode, (20, 20), fill), "TIFF"))
    with pytest.raises(UnreadableImage, match=naming("8", "16", "pixels")) as caught:
        read_image(source, (5, 5))
    assert caught.value.kind == "of more than 16 bits"


def test_palette_transparency_lies_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (10, 10), 1)
    image.putpalette([0, 0, 0, 9, 9, 9])
    pixels = read_image(saved(tmp_path / "a.png", encoded(image, transparency=1)), (4, 4))
    assert pixels.min() == 255


def bomb() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))


JPEG = encoded(photo(1), "JPEG")
BROKEN = {
    "truncated.jpg": (JPEG[: len(JPEG) // 2], "cut short"),
    "truncated.png": (encoded(photo(1))[:-2000], "cut short"),
    "header_only.jpg": (JPEG[:20], "known format"),
    "empty.jpg": (b"", "empty"),
    "text.jpg": (b"I am not a picture.\n" * 50, "known format"),
    "ghost.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "known format"),
    "bomb.png": (bomb(), "pixels"),
    "ударная 破.jpg": (JPEG[:400], "cut short"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    data, why = BROKEN[name]
    with pytest.raises(UnreadableImage, match=why) as caught:
        read_image(saved(tmp_path / name, data), (8, 8))
    assert name in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_damaged_bytes_give_pixels_or_a_named_error(kind: str) -> None:
    whole = encoded(photo(2), kind)
    random = np.random.default_rng(0)
    outcomes = {"pixels": 0, "refused": 0}
    for trial in range(60):
        # In turns: cut short, changed near the head, one byte changed anywhere.
        data = bytearray(whole[: random.integers(1, len(whole))] if trial % 3 == 0 else whole)
        places = random.integers(0, min(len(data), 400), 6) if trial % 3 == 1 else random.integers(0, len(data), 1)
        for place in places:
            data[place] = random.integers(256)
        try:
            assert decode_image(bytes(data), ImageSource(Path("odd.bin")), (8, 8)).shape == (3, 8, 8)
            outcomes["pixels"] += 1
        except UnreadableImage as error:
            assert "odd.bin" in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_large_image_just_over_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seps.images.decoding.MAX_PIXELS", 40 * 30 - 1)
    source = saved(tmp_path / "a.png", encoded(colour(1)))
    with pytest.raises(UnreadableImage, match="1,199"):
        read_image(source, (8, 8))
    monkeypatch.setattr("seps.images.decoding.MAX_PIXELS", 40 * 30)
    read_image(source, (8, 8))


def test_oversized_files_folders_pipes_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    refused = {"pipe.jpg": "not a regular file", ".": "not a regular file", "none.jpg": "no such file"}
    for name, why in {**refused, "x" * 300: "long"}.items():
        with pytest.raises(UnreadableImage, match=why):
            read_image(ImageSource(tmp_path / name), (8, 8))
    monkeypatch.setattr("seps.images.shards.MAX_BYTES", 10)
    with pytest.raises(UnreadableImage, match="larger"):
        read_image(saved(tmp_path / "a.jpg", JPEG), (8, 8))


@pytest.mark.parametrize("size", [(0, 8), (8,), (8, -1)])
def test_impossible_sizes_are_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="image"):
        read_image(saved(tmp_path / "a.jpg", JPEG), size)


def test_shard_members_are_read_at_random_from_threads(tmp_path: Path) -> None:
    names = {f"деталь/{k}.png": k for k in range(60)}
    shard = make_shard(tmp_path / "s.tar", {name: encoded(colour(k)) for name, k in names.items()})
    assert shard_members(shard) == list(names)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0)) % 60
    sources = [ImageSource(shard, f"деталь/{int(k)}.png") for k in order]
    with ImageReader(workers=8) as reader:
        pixels = reader.read_many(sources, (4, 6))
    assert pixels.shape == (600, 3, 4, 6)
    assert torch.equal(pixels[:, 0, 2, 3].long(), order)


def test_the_index_of_a_shard_is_read_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = make_shard(tmp_path / "s.tar", {"./a.png": encoded(colour(10))})
    opened: list[object] = []
    real = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda *a, **k: opened.append(a) or real(*a, **k))  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: read_image(ImageSource(shard, "a.png"), (2, 2)), range(40)))
    assert len(opened) == 1
    make_shard(shard, {"b.png": encoded(colour(10)), "a.png": encoded(colour(77))})
    assert read_image(ImageSource(shard, "a.png"), (2, 2))[0, 0, 0] == 77


def test_shards_that_are_cut_compressed_or_hold_links(tmp_path: Path) -> None:
    members = {f"{k}.png": encoded(photo(k)) for k in range(3)}
    whole = make_shard(tmp_path / "s.tar", members).read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole[: 512 + len(members["0.png"]) // 512 * 512 + 1024 + 600])
    read_image(ImageSource(cut, "0.png"), (8, 8))
    with pytest.raises(UnreadableImage, match=naming("1.png")):
        read_image(ImageSource(cut, "1.png"), (8, 8))
    with pytest.raises(UnreadableImage, match="member"):
        read_image(ImageSource(cut, "2.png"), (8, 8))
    with tarfile.open(tmp_path / "z.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "s.tar", "x")
    with pytest.raises(UnreadableImage, match="uncompressed"):
        read_image(ImageSource(tmp_path / "z.tar.gz", "x"), (8, 8))
    with tarfile.open(tmp_path / "l.tar", "w") as shard:
        link = tarfile.TarInfo("l.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        shard.addfile(link)
    with pytest.raises(UnreadableImage, match="member"):
        read_image(ImageSource(tmp_path / "l.tar", "l.png"), (8, 8))


def build(folder: Path, split: str, images: dict[str, bytes | None], captions: int = 1) -> RetrievalDataset:
    records = []
    for name, data in images.items():
        source = ImageSource(folder / split / name)
        if data is not None:
            saved(source.path, data)
        records.append(ImageRecord(name, source, tuple(f"c{k}" for k in range(captions))))
    return RetrievalDataset(tuple(records), "toy", split)


def test_decode_all_keeps_the_order_and_reports_progress(tmp_path: Path) -> None:
    data = build(tmp_path, "train", {f"{k}.png": encoded(colour(k)) for k in range(10)})
    steps: list[tuple[int, int]] = []
    pixels = decode_all(data, (4, 4), lambda done, total: steps.append((done, total)), workers=2)
    assert pixels[:, 0, 0, 0].tolist() == list(range(10))
    assert steps == [(done, 10) for done in range(1, 11)]


def test_check_counts_and_names_every_fault(tmp_path: Path) -> None:
    good = {f"{k}.png": encoded(colour(k)) for k in range(3)}
    broken = {name: data for name, (data, _) in BROKEN.items()}
    train = build(tmp_path, "train", {**good, **broken, **{f"gone{k}.jpg": None for k in range(12)}})
    mute = ImageRecord("mute", train.records[0].source, ())
    double = ImageRecord("1.png", train.records[1].source, ("again",))
    train = RetrievalDataset((*train.records, mute, double), "toy", "train")

    report = check_dataset(train, verify_images="decode", workers=2)
    assert report.counts == {
        ("toy/train", "no captions"): 1,
        ("toy/train", "duplicate id"): 1,
        ("toy/train", "unreadable"): len(BROKEN),
        ("toy/train", "missing"): 12,
    }
    text = "\n".join(report.sentences())
    assert all(name in text for name in ["truncated.jpg", "ударная 破.jpg", "mute", "gone9.jpg", "and 2 more"])
    assert "gone10.jpg" not in text
    with pytest.raises(DataError, match=naming("12", "25", "images")):
        report.raise_if(strict=True)
    report.raise_if(strict=False)
    clean = drop_bad(train, report)
    assert [r.id for r in clean.records] == ["0.png", "1.png", "2.png"]
    assert check_dataset(clean, verify_images="decode").ok

    shallow = check_dataset(train)
    assert {kind for _, kind in shallow.counts} == {"no captions", "duplicate id", "missing"}


def test_an_image_in_two_splits_is_found_by_id_file_and_content(tmp_path: Path) -> None:
    train = build(tmp_path, "train", {f"t{k}.png": encoded(colour(k)) for k in range(4)} | {"same.png": JPEG})
    dev = build(tmp_path, "dev", {"same.png": encoded(photo(9)), "copy.png": encoded(colour(2)), "d.png": JPEG[:0]})
    alias = ImageRecord("alias", train.records[0].source, ("x",))
    dev = RetrievalDataset((*dev.records, alias), "toy", "dev")

    by_name = check_dataset(train, dev)
    assert [(f.dataset, f.image) for f in by_name.findings] == [
        ("toy/train", "t0.png"),
        ("toy/train", "same.png"),
    ]
    report = check_dataset(train, dev, verify_images="decode")
    shared = [f for f in report.findings if f.kind == "in two splits"]
    assert [f.image for f in shared] == ["t0.png", "t2.png", "same.png"]
    assert [f.detail for f in shared] == [f"the same {w} in toy/dev" for w in ("file", "content", "id")]
    assert [r.id for r in drop_bad(train, report).records] == ["t1.png", "t3.png"]
    assert [r.id for r in drop_bad(dev, report).records] == ["same.png", "copy.png", "alias"]


def test_check_and_drop_refuse_what_they_cannot_tell_apart(tmp_path: Path) -> None:
    train = build(tmp_path, "train", {"a.png": None, "b.png": None})
    with pytest.raises(DataError, match="different"):
        check_dataset(train, train)
    report = check_dataset(train)
    with pytest.raises(DataError, match="made"):
        drop_bad(train.subset([1]), report)
    with pytest.raises(DataError, match="toy/train"):
        drop_bad(train, report)
