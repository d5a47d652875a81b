"""Formats of real libraries: HEIC, AVIF, JPEG XL, animations, camera RAW. Every file is made here."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import formats
from messages import naming
from seps.images import decoding as images_module
from seps.images import formats as readers
from seps.images.decoding import decode_picture, decode_upright, read_image, upright_size
from seps.images.formats import still
from seps.images.shards import UnreadableImage
from seps.images.sources import ImageSource
from seps.photos.captions.images import data_url


def _file(data: bytes) -> Any:
    return io.BytesIO(data)


def source(name: str) -> ImageSource:
    return ImageSource(Path(name))


def upright(picture: Image.Image, orientation: int) -> Image.Image:
    """The picture as Pillow turns it by an EXIF orientation."""
    tagged = Image.open(_file(formats.encoded(picture, "PNG", exif=formats.exif_bytes(orientation))))
    return ImageOps.exif_transpose(tagged)


def difference(left: Any, right: Any) -> float:
    assert left.size == right.size
    return float(np.abs(np.asarray(left, float) - np.asarray(right, float)).mean())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_heic_is_the_turned_picture(orientation: int) -> None:
    picture = formats.corners()
    data = formats.heic(picture, exif=formats.exif_bytes(orientation))
    turned = upright(picture, orientation)
    decoded = decode_upright(data, source("a.heic"), 320)
    assert (decoded.width, decoded.height) == turned.size
    assert difference(decoded.image, turned) < 3
    assert upright_size(data, source("a.heic")) == turned.size


def test_heic_avif_and_jxl_by_the_decoder_that_every_command_uses(tmp_path: Path) -> None:
    picture = formats.corners()
    files = {
        "a.heic": formats.heic(picture),
        "a.HIF": formats.heic(picture),
        "a.avif": formats.encoded(picture, "AVIF", quality=90),
        "a.jxl": formats.jxl(picture),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        decoded = decode_upright(data, source(name), 320)
        assert difference(decoded.image, picture) < 3, name
        pixels = read_image(ImageSource(tmp_path / name), (32, 48), "resize")
        made = decode_picture(data, source(name), (32, 48), "resize")
        assert (made.width, made.height) == (96, 64) and bool((made.pixels == pixels).all())
        assert data_url(data, source(name)).startswith("data:image/jpeg;base64,")
    assert difference(decode_upright(files["a.jxl"], source("a.jxl"), 320).image, picture) == 0


def test_the_orientation_of_jxl_is_that_of_its_codestream() -> None:
    """The format keeps it there, and its decoder applies it; an EXIF block only repeats it."""
    picture = formats.corners()
    data = formats.jxl(picture, exif=formats.exif_bytes(6).removeprefix(b"Exif\0\0"))
    assert difference(decode_upright(data, source("a.jxl"), 320).image, picture) == 0


@pytest.mark.parametrize("kind", ["heic", "jxl"])
@pytest.mark.parametrize("kept", [0.3, 0.7])
def test_what_is_cut_short_is_refused_with_a_sentence(kind: str, kept: float) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8))
    data = {"heic": formats.heic, "jxl": formats.jxl}[kind](noise)
    with pytest.raises(UnreadableImage, match=naming(f"x.{kind}")) as raised:
        decode_upright(data[: int(len(data) * kept)], source(f"x.{kind}"), 320)
    assert raised.value.kind == "damaged or cut short"


@pytest.mark.parametrize("kind", ["heic", "jxl"])
def test_pixels_are_bounded_before_they_are_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"heic": formats.heic, "jxl": formats.jxl}[kind](formats.corners(512, 256))
    monkeypatch.setattr(images_module, "MAX_PIXELS", 512 * 256 - 1)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    with pytest.raises(UnreadableImage, match="512 x 256 pixels") as raised:
        decode_upright(data, source(f"x.{kind}"), 320)
    assert raised.value.kind == "too large"


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    first, *others = [formats.corners(), Image.new("RGB", (96, 64), "black"), Image.new("RGB", (96, 64), "white")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = formats.encoded(first, kind, save_all=True, append_images=others, duration=100, **options)
    assert Image.open(_file(data)).n_frames == 3
    assert difference(decode_upright(data, source("a"), 320).image, first) < 1


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("inside", [False, True])
def test_a_raw_file_is_its_preview_turned_as_the_camera_was(orientation: int, inside: bool) -> None:
    """A real DNG, read by LibRaw; the preview may have an EXIF block of its own, which must not turn it twice."""
    picture = formats.corners(480, 320)
    options = {"exif": formats.exif_bytes(orientation)} if inside else {}
    preview = formats.encoded(picture, "JPEG", quality=92, **options)
    data = formats.dng(preview, picture.size, orientation)
    turned = upright(picture, orientation)
    decoded = decode_upright(data, source("a.DNG"), 2000)
    assert (decoded.width, decoded.height) == turned.size
    assert difference(decoded.image, turned) < 3
    assert upright_size(data, source("a.DNG")) == turned.size
    assert data_url(data, source("a.DNG")).startswith("data:image/jpeg;base64,/9j/")  # not the RAW file's own bytes


def test_a_raw_file_without_a_preview_worth_it_is_decoded_at_half_its_size() -> None:
    """The upper half of the mosaic is the brighter one; the preview shows something else."""
    small = formats.corners(96, 64)
    for preview in (None, formats.encoded(small, "JPEG")):
        decoded = decode_upright(formats.dng(preview, small.size, 6, raw=(256, 128)), source("a.dng"), 320)
        assert (decoded.width, decoded.height) == (64, 128)  # turned
        pixels = np.asarray(decoded.image, float)
        assert pixels[:, 40:].mean() > pixels[:, :24].mean() + 50


def test_a_huge_raw_file_without_a_preview_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(still, "MAX_RAW_PIXELS", 1000)
    with pytest.raises(UnreadableImage, match="decode"):
        decode_upright(formats.dng(None, (0, 0)), source("a.dng"), 320)


def test_a_raw_file_that_is_none_is_refused_and_a_jpeg_under_its_name_is_read() -> None:
    with pytest.raises(UnreadableImage, match="damaged"):
        decode_upright(b"II*\0" + bytes(500), source("a.nef"), 320)
    picture = formats.corners()
    decoded = decode_upright(formats.encoded(picture, "JPEG", quality=92), source("a.dng"), 320)
    assert difference(decoded.image, picture) < 3


@pytest.mark.parametrize("flip, orientation", [(0, 1), (3, 3), (5, 8), (6, 6)])
def test_a_preview_that_is_a_bitmap_is_turned_too(monkeypatch: pytest.MonkeyPatch, flip: int, orientation: int) -> None:
    """Some cameras put plain pixels into the file; made by a stand-in for rawpy."""
    import rawpy

    picture = formats.corners(480, 320)
    thumb = SimpleNamespace(format=rawpy.ThumbFormat.BITMAP, data=np.asarray(picture))

    class Opened:
        sizes = SimpleNamespace(flip=flip, raw_width=10, raw_height=10)

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def extract_thumb(self) -> Any:
            return thumb

    monkeypatch.setattr(rawpy, "imread", lambda file: Opened())
    turned = upright(picture, orientation)
    decoded = decode_upright(b"IIU\0" + bytes(100), source("a.rw2"), 320)
    assert (decoded.width, decoded.height) == turned.size and difference(decoded.image, turned) == 0


def test_formats_are_told_by_their_bytes() -> None:
    picture = formats.corners()
    assert readers.reader_for(formats.heic(picture)) is readers.HEIF
    assert readers.reader_for(formats.jxl(picture), "wrong.jpg") is readers.JXL
    assert readers.reader_for(formats.encoded(picture, "AVIF")) is None
    assert readers.reader_for(formats.encoded(picture, "TIFF")) is None
    assert readers.reader_for(formats.encoded(picture, "TIFF"), "a.nef") is readers.RAW
    still_avif = b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf"
    assert readers.reader_for(still_avif) is None
    assert readers.reader_for(still_avif.replace(b"avif", b"heic")) is readers.HEIF
    assert readers.reader_for(b"\0\0\0\x18ftypcrx \0\0\0\1crx isom") is readers.RAW


@pytest.mark.parametrize(
    "name, package", [("a.heic", "pillow_heif"), ("a.jxl", "pylibjxl.pillow_plugin"), ("a.dng", "rawpy")]
)
def test_without_its_package_a_picture_is_refused_with_the_command_that_installs_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = formats.corners(480, 320)
    make = {"a.heic": formats.heic, "a.jxl": formats.jxl, "a.dng": lambda image: formats.dng(None, image.size)}
    data = make[name](picture)
    monkeypatch.setitem(sys.modules, package, None)
    for read in (lambda: decode_upright(data, source(name), 320), lambda: upright_size(data, source(name))):
        with pytest.raises(UnreadableImage, match=naming("seps[formats]")) as raised:
            read()
        assert raised.value.kind == "without a reader"
