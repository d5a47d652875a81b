"""Write `sentences.json` of the embedded models: what a search by a sentence must know of the part it does not load.

Run it after an embedded model has changed: `python tools/sentence_side.py`. A test compares the files with the models.
"""

from __future__ import annotations

import json

from seps.retrieval.embedded import EMBEDDED, FILE, describe, embedded_folder
from seps.retrieval.model import model_hash, text_hash
from seps.retrieval.pretrained import from_pretrained


def write(name: str) -> None:
    """Write the file of one embedded model."""
    model = from_pretrained(name)
    text = json.dumps(describe(model, model_hash(model), text_hash(model)), indent=1) + "\n"
    (embedded_folder(name) / FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for embedded in EMBEDDED:
        write(embedded)
