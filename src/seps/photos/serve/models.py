"""The shapes of the API's answers, and a page that documents its endpoints without any outside asset."""

from __future__ import annotations

from html import escape
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

DateSource = Literal["exif", "file"]
Grid = Annotated[list[int], Field(min_length=2, max_length=2, description="Rows and columns")]


class Failure(BaseModel):
    """Why a request was not answered."""

    error: str = Field(description="A sentence: what was wrong, and what to do")
    thumbnail: str | None = Field(None, description="Of a picture whose file cannot be shown: its thumbnail")


class Health(BaseModel):
    """The service answers and its store is there."""

    status: Literal["ok"]


class ImageFacts(BaseModel):
    """An image of the store."""

    id: str
    path: str = Field(description="Below the indexed folder; of a store of several folders, from a folder's name on")
    member: str | None
    width: int
    height: int


class QueryPart(BaseModel):
    """One sentence of a sum, or the picture beside it, and what it adds to the score."""

    part: str
    score: float


class Result(BaseModel):
    """One image that was found."""

    rank: int
    score: float = Field(description="Exact score; higher fits better")
    confidence: float | None = Field(
        None, description="confidence that the picture matches the query, 0 to 1; null: not calibrated"
    )
    path: str = Field(description="Below the indexed folder; of a store of several folders, from a folder's name on")
    member: str | None = Field(None, description="Member of the tar shard `path`")
    id: str = Field(description="Address of the image in this API: its row in the store, and a tag of its content")
    width: int
    height: int
    thumbnail: str = Field(description="Address of the thumbnail; it never means another content")
    terms: dict[str, float] = Field(
        default_factory=dict,
        description="Parts of the score besides that of the model (`lexical`, `background`); of a query with "
        "sentences and a picture, the contribution of each",
    )
    parts: list[QueryPart] = Field(
        default_factory=list, description="Of a query of several parts what each adds to the score; else empty"
    )
    good: bool | None = Field(None, description="Whether it is a good match and not one of the rest; null: not known")
    date: str = Field("", description="When the photo was taken, or else when its file was last written; local time")
    date_source: DateSource = Field("file", description="`exif`: when the photo was taken; `file`: of its file")
    described_by: list[str] = Field(
        default_factory=list, description="Sources of its texts, like `jsonl`, `xmp title` or `text in the picture`"
    )
    text_in_picture: str | None = Field(None, description="Text in it, a line per line; null: none is known")
    position: list[float] | None = Field(
        None, description="Latitude and longitude in degrees; null: its file does not have them"
    )


class FoldedResult(Result):
    """One image that was found, and its near-duplicates among the results."""

    folded: list[Result] = Field(default_factory=list, description="Near-duplicates that follow it; with `fold` alone")


class Page(BaseModel):
    """Where a page lies among all results; the order of the pages of one search stays the same."""

    total: int = Field(description="Results that can be reached page by page; near-duplicates count once if folded")
    offset: int
    next: int | None = Field(description="`offset` of the next page; null: this is the last")


class Results(Page):
    """Images, best first."""

    query: str
    good: int | None = Field(
        description="How many of the pictures found, on all pages, are good matches; they come first. Null: not known"
    )
    pictures: int = Field(description="Pictures that were found, on all pages, near-duplicates among them")
    results: list[FoldedResult]
    note: str = Field("", description="What of the query was not used, as a sentence; empty where all was")


class ListedPicture(ImageFacts):
    """An image of the store, without a query."""

    member: str | None = None
    date: str = Field(description="When the photo was taken, or else when its file was last written; local time")
    date_source: DateSource = Field(description="`exif`: when the photo was taken; `file`: of its file")
    thumbnail: str


class Listing(Page):
    """Images by date."""

    results: list[ListedPicture]


class FolderFacts(BaseModel):
    """A folder below the indexed one, or a tar shard."""

    path: str
    images: int


class Overview(BaseModel):
    """What the store holds, before anything is asked."""

    images: int
    folders: list[FolderFacts] = Field(description="Those with most images, at most 500, by name")
    oldest: str
    newest: str
    examples: list[str] = Field(description="Sentences to try, from the beginnings of descriptions")


class Uploaded(BaseModel):
    """A picture that was sent and is remembered for a while."""

    upload: str = Field(description="Its id, for the parameter `upload` of a search")
    thumbnail: str


class KeptPatches(BaseModel):
    """Which patches of an image a sentence keeps."""

    grid: Grid
    kept: str = Field(description="Per cell, row by row, 1 where its patch is kept and 0 where it is not")
    note: str = Field("", description="What took no part, as a sentence")


class DescriptionWord(BaseModel):
    """One word of the image's description."""

    word: str
    special: bool
    contribution: float
    stop: bool = Field(description="A function word or a mark, which no picture shows")


class Word(DescriptionWord):
    """One word of the sentence."""

    heat: list[float] = Field(description="What it owes to each cell of the grid, row by row")


class ExplanationAnswer(ImageFacts):
    """A score and what it is made of; the words' contributions, `rest` and `added` sum to it."""

    caption: str
    score: float
    grid: Grid
    words: list[Word]
    patches: list[float]
    kept: list[bool]
    stored: list[bool]
    groups: list[list[float]]
    description: list[DescriptionWord]
    elsewhere: float
    rest: float
    terms: dict[str, float]
    added: float = Field(0.0, description="What the search adds to the model's score; `terms` has its parts by name")
    found_words: dict[str, float] = Field(
        default_factory=dict,
        description="Words of the sentence that occur in the description or in the picture, and what each adds",
    )
    note: str = Field("", description="What took no part in the score; empty where nothing was left out")
    background: float = Field(0.0, description="What the bank of background queries adds, whatever the sentence")
    whole_sentence: bool = Field(False, description="Whether the sentence has one vector, and no words of its own")
    described_by: list[str] = Field(
        default_factory=list, description="Sources of the texts, like `jsonl`, `xmp title` or `text in the picture`"
    )
    text_in_picture: str = Field("", description="Text in it, a line per line; empty: none is known")
    words_in_picture: list[str] = Field(default_factory=list, description="Those of `found_words` that stand in it")


class Picture(ImageFacts):
    """An image of the store and its file."""

    full_path: str = Field(
        description="Where the file is; for other machines than this one, from the indexed folder's name on"
    )
    date: str = Field(description="When the photo was taken, or else when its file was last written; local time")
    date_source: DateSource = Field(description="`exif`: when the photo was taken; `file`: of its file")
    original: Literal["present", "missing", "changed"] = Field(description="The file, compared with what was indexed")
    note: str = Field(description="What is wrong with the file, as a sentence; empty where nothing is")
    thumbnail: str


class Status(BaseModel):
    """What is being served."""

    images: int
    folder: str
    model: str
    grid: Grid
    version: str
    explains: bool
    keeps: bool = Field(description="Whether the model selects patches, so that those kept can be shown")


def documentation_page(openapi: dict[str, Any]) -> str:
    """The endpoints as plain HTML."""
    parts = [f"<h1>{escape(openapi['info']['title'])} API</h1><p>{escape(openapi['info']['description'])}</p>"]
    parts.append('<p>Machine-readable: <a href="openapi.json">openapi.json</a>. Errors are ')
    parts.append("<code>{&quot;error&quot;: sentence}</code> with a 4xx or 5xx status.</p>")
    for path, methods in openapi["paths"].items():
        for method, about in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(about['summary'])}</p>")
            rows = [
                f"<tr><td><code>{escape(each['name'])}</code></td><td>{each['in']}</td>"
                f"<td>{escape(str(each['schema'].get('default', '')))}</td>"
                f"<td>{escape(each.get('description', ''))}</td></tr>"
                for each in about.get("parameters", [])
            ]
            if rows:
                head = "<tr><th>name</th><th>in</th><th>default</th><th>meaning</th></tr>"
                parts.append(f"<table>{head}{''.join(rows)}</table>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>SEPS API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="static/style.css">'
        '<script src="static/theme.js"></script></head>'
        f'<body><main class="text">{"".join(parts)}</main></body></html>'
    )
