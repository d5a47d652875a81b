"""A store as tools of the Model Context Protocol, for assistants that call programs: read-only and bounded.

A picture is named by its id, or by its path: only pictures that the store has are read, so no name leads to another
file. Nothing is written, and each answer has a largest size.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations
from pydantic import Field

from seps import __version__
from seps.images.dates import local_time
from seps.images.shards import UnreadableImage
from seps.photos.library import Library
from seps.photos.search.results import Result, Results, sources_of
from seps.photos.store.rows import StoreError, shown_place

LARGEST_COUNT = 50
"""Results, or groups of duplicates, of one answer."""
LARGEST_QUERY = 1000
"""Letters of a sentence, a path or a date."""
LARGEST_DESCRIPTION = 4000
"""Letters of the description of one picture; beside other pictures a tenth."""
LARGEST_GROUP = 20
"""Pictures of a group of duplicates that an answer names."""
LARGEST_STORE = 100_000
"""Pictures whose duplicates are looked for: more take minutes."""
THUMBNAILS = 10
"""Thumbnails of one answer."""
LARGEST_IMAGE = 256 * 1024
"""Bytes of an image in an answer; a larger one is left out."""
LONGEST_SIDE = 1024
"""Pixels of a drawn explanation."""

Content = list[TextContent | ImageContent]
Text = Annotated[str, Field(min_length=1, max_length=LARGEST_QUERY)]
Name = Annotated[
    str,
    Field(min_length=1, max_length=LARGEST_QUERY, description="A picture: its id or its path, as a search returns it"),
]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT, description="How many at most")]
Folder = Annotated[
    str | None, Field(max_length=LARGEST_QUERY, description="Only pictures below this folder of the indexed ones")
]
Day = Annotated[str | None, Field(max_length=40, description="A date like 2024-05-31")]
Size = Annotated[int | None, Field(ge=1, le=100_000, description="Least pixels of the shorter side")]
Near = Annotated[str | None, Field(max_length=60, description="Only photos near latitude,longitude, like 48.86,2.35")]
Within = Annotated[float | None, Field(gt=0, le=21_000, description="Kilometres around `near`; default 10")]
Images = Annotated[bool, Field(description=f"Also return thumbnails, of the first {THUMBNAILS} pictures at most")]


class Tools:
    """What a client can call. Each call waits for the former: a search uses all cores by itself."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._lock = threading.Lock()

    def search(
        self,
        query: Annotated[Text, Field(description='A sentence, or a sum like "horse + stripes - grass"')],
        count: Count = 10,
        folder: Folder = None,
        since: Day = None,
        until: Day = None,
        min_size: Size = None,
        near: Near = None,
        within: Within = None,
        images: Images = True,
    ) -> Content:
        """Find pictures by what they show, best first. confidence is 0 to 1; good marks the pictures that fit."""
        filters: dict[str, Any] = {"folder": folder, "since": since, "until": until, "min_size": min_size}
        results = self.library.search(query, count, near=near, within=within, **filters)
        return self._results(results, results.note, images)

    def similar(self, picture: Name, count: Count = 10, images: Images = True) -> Content:
        """Find the pictures that look most like an indexed one, which is not among the results."""
        identity = self._find(picture)
        results = self.library.similar(self.library.content(identity), count + 1)
        others = [result for result in results if result.id != identity]
        return self._results(others[:count], results.note, images)

    def describe(self, picture: Name, images: Images = True) -> Content:
        """Return what the index has of a picture: path, size, date, description, and its thumbnail."""
        identity = self._find(picture)
        columns = [
            "id",
            "path",
            "member",
            "width",
            "height",
            "size",
            "mtime",
            "taken",
            "dense",
            "sources",
            "thumbnail",
            "ocr",
        ]
        row = self.library.store.get(identity, columns)
        if row is None:
            raise StoreError(f"The picture {identity} was taken out of the index.")
        source = self.library.source(row["path"], row["member"])
        taken = row["taken"]
        facts = {
            "id": identity,
            "path": shown_place(str(source.path), row["member"]),
            "width": row["width"],
            "height": row["height"],
            "bytes": row["size"],
            "date": local_time(row["mtime"] if taken is None else taken),
            "date_source": "file" if taken is None else "exif",
            "description": _cut(row["dense"], LARGEST_DESCRIPTION),
            "text_in_picture": _cut(row["ocr"], LARGEST_DESCRIPTION),
            "described_by": ", ".join(sources_of(row["sources"], row["ocr"])),
        }
        return [_text(facts), *(_thumbnails([bytes(row["thumbnail"])]) if images else [])]

    def explain(
        self,
        picture: Name,
        sentence: Annotated[Text, Field(description="A sentence, like that of a search")],
        images: Annotated[bool, Field(description="Also return a drawing: kept patches, a heat map per word")] = True,
    ) -> Content:
        """Explain the score of a picture for a sentence: what each word of it adds."""
        explained = self.library.explain(self._find(picture), sentence, longest=LONGEST_SIDE)
        explanation = explained.explanation
        facts = {
            "path": str(explained.path),
            "score": round(explanation.score, 4),
            "words": {word: round(value, 4) for word, value in explained.words.items()},
            "words_of_the_description": {word: round(value, 4) for word, value in explanation.found_words.items()},
            "background": round(explanation.background, 4),
            "words_in_the_picture": explanation.words_in_picture,
            "text_in_picture": _cut(explanation.text_in_picture, LARGEST_DESCRIPTION),
            "described_by": explanation.described_by,
            "rest": round(explanation.rest, 4),
            "patches": {"kept": sum(explanation.kept), "of": len(explanation.kept)},
            "note": " ".join(filter(None, [explanation.note, explained.photo_note])),
        }
        return [_text(facts), *(_drawing(explained.image()) if images else [])]

    def duplicates(
        self,
        kind: Annotated[
            Literal["file", "picture", "near"],
            Field(description="The loosest to look for: same file, same picture saved again, or nearly the same"),
        ] = "near",
        count: Count = 10,
        images: Annotated[bool, Field(description="Also return the thumbnail of the first picture per group")] = False,
    ) -> Content:
        """List groups of equal or nearly equal pictures, the largest first; each names the best first."""
        if len(self.library) > LARGEST_STORE:
            raise ValueError(
                f"The store has {len(self.library)} pictures; above {LARGEST_STORE} call `seps duplicates` in a shell."
            )
        groups = sorted(self.library.duplicates(kind=kind), key=lambda group: -len(group.pictures))
        listed = [
            {
                "kind": group.kind,
                "size": len(group.pictures),
                "pictures": [
                    {
                        "id": copy.id,
                        "path": shown_place(str(self.library.source(copy.path, copy.member).path), copy.member),
                        "width": copy.width,
                        "height": copy.height,
                        "bytes": copy.size,
                    }
                    for copy in group.pictures[:LARGEST_GROUP]
                ],
            }
            for group in groups[:count]
        ]
        first = [group.keep.id for group in groups[:count]]
        return [_text({"groups_in_all": len(groups), "groups": listed}), *(self._thumbnails(first) if images else [])]

    def call(self, work: Callable[..., Content]) -> Callable[..., Content]:
        """A tool as the server calls it: one at a time, and what it refuses comes as a sentence."""

        @functools.wraps(work)
        def tool(*arguments: Any, **options: Any) -> Content:
            with self._lock, _as_sentences():
                return work(*arguments, **options)

        return tool

    def _find(self, name: str) -> str:
        """The id of a picture that can be found. Raises StoreError for any other name."""
        refusal = f"The index has no picture {name!r}; only pictures of the indexed folders can be read."
        try:
            identity = self.library.find(name)
        except (StoreError, OSError, ValueError) as error:
            raise StoreError(refusal) from error
        store = self.library.store
        if not store.among([identity], store.allowed(self.library.scope())):  # excluded
            raise StoreError(refusal)
        return identity

    def _results(self, results: Results | Sequence[Result], note: str, images: bool) -> Content:
        ids = [result.id for result in results]
        texts = (
            {row["id"]: row["dense"] for row in self.library.store.select(ids, ["id", "dense"]).rows()} if ids else {}
        )
        listed = []
        for rank, result in enumerate(results, 1):
            facts = {**result.as_dict(), "rank": rank}
            facts["path"] = shown_place(str(result.path), facts.pop("member", None))
            facts["good"] = result.good
            facts["text_in_picture"] = _cut(result.text_in_picture or None, LARGEST_DESCRIPTION // 10)
            facts["description"] = _cut(texts.get(result.id), LARGEST_DESCRIPTION // 10)
            listed.append({name: value for name, value in facts.items() if value is not None})
        return [_text({"note": note, "results": listed}), *(self._thumbnails(ids) if images else [])]

    def _thumbnails(self, ids: Sequence[str]) -> list[ImageContent]:
        first = list(ids[:THUMBNAILS])
        pictures = self.library.thumbnails(first)
        return _thumbnails([pictures[identity] for identity in first if identity in pictures])


def create_server(library: Library) -> MCPServer:
    """The server over a library; `run` it over stdio."""
    tools = Tools(library)
    server = MCPServer(
        "seps",
        version=__version__,
        instructions=f"Search over {len(library)} pictures on this machine by what they show. Read-only. Name a "
        "picture by its id or its path. Thumbnails come in the order of the results.",
        log_level="WARNING",
    )
    hints = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    for work in (tools.search, tools.similar, tools.describe, tools.explain, tools.duplicates):
        server.add_tool(tools.call(work), annotations=hints, structured_output=False)
    return server


@contextmanager
def _as_sentences() -> Iterator[None]:
    """Let what the library refuses reach the client as its sentence; a defect stays one."""
    try:
        yield
    except UnicodeError:
        raise
    except UnreadableImage as error:
        raise ToolError(f"The file cannot be read: {error.why}") from error
    except ValueError as error:
        raise ToolError(str(error)) from error
    except OSError as error:
        raise ToolError(f"The file cannot be read: {error.strerror or error}") from error


def _text(facts: dict[str, Any]) -> TextContent:
    text = json.dumps({name: value for name, value in facts.items() if value not in (None, "", {})}, ensure_ascii=False)
    # A name of a file may have bytes that are no UTF-8.
    return TextContent(text=text.encode("utf-8", "backslashreplace").decode())


def _cut(text: str | None, letters: int) -> str | None:
    return text if text is None or len(text) <= letters else text[: letters - 1] + "…"


def _thumbnails(pictures: Sequence[bytes]) -> list[ImageContent]:
    """JPEG thumbnails as content, without those that are too large."""
    return [
        ImageContent(data=base64.b64encode(data).decode(), mime_type="image/jpeg")
        for data in pictures
        if len(data) <= LARGEST_IMAGE
    ]


def _drawing(sheet: Any) -> list[ImageContent]:
    sheet = sheet.convert("RGB")
    sheet.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    page = io.BytesIO()
    sheet.save(page, "JPEG", quality=80)
    return _thumbnails([page.getvalue()])
