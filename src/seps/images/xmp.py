"""What an XMP packet says of a picture: title, caption, persons, places, keywords and coordinates.

XMP is RDF in XML, inside a picture or in a sidecar. Properties may be elements, attributes or items of a list; a
property is found by its name wherever it is. Declarations of types and entities are refused, so that no packet grows
while it is read or opens another file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

MAX_XMP_BYTES = 8 * 2**20
"""Of a packet or sidecar that is read."""
MAX_TEXTS = 1000
"""Of one property."""
MAX_DEPTH = 64
"""Of elements in each other."""
_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_DC = "http://purl.org/dc/elements/1.1/"
_PHOTOSHOP = "http://ns.adobe.com/photoshop/1.0/"
_IPTC_CORE = "http://iptc.org/std/Iptc4xmpCore/1.0/xmlns/"
_IPTC_EXT = "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
_EXIF = "http://ns.adobe.com/exif/1.0/"
_PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "title": (f"{_DC} title", f"{_PHOTOSHOP} Headline"),
    "caption": (
        f"{_DC} description",
        f"{_IPTC_CORE} AltTextAccessibility",
        f"{_IPTC_CORE} ExtDescrAccessibility",
    ),
    "persons": (
        f"{_IPTC_EXT} PersonInImage",
        f"{_IPTC_EXT} PersonName",
        "http://www.metadataworkinggroup.com/schemas/regions/ Name",
        "http://ns.microsoft.com/photo/1.2/t/Region# PersonDisplayName",
    ),
    "places": (
        f"{_IPTC_EXT} LocationName",
        f"{_IPTC_CORE} Location",
        f"{_IPTC_EXT} Sublocation",
        f"{_PHOTOSHOP} City",
        f"{_IPTC_EXT} City",
        f"{_PHOTOSHOP} State",
        f"{_IPTC_EXT} ProvinceState",
        f"{_PHOTOSHOP} Country",
        f"{_IPTC_EXT} CountryName",
    ),
    "keywords": (f"{_DC} subject",),
    "latitude": (f"{_EXIF} GPSLatitude",),
    "longitude": (f"{_EXIF} GPSLongitude",),
}
_KIND_OF = {name: kind for kind, names in _PROPERTIES.items() for name in names}
_ORDER = {name: place for place, name in enumerate(_KIND_OF)}
_COORDINATE = re.compile(r"(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?(?:,(\d+(?:\.\d+)?))?([NSEW])")


class BrokenXmp(ValueError):
    """A packet that cannot be read; the message says why."""


@dataclass
class _Reader:
    """Collects the texts of known properties while a packet is parsed."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    """By property, in the order of the packet."""
    stack: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """Known properties that the present element is in, the innermost last."""
    alternatives: list[int] = field(default_factory=list)
    """Items so far of each list of alternatives that the present element is in."""
    parts: list[str] = field(default_factory=list)
    """Text of the present element."""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if len(self.stack) == MAX_DEPTH:
            raise BrokenXmp(f"its elements are more than {MAX_DEPTH} deep")
        self.stack.append(name)
        self.parts = []
        if name == f"{_RDF} Alt":
            self.alternatives.append(0)
        elif name == f"{_RDF} li" and self.alternatives:
            self.alternatives[-1] += 1
        elif name in _KIND_OF:
            self.open.append(name)
        for attribute, value in attributes.items():
            if attribute in _KIND_OF:
                self.keep(attribute, value)

    def end(self, name: str) -> None:
        text, self.parts = "".join(self.parts), []
        # The first of several languages is the default one.
        if self.open and not (self.alternatives and self.alternatives[-1] > 1):
            self.keep(self.open[-1], text)
        self.stack.pop()
        if name == f"{_RDF} Alt":
            self.alternatives.pop()
        elif name in _KIND_OF:
            self.open.pop()

    def keep(self, name: str, value: str) -> None:
        texts = self.texts.setdefault(name, [])
        if (text := " ".join(value.split())) and len(texts) < MAX_TEXTS:
            texts.append(text)


def read_xmp(data: bytes) -> tuple[dict[str, list[str]], tuple[float, float] | None]:
    """The texts of a packet by kind (title, caption, persons, places, keywords), and (latitude, longitude).

    Raises BrokenXmp for what is no XML, is larger than `MAX_XMP_BYTES`, or declares types or entities.
    """
    if len(data) > MAX_XMP_BYTES:
        raise BrokenXmp(f"it is larger than {MAX_XMP_BYTES >> 20} MiB, and not read")
    reader = _Reader()
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler = lambda text: reader.parts.append(text)
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = _refuse
    is_wide = b"\0" in data[:4] or data[:2] in (b"\xff\xfe", b"\xfe\xff")  # UTF-16 ends in a zero byte
    try:
        parser.Parse(data if is_wide else data.strip(b"\0 \r\n\t"), True)
    except BrokenXmp:
        raise
    except (expat.ExpatError, LookupError, ValueError) as error:  # the others for codings that are not known
        raise BrokenXmp(f"it is not whole XML ({error})") from error
    texts: dict[str, list[str]] = {}
    for name in sorted(reader.texts, key=_ORDER.__getitem__):
        texts.setdefault(_KIND_OF[name], []).extend(reader.texts[name])
    north, east = (texts.pop(kind, [""])[0] for kind in ("latitude", "longitude"))
    return texts, position(_degrees(north), _degrees(east))


def position(latitude: float | None, longitude: float | None) -> tuple[float, float] | None:
    """Coordinates that are on the globe; (0, 0) is what cameras write that do not know theirs."""
    if latitude is None or longitude is None or not (abs(latitude) <= 90 and abs(longitude) <= 180):
        return None
    return (latitude, longitude) if latitude or longitude else None


def _degrees(text: str) -> float | None:
    """A coordinate like `48,51.5N` or `48,51,30N` in degrees."""
    parts = _COORDINATE.fullmatch(text)
    if parts is None:
        return None
    degrees = float(sum(float(part or 0) / 60**place for place, part in enumerate(parts.groups()[:3])))
    return -degrees if parts[4] in "SW" else degrees


def _refuse(*_: object) -> None:
    raise BrokenXmp("it declares document types or entities, which are not read")
