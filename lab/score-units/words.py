"""What descriptions and their words add: ordinary captions, and names, places and numbers written into descriptions.

    python -m benchmarks.quality.words --data dev.jsonl [--out FILE.json]

The embedded model is measured as it is, and as a stand-in for a dual encoder: the cosine of its mean patch and mean
word, with the temperature of the least cross-entropy on dev. The description is added to that cosine as
`seps.retrieval.engine.vectors` adds it to a CLIP's, times 1 (what is used) and other strengths. Then ten photos take
descriptions with names, and 37 queries ask for them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.metrics import recall
from seps.retrieval.data import load_jsonl
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.keeping import image_vectors
from seps.retrieval.engine.vectors import CENTRE, TEMPERATURE
from seps.retrieval.evaluate.protocol import View
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking.terms import InMemory, matches
from seps.retrieval.ranking.terms import GalleryFacts, ImageFacts, add_to_scores

STAND_IN = 0.054
"""Temperature of the cosine of mean patch and mean word."""
NAMED = {
    "Grandma Olga's 80th birthday in Lisbon": (
        "Lisbon",
        "Olga",
        "grandma Olga",
        "80th birthday",
        "birthday in Lisbon",
    ),
    "uncle Bob dancing": ("uncle Bob dancing", "Bob", "uncle Bob"),
    "Marta and Piotr at the wedding of Zofia, Krakow 1998": ("Krakow", "Zofia", "wedding of Zofia", "1998", "Marta"),
    "Our dog Rufus on the beach at Brighton": ("Rufus", "Brighton", "Rufus on the beach", "our dog in Brighton"),
    "Receipt 4471 from Hotel Miramar": ("4471", "Miramar", "receipt", "Hotel Miramar"),
    "Team photo, Dynamo Kassel, season 2011/12": ("Kassel", "Dynamo", "Dynamo Kassel team photo", "2011"),
    "Emil's first day at school, with Mrs Haverkamp": ("Emil", "Haverkamp", "Emil at school"),
    "The old Trabant of Onkel Heinz in front of the garage": ("Trabant", "Heinz", "Onkel Heinz"),
    "Mount Fuji seen from Hakone": ("Fuji", "Hakone", "Mount Fuji"),
    "Ticket for platform 9, train IC 2043 to Antwerp": ("Antwerp", "2043", "train to Antwerp"),
}


def parts(
    model: RetrievalModel, tokens: Tensor, dense: Sequence[str | None], texts: Sequence[str]
) -> dict[str, Tensor]:
    """Scores (images, texts): the model's own, and the stand-in's two parts in nats."""
    words = model.encode_texts(texts)
    features = ImageFeatures(tokens, *model.encode_descriptions(dense))
    own, pixels = model.score(features, words), model.score(ImageFeatures(tokens), words)
    weight = model.description_weight or 0.0
    described = (own - (1 - weight) * pixels) / weight
    cosines = image_vectors(model, ImageFeatures(tokens)) @ words.mean_word.T
    return {"own": own, "cosine": cosines / STAND_IN, "described": (described - CENTRE) / TEMPERATURE}


def add_lexical(scores: Tensor, seen: View, unit: float) -> Tensor:
    """Add what a search adds for rare words of a caption in an image's description."""
    ids = [str(row) for row in range(len(scores))]
    texts = InMemory(dict(zip(ids, seen.image_descriptions or [], strict=False)))
    found = [matches(caption, texts) for caption in seen.captions]
    return add_to_scores(scores, ImageFacts(ids, [True] * len(ids)), found, GalleryFacts(unit, 0.0, 0.0))


def first(scores: Tensor, targets: Tensor) -> int:
    """Queries whose photo is first."""
    return int((scores.argmax(dim=0) == targets).sum())


@torch.no_grad()
def measure(model: RetrievalModel, path: str) -> dict[str, Any]:
    """All figures of one data set."""
    data = load_jsonl(path)
    tokens, owner, nat = encode_images(model, data), data.image_of_caption, engine_of(model).traits.score_unit

    def rsum(scores: Tensor) -> float:
        return round(float(recall(scores, owner).rsum), 1)

    found = parts(model, tokens, data.dense, data.captions)
    seen = View("image", list(data.dense), data.captions, None)
    both = found["cosine"] + found["described"]
    figures: dict[str, Any] = {
        "data": data.label,
        "images": len(data),
        "own": rsum(found["own"]),
        "own, lexical": rsum(add_lexical(found["own"], seen, nat)),
        "stand-in, pixels": rsum(found["cosine"]),
        "stand-in, description": rsum(found["described"]),
        "stand-in, lexical": rsum(add_lexical(both, seen, 1.0)),
    }
    for strength in (0.5, 1.0, 2.0):
        figures[f"stand-in, description times {strength}"] = rsum(found["cosine"] + strength * found["described"])
    rows = random.Random(1).sample(range(len(data)), len(NAMED))
    dense = list(data.dense)
    for row, text in zip(rows, NAMED, strict=True):
        dense[row] = text
    queries = [query for asked in NAMED.values() for query in asked]
    targets = torch.tensor([row for row, asked in zip(rows, NAMED.values(), strict=True) for _ in asked])
    found = parts(model, tokens, dense, queries)
    seen = View("image", dense, queries, None)
    both = found["cosine"] + found["described"]
    figures["queries with names"] = len(queries)
    figures["first, own"] = first(found["own"], targets)
    figures["first, own, lexical"] = first(add_lexical(found["own"], seen, nat), targets)
    figures["first, stand-in"] = first(both, targets)
    figures["first, stand-in, lexical"] = first(add_lexical(both, seen, 1.0), targets)
    return figures


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.words", description=__doc__)
    parser.add_argument("--data", nargs="+", required=True, help="JSONL with captions and descriptions")
    parser.add_argument("--out", help="file to write them to, too")
    options = parser.parse_args()
    model = from_pretrained("mini")
    text = json.dumps([measure(model, path) for path in options.data], indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
