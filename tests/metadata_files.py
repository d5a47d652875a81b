"""Files with metadata, written by hand: XMP packets, IPTC blocks, pictures."""

from __future__ import annotations

import io
import struct

from PIL import Image

HEAD = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description'
    ' rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:photoshop="http://ns.adobe.com/photoshop/1.0/"'
    ' xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" xmlns:exif="http://ns.adobe.com/exif/1.0/"'
    ' xmlns:mwg-rs="http://www.metadataworkinggroup.com/schemas/regions/"{}>{}</rdf:Description></rdf:RDF></x:xmpmeta>'
)
SUBJECTS = "<dc:subject><rdf:Bag><rdf:li>harbour</rdf:li><rdf:li>Bürgerfest</rdf:li></rdf:Bag></dc:subject>"
CAPTION = (
    '<dc:description><rdf:Alt><rdf:li xml:lang="x-default">Two boats at dusk</rdf:li>'
    '<rdf:li xml:lang="de">Zwei Boote</rdf:li></rdf:Alt></dc:description>'
)
REGIONS = (
    '<mwg-rs:Regions rdf:parseType="Resource"><mwg-rs:RegionList><rdf:Bag><rdf:li><rdf:Description mwg-rs:Name="Ana '
    'Quispe" mwg-rs:Type="Face"/></rdf:li></rdf:Bag></mwg-rs:RegionList></mwg-rs:Regions>'
)


def packet(inner: str = SUBJECTS, attributes: str = "") -> bytes:
    return HEAD.format(attributes, inner).encode()


def picture(form: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (60, 44), (90, 20, 110)).save(out, form, **options)
    return out.getvalue()


def iptc(*datasets: tuple[int, int, bytes]) -> bytes:
    """An APP13 block as Photoshop writes it."""
    data = b"".join(b"\x1c" + bytes([record, number]) + struct.pack(">H", len(v)) + v for record, number, v in datasets)
    block = b"Photoshop 3.0\x008BIM\x04\x04\0\0" + struct.pack(">I", len(data)) + data + b"\0" * (len(data) % 2)
    return b"\xff\xed" + struct.pack(">H", len(block) + 2) + block


def with_iptc(*datasets: tuple[int, int, bytes]) -> bytes:
    plain = picture()
    return plain[:2] + iptc(*datasets) + plain[2:]
