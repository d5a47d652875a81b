"""One way to make pixels: whatever command reads a file, the model sees the same bytes; each file is decoded once."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from messages import naming
from seps.cli.main import main
from seps.images.decoding import decode_image, decode_picture, read_image, stored_size, upright_size
from seps.images.shards import UnreadableImage
from seps.images.sources import ImageSource
from seps.photos.search.searcher import Searcher
from seps.retrieval.config import DataConfig, ModelConfig, RunConfig
from seps.retrieval.data import RetrievalDataset, decode_all, load_jsonl
from seps.retrieval.data.augment import _sample
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.train.data import load_sets, read_data
from seps.retrieval.train.task import RetrievalTask
from stores import index, model, model_folder

SIZE = (96, 96)


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise at several scales: every way to resize it gives other bytes."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((width, height))
    fine = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return Image.blend(coarse, fine, 0.3)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def kinds() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    alpha = photo(75, 50, 5).convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(alpha.size))
    deep = np.random.default_rng(6).integers(0, 65536, (41, 67), dtype=np.uint16)
    palette = photo(64, 48, 7).quantize(16)
    return {
        "large.jpg": encoded(photo(900, 1301), "JPEG"),
        "turned.jpg": encoded(photo(700, 431, 1), "JPEG", exif=exif),
        "odd.png": encoded(photo(131, 77, 2), "PNG"),
        "small.png": encoded(photo(17, 23, 3), "PNG"),
        "grey.png": encoded(photo(90, 120, 4).convert("L"), "PNG"),
        "alpha.png": encoded(alpha, "PNG"),
        "deep.png": encoded(Image.fromarray(deep), "PNG"),
        "palette.png": encoded(palette, "PNG", transparency=3),
        "cmyk.jpg": encoded(photo(222, 111, 8).convert("CMYK"), "JPEG"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kinds as files and as members of a shard, with a line of JSONL each."""
    root = tmp_path_factory.mktemp("kinds")
    lines = []
    with tarfile.open(root / "shard.tar", "w") as shard:
        for name, data in kinds().items():
            (root / name).write_bytes(data)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
            lines.append({"image": name, "captions": ["a picture"]})
            lines.append({"id": f"member {name}", "image": name, "shard": "shard.tar", "captions": ["a picture"]})
    (root / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every picture that the model encodes, as bytes."""
    shown: list[torch.Tensor] = []
    encode = type(model()).encode_pixels

    def spy(self: Any, pixels: torch.Tensor, *more: Any) -> torch.Tensor:
        shown.extend((pixels * 255).round().to(torch.uint8))
        return encode(self, pixels, *more)

    monkeypatch.setattr(type(model()), "encode_pixels", spy)
    return shown


def digests(pixels: Any) -> set[bytes]:
    return {bytes(picture.contiguous().numpy().tobytes()) for picture in pixels}


def test_every_command_makes_the_same_pixels(folder: Path, tmp_path: Path, seen: list[torch.Tensor]) -> None:
    data = load_jsonl(folder / "data.jsonl")
    expected = decode_all(data, SIZE)
    assert len(digests(expected)) == len(kinds()), "a shard's member is the same picture as the file"

    encode_images(model(), data)
    assert torch.equal(torch.stack(seen), expected), "seps eval"

    config = RunConfig(model=ModelConfig(image_size=SIZE, embed_size=32))
    other = RetrievalDataset(data.records[:2], "other", "train")
    task = RetrievalTask(model(), config, other, [data])
    assert torch.equal(task.dev_pixels[0], expected), "seps train, on dev"
    assert task.pixels.shape[-2:] == stored_size(SIZE)

    blank = tmp_path / "blank.png"
    photo(40, 40, 99).save(blank)
    (tmp_path / "blank.jsonl").write_text('{"image": "blank.png", "captions": ["x"]}\n')
    both = DataConfig(str(tmp_path / "blank.jsonl"), str(folder / "data.jsonl"))
    for place in (None, tmp_path / "pixels"):
        described = replace(config, data=both)
        read = read_data(described, load_sets(described), SIZE, print, folder=place)
        assert torch.equal(read.dev_pixels[0], expected), "seps train and seps compare"
        assert torch.equal(read.pixels[0], read_image(ImageSource(blank), stored_size(SIZE), "resize"))

    seen.clear()
    index(folder, tmp_path / "store")
    assert digests(seen) == digests(expected), "seps index"

    searcher = Searcher(tmp_path / "store", model())
    for record, pixels in zip(data.records, expected, strict=True):
        if record.source.member is None:
            seen.clear()
            searcher.search_image(record.source.path)
            assert torch.equal(torch.stack(seen), pixels[None]), f"seps search by {record.id}"
            seen.clear()
            main(["explain", str(record.source.path), "a picture", "--model", model_folder(), "--json"])
            assert torch.equal(torch.stack(seen), pixels[None]), f"seps explain {record.id}"


def test_a_model_sees_what_training_makes_of_a_whole_photo() -> None:
    data, source = encoded(photo(400, 300), "PNG"), ImageSource(Path("a.png"))
    kept = decode_image(data, source, stored_size(SIZE), "resize")[None].float()
    trained = _sample(kept, torch.eye(2, 3)[None], SIZE)[0]
    assert (decode_image(data, source, SIZE).float() - trained).abs().max() <= 1
    assert (decode_image(data, source, SIZE, "resize").float() - trained).abs().mean() > 1


def test_pixels_of_another_size_are_refused_and_not_resized(folder: Path) -> None:
    data = load_jsonl(folder / "data.jsonl")
    with pytest.raises(ValueError, match=naming("109", "96", "model")):
        encode_images(model(), data, pixels=decode_all(data, stored_size(SIZE)))


def test_a_picture_is_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    prepare = PngImagePlugin.PngImageFile.load_prepare
    monkeypatch.setattr(
        PngImagePlugin.PngImageFile, "load_prepare", lambda self: decoded.append(self.size) or prepare(self)
    )
    source = ImageSource(folder / "odd.png")
    picture = decode_picture(source.path.read_bytes(), source, SIZE)
    assert decoded == [(131, 77)]
    assert (picture.width, picture.height) == (131, 77)
    assert upright_size(source.path.read_bytes(), source) == (131, 77) and len(decoded) == 1


def test_size_and_thumbnail_of_a_turned_photo() -> None:
    picture = decode_picture(kinds()["turned.jpg"], ImageSource(Path("turned.jpg")), SIZE)
    assert (picture.width, picture.height) == (431, 700)
    with Image.open(io.BytesIO(picture.thumbnail)) as thumbnail:
        assert thumbnail.size == (99, 160)


def bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))


def test_the_limit_is_on_what_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    source, image = ImageSource(Path("phone.jpg")), photo(1300, 900)
    monkeypatch.setattr("seps.images.decoding.MAX_PIXELS", 600_000)
    monkeypatch.setattr("seps.images.decoding.MAX_JPEG_PIXELS", 1_800_000)
    assert decode_image(encoded(image, "JPEG"), source, SIZE).shape == (3, *SIZE)
    # Of a progressive file a decoder holds every coefficient, however small the result.
    for data in (encoded(image, "PNG"), encoded(image, "JPEG", progressive=True)):
        with pytest.raises(UnreadableImage, match=naming("1300", "900", "600,000")):
            decode_image(data, source, SIZE)
    with pytest.raises(UnreadableImage, match=naming("1500", "1300", "1,800,000")):
        decode_image(encoded(photo(1500, 1300), "JPEG"), source, SIZE)


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000)])
def test_a_bomb_is_refused_by_its_size_without_a_warning(size: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnreadableImage, match=naming(size[0], size[1], "89,478,485")):
            decode_image(bomb(*size), ImageSource(Path("bomb.png")), SIZE)
        with pytest.raises(UnreadableImage, match=naming(size[0], size[1], "50,000,000")):
            upright_size(bomb(*size), ImageSource(Path("bomb.png")), 50_000_000)
