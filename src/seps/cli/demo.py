"""`seps demo`: search the photos that ship with the package, and see which patches each query kept."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> int:
    """Print the answers and write the picture."""
    parser = argparse.ArgumentParser("seps demo", description=__doc__)
    parser.add_argument("queries", nargs="*", help="sentences to search for (default: a few of ours)")
    parser.add_argument("--model", default="mini", help="'mini', a model folder, or a run of seps train")
    parser.add_argument("-o", "--out", default="out/demo.png", help="picture to write (default: %(default)s)")
    options = parser.parse_args(arguments)

    from rich.console import Console
    from rich.table import Table

    from seps.cli.display import stage_progress
    from seps.retrieval.demo import QUERIES, gallery_file, run_demo

    started = time.perf_counter()
    with stage_progress() as progress:
        result = run_demo(options.model, options.queries or QUERIES, progress=progress)
    table = Table(title=f"The best of {result.images} photos for each query")
    for name in ("query", "by pixels alone", "by pixels and the photo's own description"):
        table.add_column(name)
    for answer in result.answers:
        columns = (answer.pixels_only, answer.with_description)
        lines = ["\n".join(f"{score:5.2f}  {Path(name).stem}" for name, score in best[:3]) for best in columns]
        table.add_row(answer.query, *lines)
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
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    result.picture.save(path)
    console.print(f"Wrote {path}: the best photos, kept patches bright. ({time.perf_counter() - started:.0f} s)")
    console.print("To search these photos in a browser, and to see why each was found:", highlight=False)
    store = path.parent / "demo-store"
    program = Path(sys.argv[0]).name if Path(sys.argv[0]).parent.name != "bin" else sys.argv[0]
    console.print(
        f"  {program} index {gallery_file().parent} --store {store} && {program} serve --store {store}", soft_wrap=True
    )
    return 0
