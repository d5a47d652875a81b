"""What captions and keywords in the files of photos add to a search, made from captions held out of the queries.

    python -m benchmarks.quality.metadata --data dev-llava.jsonl --json docs/results/metadata-dev-llava.json

The last caption of each photo is no query. It is written into a sidecar `.xmp`, as a caption, or its words that are no
function words as keywords, and is read as `seps index` reads it. rSum of the other captions, with the rare words of a
search and without the correction by background queries.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from benchmarks.common.machine import describe
from seps.images.metadata import read_metadata
from seps.images.shards import read_source
from seps.metrics import recall
from seps.photos.indexing.descriptions import described
from seps.retrieval.data import load_jsonl
from seps.retrieval.data.records import ImageRecord
from seps.retrieval.engine.engine import Engine
from seps.retrieval.engine.faster import faster
from seps.retrieval.engine.loading import load_engine
from seps.retrieval.evaluate.encoding import encode_images
from seps.retrieval.languages import is_stop_word, words_of
from seps.retrieval.ranking.terms import GalleryFacts, ImageFacts, InMemory, add_to_scores, matches_of

PACKET = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:dc="http://purl.org/dc/elements/1.1/">{}</rdf:Description></rdf:RDF></x:xmpmeta>'
)
ITEM = "<rdf:li>{}</rdf:li>"


def main() -> None:
    """Print a row per kind of metadata."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data", required=True)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    engine, data = load_engine(options.model), load_jsonl(options.data)
    encoded = encode_images(faster(engine), data)
    queries = [caption for record in data.records for caption in record.captions[:-1]]
    owner = torch.tensor([place for place, record in enumerate(data.records) for _ in record.captions[:-1]])
    rows = {}
    for kind in ("none", "keywords", "caption"):
        texts = [None if kind == "none" else text_of(record, kind) for record in data.records]
        found = recall(scores(engine, encoded, texts, queries), owner)
        rows[kind] = {
            "rsum": found.rsum,
            "text_to_image_r1": found.t2i.recalls[1],
            "text_to_image_r5": found.t2i.recalls[5],
        }
        print(kind, *(f"{name} {value:.1f}" for name, value in rows[kind].items()), flush=True)
    if options.json:
        facts = {"model": options.model, "photos": len(data.records), "queries": len(queries), "rows": rows}
        machine = describe(torch.device("cpu"))
        options.json.write_text(json.dumps({**facts, "machine": machine}, indent=1) + "\n", encoding="utf-8")


def text_of(record: ImageRecord, kind: str) -> str | None:
    """The description that an index has of a photo whose sidecar has its last caption, or words of it."""
    caption = record.captions[-1]
    if kind == "caption":
        inner = f"<dc:description><rdf:Alt>{ITEM.format(escape(caption))}</rdf:Alt></dc:description>"
    else:
        words = (ITEM.format(escape(word)) for word in words_of(caption) if not is_stop_word(word))
        inner = f"<dc:subject><rdf:Bag>{''.join(words)}</rdf:Bag></dc:subject>"
    with tempfile.TemporaryDirectory() as folder:
        sidecar = Path(folder, "photo.jpg.xmp")
        sidecar.write_text(PACKET.format(inner), encoding="utf-8")
        metadata = read_metadata(read_source(record.source), record.source, sidecar)
    return described(None, metadata.texts)[0]


def scores(engine: Engine, encoded: Tensor, texts: Sequence[str | None], queries: Sequence[str]) -> Tensor:
    """(B, T) of all photos and queries, with the rare words that a search adds."""
    given = texts if any(text is not None for text in texts) else None
    pictures = engine.pictures(encoded, given, batch_size=8)
    plain = engine.score(pictures, engine.encode_texts(list(queries)))
    ids = [str(place) for place in range(len(texts))]
    memory = InMemory(dict(zip(ids, texts, strict=True)))
    facts = ImageFacts(ids, [text is not None for text in texts])
    return add_to_scores(
        plain, facts, [matches_of(query, memory) for query in queries], GalleryFacts(engine.traits.score_unit, 0.0, 0.0)
    )


if __name__ == "__main__":
    main()
