"""`seps demo`: search the photos that ship with the package, and see which patches each query kept."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from seps.cli.shared.argtypes import output_file_anywhere
from seps.cli.shared.outputs import is_our_picture, save_picture
from seps.cli.shared.parser import Parser
from seps.cli.shared.text import printable
from seps.extras import require
from seps.files import numbered
from seps.retrieval.config import DEFAULT_MODEL


def add_options(parser: Parser) -> None:
    """The options of `seps demo`."""
    parser.add_argument("queries", nargs="*", help="search for these sentences (default: five examples)")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="use 'base' (default), 'mini', a model folder, or a run of seps train"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=_picture,
        default="out/demo.png",
        help="write this picture (default: %(default)s); a file that the demo did not write is kept",
    )
    parser.add_argument("--force", action="store_true", help="overwrite a file that the demo did not write")


def run(options: argparse.Namespace) -> int:
    """Print the answers and write the picture."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    require("torch", "The demo")
    from seps.cli.shared.progress import stage_progress
    from seps.retrieval.demo import QUERIES, gallery_file, run_demo

    started = time.perf_counter()
    with stage_progress() as progress:
        result = run_demo(options.model, options.queries or QUERIES, progress=progress)
    table = Table(title=f"The best of {result.images} photos for each query")
    for name in ("query", "by pixels alone", "by pixels and the photo's own description"):
        table.add_column(name)
    for answer in result.answers:
        columns = (answer.pixels_only, answer.with_description)
        lines = [
            "\n".join(f"{score:5.2f}  {escape(printable(Path(name).stem))}" for name, score in best[:3])
            for best in columns
        ]
        table.add_row(escape(printable(answer.query)), *lines)
        table.add_section()
    console = Console()
    console.print(table)
    for title, metrics in (
        ("pixels alone", result.pixels_only),
        ("pixels and description", result.with_description),
    ):
        console.print(
            f"The photos' own {metrics.captions} captions as queries, {title}: R@1 {metrics.t2i.r1:.0f} %, "
            f"R@5 {metrics.t2i.r5:.0f} %"
        )
    asked = Path(options.out)
    free = (path for path in numbered(asked) if options.force or not path.exists() or is_our_picture(path))
    path = next(free)
    if path != asked:
        console.print(f"{printable(str(asked))} was not made by seps and stays as it is.", markup=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(result.picture, path)
    console.print(
        f"Wrote {printable(str(path))}: the best photos, kept patches bright. ({time.perf_counter() - started:.0f} s)",
        markup=False,
    )
    console.print("To search these photos in a browser, and to see why each was found:", highlight=False)
    store = path.parent / "demo-store"
    program = Path(sys.argv[0]).name if Path(sys.argv[0]).parent.name != "bin" else sys.argv[0]
    console.print(
        f"  {program} index {gallery_file().parent} --store {store} && {program} serve --store {store}",
        soft_wrap=True,
        markup=False,
    )
    return 0


def _picture(text: str) -> str:
    from PIL import Image

    if Path(text).suffix.lower() not in Image.registered_extensions():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a picture: let it end in .png or .jpg")
    return output_file_anywhere(text)
