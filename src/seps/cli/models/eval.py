"""`seps eval`: measure the recall of a model on a data set, under a named protocol."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from seps.cli.shared.argtypes import (
    default_device,
    device,
    inner_fraction,
    input_file,
    input_folder,
    output_file_or_stdout,
    positive,
)
from seps.cli.shared.outputs import check_output, write_output
from seps.cli.shared.parser import Parser, add_plugins
from seps.cli.shared.text import literal, print_json, printable
from seps.plugins import load_plugins
from seps.retrieval.config import DEFAULT_MODEL, PROTOCOLS

if TYPE_CHECKING:
    from seps.retrieval.data import CheckReport, RetrievalDataset
    from seps.retrieval.evaluate.extended import ExtendedFigures
    from seps.retrieval.evaluate.run import EvaluationReport


def add_options(parser: Parser) -> None:
    """The options of `seps eval`."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="evaluate 'base' (default), 'mini', a model folder, a run of seps train, or a dual encoder by preset "
        "(clip-b-32), hub id or folder",
    )
    parser.add_argument(
        "--data",
        required=True,
        help="evaluate on this JSONL file, FOLDER:SPLIT[:NAME] of the published layout, or "
        "FILE.json:SPLIT of Karpathy's files",
    )
    parser.add_argument("--images", type=input_folder, help="read images from this folder (default: that of the JSONL)")
    parser.add_argument(
        "--dense", type=input_file, help="read descriptions from this JSONL file, such as that of seps caption"
    )
    parser.add_argument(
        "--protocol", choices=PROTOCOLS, default="image", help="choose which side has descriptions (default: image)"
    )
    parser.add_argument(
        "--description-weight",
        type=inner_fraction,
        help="weigh the description by this number in (0, 1) (default: that of the model)",
    )
    parser.add_argument(
        "--words",
        type=positive,
        metavar="M",
        help="merge the description of each image to at most M words (default: all words)",
    )
    parser.add_argument(
        "--lexical",
        action="store_true",
        help="add the lexical term of seps search: rare words of a caption that occur in a description",
    )
    parser.add_argument(
        "--bank",
        action="store_true",
        help="subtract half of the level over background queries, as seps search does; leave it off "
        "for comparable figures",
    )
    parser.add_argument(
        "--folds", type=positive, default=1, help="average over this many equal parts; 5 for COCO 1K (default: 1)"
    )
    parser.add_argument(
        "--extended",
        action="store_true",
        help="add mAP@R of ECCV Caption and the recalls of CxC; for the whole test split of COCO (pip "
        "install 'seps[eccv]')",
    )
    parser.add_argument(
        "--memory",
        type=positive,
        help="let the scorer use this many MiB (default: 512; on a GPU a share of its free memory)",
    )
    add_plugins(parser)
    parser.add_argument("--strict", action="store_true", help="stop at a faulty image instead of leaving it out")
    parser.add_argument("--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one)")
    parser.add_argument(
        "--json",
        type=output_file_or_stdout,
        metavar="FILE",
        help="write the figures to FILE as JSON, too ('-': standard output)",
    )


def run(options: argparse.Namespace) -> int:
    """Evaluate and print a table; `--json` writes the figures."""
    out = None
    if options.json and options.json != "-":
        out = check_output(options.json, "--json", "rsum", (options.data, options.dense))

    from seps.cli.shared.progress import stage_progress
    from seps.retrieval.data import attach_dense, check_dataset, load_data
    from seps.retrieval.data.check import left_out
    from seps.retrieval.engine.loading import load_engine, set_description_weight
    from seps.retrieval.evaluate.encoding import encode_readable
    from seps.retrieval.evaluate.extended import extended, load_answers
    from seps.retrieval.evaluate.run import check_evaluation, evaluate

    load_plugins(options.plugin)
    answers = load_answers() if options.extended else None
    dataset = load_data(options.data, images_root=options.images)
    if options.dense:
        dataset = attach_dense(dataset, options.dense)
    # Only files and texts are looked at here: the pictures are decoded once, when they are encoded.
    checked = check_dataset(dataset)
    whole, dataset = len(dataset), _without_faults(dataset, checked, options.strict)
    wanted = {"folds": options.folds, "bank": options.bank}
    # What cannot be evaluated is told before the pictures are encoded, which may take hours.
    check_evaluation(dataset, options.protocol, **wanted, left_out=whole - len(dataset))
    more = None if answers is None else extended(dataset, answers)
    model = load_engine(options.model, device=options.device or default_device())
    if options.description_weight is not None:
        set_description_weight(model, options.description_weight)
    check_evaluation(dataset, options.protocol, model=model, **wanted, left_out=whole - len(dataset))
    with stage_progress() as progress:
        tokens, report = encode_readable(model, dataset, progress=progress)
    if report.findings:
        dataset = _without_faults(dataset, report, options.strict)
        check_evaluation(dataset, options.protocol, **wanted, left_out=whole - len(dataset))
        more = None if answers is None else extended(dataset, answers)
    with stage_progress() as progress:
        result = evaluate(
            model,
            dataset,
            options.protocol,
            tokens=tokens,
            folds=options.folds,
            keep_words=options.words,
            bank=options.bank,
            memory=None if options.memory is None else options.memory * 2**20,
            lexical=options.lexical,
            extended=more,
            progress=progress,
        )
    figures = {"model": options.model, **result.as_dict(), **left_out([checked, report])}
    if result.warning:
        print(f"Warning: {printable(result.warning)}", file=sys.stderr)
    if options.json == "-":
        print_json(figures)
        return 0
    named = ", lexical" * options.lexical + ", with the bank" * options.bank
    _table(f"{options.model} on {dataset.label}, protocol {options.protocol}{named}", result)
    if result.extended is not None:
        _extended_table(result.extended)
    if out is not None:
        write_output(out, figures)
    return 0


def _without_faults(dataset: RetrievalDataset, report: CheckReport, strict: bool) -> RetrievalDataset:
    """The data without what the report finds fault with, which is said, or refused if `strict`."""
    from seps.retrieval.data import drop_bad

    report.raise_if(strict)
    left = drop_bad(dataset, report)
    for sentence in report.sentences(left_out=True):
        print(printable(sentence), file=sys.stderr)
    return left


def _table(title: str, report: EvaluationReport) -> None:
    """Print both directions' recalls and ranks."""
    from rich.console import Console
    from rich.table import Table

    metrics = report.metrics
    table = Table(title=literal(title))
    for name in ("direction", "R@1", "R@5", "R@10", "median rank", "mean rank"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    for name, side in (("image -> text", metrics.i2t), ("text -> image", metrics.t2i)):
        values = (side.r1, side.r5, side.r10, side.median_rank, side.mean_rank)
        table.add_row(name, *(f"{value:.1f}" for value in values))
    console = Console()
    console.print(table)
    described = ""
    if report.protocol == "image":
        described = f", {report.images_with_description or 'none'} with a description"
    console.print(
        f"rSum [bold]{metrics.rsum:.1f}[/]   {metrics.images} images{described}, {metrics.captions} captions, "
        f"protocol [bold]{report.protocol}[/]"
    )
    if report.bank:
        console.print(f"Corrected by background queries: {report.bank}")


def _extended_table(figures: ExtendedFigures) -> None:
    """Print both directions' figures of ECCV Caption and CxC, and where the caption ids came from."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="The same scores, with the right answers of ECCV Caption and CxC")
    for name in ("direction", "ECCV mAP@R", "R-Precision", "R@1", "CxC R@1", "R@5", "R@10"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    for name, side in (("image -> text", figures.i2t), ("text -> image", figures.t2i)):
        eccv = (side.eccv_map_at_r, side.eccv_rprecision, side.eccv_r1)
        table.add_row(name, *(f"{value:.1f}" for value in (*eccv, side.cxc_r1, side.cxc_r5, side.cxc_r10)))
    console = Console()
    console.print(table)
    if figures.caption_ids == "by order":
        console.print("Caption ids: the data has none; they are those of COCO's test split, in its order.")
