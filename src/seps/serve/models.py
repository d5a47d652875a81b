"""The shapes of the API's answers, and a page that documents its endpoints without any outside asset."""

from __future__ import annotations

from html import escape
from typing import Any, Literal

from pydantic import BaseModel, Field


class ImageFacts(BaseModel):
    """An image of the store."""

    id: str
    path: str
    member: str | None
    width: int
    height: int


class Result(BaseModel):
    """One image that was found."""

    rank: int
    score: float = Field(description="Exact score; higher fits better")
    confidence: float | None = Field(
        None, description="0 to 1: part of queries about other pictures whose best score is lower; null: not known"
    )
    path: str = Field(description="Relative to the indexed folder")
    member: str | None = Field(None, description="Member of the tar shard `path`")
    id: str = Field(description="Address of the image in this API: its row in the store, and a tag of its content")
    width: int
    height: int
    thumbnail: str = Field(description="Address of the thumbnail; it never means another content")
    terms: dict[str, float] = Field(
        default_factory=dict, description="Parts of the score that do not come from the model: `lexical`"
    )


class Results(BaseModel):
    """Images, best first."""

    query: str
    good: int | None = Field(description="How many of the results, from the first, are good matches; null: not known")
    results: list[Result]
    note: str = Field("", description="What of the query was not used, as a sentence; empty where all was")


class DescriptionWord(BaseModel):
    """One word of the image's description."""

    word: str
    special: bool
    contribution: float


class Word(DescriptionWord):
    """One word of the sentence."""

    heat: list[float] = Field(description="What it owes to each cell of the grid, row by row")


class ExplanationAnswer(ImageFacts):
    """A score and what it is made of; the words' contributions, `rest` and `added` sum to it."""

    caption: str
    score: float
    grid: tuple[int, int]
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
        default_factory=dict, description="Words of the sentence that stand in the description, and what each adds"
    )
    note: str = Field("", description="What took no part in the score; empty where nothing was left out")
    background: float = Field(0.0, description="What the bank of background queries adds, whatever the sentence")


class Picture(ImageFacts):
    """An image of the store and its file."""

    original: Literal["present", "missing", "changed"] = Field(description="The file, compared with what was indexed")
    note: str = Field(description="What is wrong with the file, as a sentence; empty where nothing is")
    thumbnail: str


class Status(BaseModel):
    """What is being served."""

    images: int
    folder: str
    model: str
    grid: tuple[int, int]
    version: str
    explains: bool


def documentation_page(openapi: dict[str, Any]) -> str:
    """The endpoints as plain HTML."""
    parts = [f"<h1>{escape(openapi['info']['title'])} API</h1><p>{escape(openapi['info']['description'])}</p>"]
    parts.append('<p>Machine-readable: <a href="/api/openapi.json">/api/openapi.json</a>. Errors are ')
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
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/static/style.css"></head>'
        f'<body><main class="text">{"".join(parts)}</main></body></html>'
    )
