"""`seps export`: write a model as ONNX files (image, text, score) and its tokenizer, for programs without torch."""

from __future__ import annotations

import argparse

from seps.cli.shared.argtypes import output_folder
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.text import printable


def add_options(parser: Parser) -> None:
    """The options of `seps export`."""
    parser.add_argument("model", help="'mini', 'base', a model folder or a run of seps train")
    parser.add_argument("-o", "--out", type=output_folder, required=True, help="folder to write")
    add_plugins(parser)


def run(options: argparse.Namespace) -> int:
    """Export one model."""
    from seps.retrieval.export import check_export, export_model
    from seps.retrieval.pretrained import from_pretrained

    check_export(options.out)
    differences = export_model(from_pretrained(options.model, plugins=options.plugin), options.out)
    for name, value in differences.items():
        print(f"{name:<11} largest difference from torch {value:.1e}")
    print(f"Wrote {printable(options.out)}; export.json has the sizes and the names of the inputs.")
    return 0
