"""`seps convert`: make a model of ours from a checkpoint of the published code."""

from __future__ import annotations

import argparse

from seps.cli.shared.argtypes import output_folder
from seps.cli.shared.parser import Parser
from seps.cli.shared.text import printable


def add_options(parser: Parser) -> None:
    """The options of `seps convert`."""
    parser.add_argument("checkpoint", help="model_best.pth of the published code")
    parser.add_argument("-o", "--out", type=output_folder, required=True, help="folder to write")
    parser.add_argument("--vision", help="its vision encoder: preset, hub id or folder (default: as the file says)")
    parser.add_argument("--text", help="its text encoder (default: bert-base)")


def run(options: argparse.Namespace) -> int:
    """Convert one file."""
    from seps.retrieval.convert import convert_published
    from seps.retrieval.pretrained import save_pretrained

    model = convert_published(options.checkpoint, vision=options.vision, text=options.text)
    save_pretrained(model, options.out, about={"converted_from": options.checkpoint})
    out = printable(options.out)
    print(f"Wrote {out}. Evaluate it with: seps eval --model {out} --data FILE.jsonl")
    return 0
