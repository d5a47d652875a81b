"""`seps convert`: make a model of ours from a checkpoint of the published code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from seps.cli.shared.argtypes import output_folder
from seps.cli.shared.parser import Parser
from seps.cli.shared.text import printable


def build_parser() -> argparse.ArgumentParser:
    """The options of `seps convert`."""
    parser = Parser("seps convert", description=__doc__)
    parser.add_argument("checkpoint", help="model_best.pth of the published code")
    parser.add_argument("-o", "--out", type=output_folder, required=True, help="folder to write")
    parser.add_argument("--vision", help="its vision encoder: preset, hub id or folder (default: as the file says)")
    parser.add_argument("--text", help="its text encoder (default: bert-base)")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Convert one file."""
    options = build_parser().parse_args(arguments)
    from seps.retrieval.convert import convert_published
    from seps.retrieval.pretrained import save_pretrained

    model = convert_published(options.checkpoint, vision=options.vision, text=options.text)
    save_pretrained(model, options.out, about={"converted_from": options.checkpoint})
    out = printable(options.out)
    print(f"Wrote {out}. Evaluate it with: seps eval --model {out} --data FILE.jsonl")
    return 0
