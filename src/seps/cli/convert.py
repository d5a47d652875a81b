"""`seps convert`: make a model of ours from a checkpoint of the published code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Convert one file."""
    parser = argparse.ArgumentParser("seps convert", description=__doc__)
    parser.add_argument("checkpoint", help="model_best.pth of the published code")
    parser.add_argument("-o", "--out", required=True, help="folder to write")
    parser.add_argument("--vision", help="its vision encoder: preset, hub id or folder (default: as the file says)")
    parser.add_argument("--text", help="its text encoder (default: bert-base)")
    options = parser.parse_args(arguments)
    from seps.retrieval.convert import convert_published
    from seps.retrieval.pretrained import save_pretrained

    model = convert_published(options.checkpoint, vision=options.vision, text=options.text)
    save_pretrained(model, options.out, about={"converted_from": options.checkpoint})
    print(f"Wrote {options.out}. Evaluate it with: seps eval --model {options.out} --data FILE.jsonl")
    return 0
