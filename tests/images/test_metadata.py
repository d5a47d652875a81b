"""What is read of a picture's file beside its pixels: XMP, IPTC, EXIF, sidecars, also broken ones."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from metadata_files import CAPTION, REGIONS, SUBJECTS, iptc, packet, picture, with_iptc
from seps.images.metadata import Metadata, read_metadata
from seps.images.sources import ImageSource
from seps.images.xmp import MAX_XMP_BYTES, BrokenXmp, read_xmp


def read(data: bytes, name: str = "a.jpg", sidecar: Path | None = None) -> Metadata:
    return read_metadata(data, ImageSource(Path("/nowhere") / name), sidecar)


def texts(found: Metadata) -> dict[str, tuple[str, ...]]:
    return {f"{part.source} {part.kind}": part.texts for part in found.texts}


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "TIFF", "PNG", "AVIF"])
def test_xmp_of_every_format(form: str) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", packet(SUBJECTS + CAPTION + REGIONS).decode(), zip=True)
    options = {"pnginfo": info} if form == "PNG" else {"xmp": packet(SUBJECTS + CAPTION + REGIONS)}
    if form == "TIFF":
        options = {"tiffinfo": {700: packet(SUBJECTS + CAPTION + REGIONS)}}
    assert texts(read(picture(form, **options))) == {
        "xmp caption": ("Two boats at dusk",),
        "xmp persons": ("Ana Quispe",),
        "xmp keywords": ("harbour", "Bürgerfest"),
    }


def test_xmp_behind_the_pixels_of_a_png_is_read() -> None:
    """Where other programs write it."""
    body = b"XML:com.adobe.xmp\0\0\0\0\0" + packet()
    chunk = struct.pack(">I", len(body)) + b"iTXt" + body + struct.pack(">I", zlib.crc32(b"iTXt" + body))
    plain = picture("PNG")
    end = plain.rindex(b"IEND") - 4
    assert texts(read(plain[:end] + chunk + plain[end:])) == {"xmp keywords": ("harbour", "Bürgerfest")}
    assert texts(read(plain[:end] + chunk)) == {"xmp keywords": ("harbour", "Bürgerfest")}  # cut short


def test_texts_of_a_png() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("Title", "Übersee")
    info.add_itxt("Description", "The tram at the stop", zip=True)
    info.add_text("parameters", "of a generator")
    found = read(picture("PNG", pnginfo=info))
    assert texts(found) == {"png title": ("Übersee",), "png caption": ("The tram at the stop",)}


def test_many_packed_texts_of_a_png_take_the_memory_of_one() -> None:
    """Each has eight megabytes in eight kilobytes, behind the pixels, where Pillow does not count them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packed = zlib.compress(b"a" * MAX_XMP_BYTES)
    names = [b"Title", b"Title", *(b"note %d" % number for number in range(20))]
    end = chunk(b"IEND", b"")
    plain = picture("PNG").removesuffix(end)
    tracemalloc.start()
    try:
        found = read(plain + b"".join(chunk(b"zTXt", name + b"\0\0" + packed) for name in names) + end)
        assert tracemalloc.get_traced_memory()[1] < 10 * MAX_XMP_BYTES
    finally:
        tracemalloc.stop()
    assert texts(found)["png title"][0].startswith("aaaa")


def test_properties_may_be_attributes_and_structures() -> None:
    shown = (
        '<Iptc4xmpExt:LocationShown><rdf:Bag><rdf:li rdf:parseType="Resource"><Iptc4xmpExt:City>Cusco'
        "</Iptc4xmpExt:City><Iptc4xmpExt:CountryName>Peru</Iptc4xmpExt:CountryName></rdf:li></rdf:Bag></Iptc4xmpExt:LocationShown>"
    )
    found, place = read_xmp(
        packet(shown, ' dc:title="Market" exif:GPSLatitude="13,31.5S" exif:GPSLongitude="71,58,30W"')
    )
    assert found == {"title": ["Market"], "places": ["Cusco", "Peru"]}
    assert place == pytest.approx((-13.525, -71.975))


def test_iptc_in_any_coding() -> None:
    utf8 = with_iptc((1, 90, b"\x1b%G"), (2, 25, "Žilina".encode()), (2, 25, b"castle"), (2, 120, "Über".encode()))
    assert texts(read(utf8)) == {"iptc caption": ("Über",), "iptc keywords": ("Žilina", "castle")}
    assert texts(read(with_iptc((2, 25, "Zürich".encode("cp1252"))))) == {"iptc keywords": ("Zürich",)}
    assert texts(read(with_iptc((2, 25, "Zürich".encode("utf-16"))))) == {"iptc keywords": ("Zürich",)}
    one = with_iptc((2, 5, b"Regatta"), (2, 90, b"Kiel"), (2, 101, b"Germany"))
    assert texts(read(one)) == {"iptc title": ("Regatta",), "iptc places": ("Kiel", "Germany")}


def test_exif_and_the_tags_of_windows_in_utf_16() -> None:
    exif = Image.Exif()
    exif[0x010E] = "OLYMPUS DIGITAL CAMERA         "
    exif[0x9C9B] = "Día de mercado\0".encode("utf-16-le")
    exif[0x9C9E] = "Łódź; tram ;\0".encode("utf-16-le")
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + "Ein Café".encode("utf-16-be")
    assert texts(read(picture(exif=exif))) == {
        "exif title": ("Día de mercado",),
        "exif caption": ("Ein Café",),
        "exif keywords": ("Łódź", "tram"),
    }
    exif[0x010E] = "Fähre nach Föhr".encode()
    assert texts(read(picture(exif=exif)))["exif caption"] == ("Fähre nach Föhr",)


@pytest.mark.parametrize("text", ["SONY DSC", "dav", "IMG_2024.JPG", "DCIM\\100GOPRO", "---", " ", "harbour", "a.b"])
def test_what_devices_and_programs_write_is_no_description(text: str) -> None:
    exif = Image.Exif()
    exif[0x010E] = text
    found = texts(read(picture(exif=exif), "a.b.jpg"))
    assert found == ({"exif caption": ("harbour",)} if text == "harbour" else {})


def test_of_each_kind_the_first_source_counts(tmp_path: Path) -> None:
    plain = picture(xmp=packet(CAPTION))
    data = plain[:2] + iptc((2, 120, b"An older caption"), (2, 25, b"boats")) + plain[2:]
    assert texts(read(data)) == {"xmp caption": ("Two boats at dusk",), "iptc keywords": ("boats",)}
    (tmp_path / "a.jpg.xmp").write_bytes(packet("<dc:title>Evening</dc:title>" + SUBJECTS))
    assert texts(read(data, sidecar=tmp_path / "a.jpg.xmp")) == {
        "sidecar title": ("Evening",),
        "xmp caption": ("Two boats at dusk",),
        "sidecar keywords": ("harbour", "Bürgerfest"),
    }


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_sidecar_in_any_coding_of_unicode(tmp_path: Path, coding: str) -> None:
    mark = "\ufeff" if coding in ("utf-16-le", "utf-16-be") else ""
    (tmp_path / "a.xmp").write_bytes((mark + packet().decode()).encode(coding))
    assert texts(read(picture(), sidecar=tmp_path / "a.xmp")) == {"sidecar keywords": ("harbour", "Bürgerfest")}


BOMB = (
    b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">'
    b'<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;">]>'
    + packet("<dc:title>&d;</dc:title>")
)
FILE = b'<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]>' + packet("<dc:title>&f;</dc:title>")
BAD_PACKETS = {
    "not whole": packet()[:-20],
    "no XML": b"\x89PNG and no XML",
    "empty": b"",
    "entity bomb": BOMB,
    "file of the system": FILE,
    "deep": b"<a>" * 5000 + b"</a>" * 5000,
    "unknown coding": b'<?xml version="1.0" encoding="klingon"?>' + packet(),
}


@pytest.mark.parametrize("data", BAD_PACKETS.values(), ids=BAD_PACKETS)
def test_a_packet_that_cannot_be_read_is_a_sentence_and_the_rest_counts(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.xmp").write_bytes(data)
    found = read(with_iptc((2, 25, b"castle")), sidecar=tmp_path / "a.xmp")
    assert texts(found) == {"iptc keywords": ("castle",)}
    assert len(found.problems) == 1 and "sidecar a.xmp" in found.problems[0]


def test_a_sidecar_of_50_megabytes_and_one_that_is_no_file_are_left(tmp_path: Path) -> None:
    with (tmp_path / "a.xmp").open("wb") as file:
        file.truncate(50 * 2**20)
    (tmp_path / "b.xmp").mkdir()
    start = time.perf_counter()
    for name in ("a.xmp", "b.xmp", "c.xmp"):
        assert "is left out" in read(picture(), sidecar=tmp_path / name).problems[0]
    assert time.perf_counter() - start < 1
    with pytest.raises(BrokenXmp, match="larger"):
        read_xmp(b" " * (MAX_XMP_BYTES + 1))


def test_many_long_texts_stay_bounded() -> None:
    found, _ = read_xmp(packet(f"<dc:subject><rdf:Bag>{'<rdf:li>word</rdf:li>' * 50_000}</rdf:Bag></dc:subject>"))
    assert len(found["keywords"]) == 1000


@given(st.binary(max_size=300), st.binary(max_size=80))
def test_any_bytes_give_metadata(data: bytes, block: bytes) -> None:
    assert isinstance(read(data), Metadata)
    assert isinstance(read(with_iptc((2, 25, block))), Metadata)
    assert isinstance(read(picture(xmp=data or b"x")), Metadata)
    assert isinstance(read(picture(exif=b"Exif\0\0" + data)), Metadata)


def gps(*values: object) -> bytes:
    exif = Image.Exif()
    exif.get_ifd(0x8825).update(dict(enumerate(values, start=1)))
    return picture(exif=exif)


def test_coordinates() -> None:
    assert read(gps("S", (33.0, 51.0, 30.0), "E", (151.0, 12.0, 36.0))).position == pytest.approx(
        (-33.8583, 151.21), abs=1e-4
    )
    assert read(picture(xmp=packet("", ' exif:GPSLatitude="48,51.5N" exif:GPSLongitude="2,21E"'))).position is not None
    for bad in [
        ("N", (0.0, 0.0, 0.0), "E", (0.0, 0.0, 0.0)),
        ("N", (91.0, 0.0, 0.0), "E", (10.0, 0.0, 0.0)),
        ("N", (9.0, 0.0, 0.0)),
    ]:
        assert read(gps(*bad)).position is None
