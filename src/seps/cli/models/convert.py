"""`seps convert`: make a model of ours from a checkpoint of the published code, or of DeMo (re-identification)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import output_folder, positive_fraction
from seps.cli.shared.parser import Parser
from seps.cli.shared.text import printable, typed

if TYPE_CHECKING:
    from torch import Tensor


def add_options(parser: Parser) -> None:
    """The options of `seps convert`."""
    parser.add_argument("checkpoint", help="convert this model_best.pth of the published code, or .pth of DeMo")
    parser.add_argument("-o", "--out", type=output_folder, required=True, help="write to this folder")
    parser.add_argument("--vision", help="use this vision encoder: preset, hub id or folder (default: as in the file)")
    parser.add_argument("--text", help="use this text encoder: preset, hub id or folder (default: bert-base)")
    parser.add_argument(
        "--layout", choices=("rgbnt201", "rgbnt100", "msvr310"), help="DeMo: name the set that it was trained on"
    )
    for name, default in (("sparse", 0.5), ("aggr", 0.4)):
        parser.add_argument(
            f"--{name}-ratio",
            type=positive_fraction,
            default=default,
            help=f"DeMo with SDTPS: pass its SDTPS_{name.upper()}_RATIO (default: %(default)s)",
        )


def run(options: argparse.Namespace) -> int:
    """Convert one file."""
    from seps.reid.demo.convert import read_demo

    state = read_demo(options.checkpoint)
    if state is not None or options.layout:
        return _demo(options, state)
    from seps.retrieval.convert import convert_published
    from seps.retrieval.pretrained import save_pretrained

    model = convert_published(options.checkpoint, vision=options.vision, text=options.text)
    save_pretrained(model, options.out, about={"converted_from": options.checkpoint})
    out = printable(options.out)
    print(f"Wrote {out}. Evaluate it with: seps eval --model {typed(options.out)} --data FILE.jsonl")
    return 0


def _demo(options: argparse.Namespace, state: dict[str, Tensor] | None) -> int:
    from seps.reid.demo.convert import convert_demo
    from seps.reid.pretrained import save_pretrained

    if options.layout is None:
        raise ValueError(
            f"{options.checkpoint} is a checkpoint of DeMo: name the set it was trained on by --layout rgbnt201, "
            "rgbnt100 or msvr310; the image size and the cameras follow from it."
        )
    made = convert_demo(
        options.checkpoint,
        options.layout,
        sparse_ratio=options.sparse_ratio,
        aggr_ratio=options.aggr_ratio,
        state=state,
    )
    about = {"converted_from": options.checkpoint, "left_out": list(made.left_out)}
    save_pretrained(made.trained, options.out, about=about)
    out = printable(options.out)
    print(f"{made.mapped} tensors have a place, {len(made.left_out)} have none (all named in {out}/config.json):")
    for part, count in made.groups().items():
        print(f"  {printable(part)}: {count}")
    branches = "1, 2 or 3" if made.trained.model.sdtps is not None else "1, the original branch"
    print(f"Wrote {out}; its features are pattern {branches}.")
    print(f"Next: seps reid eval {typed(options.out)} --data.root FOLDER")
    return 0
