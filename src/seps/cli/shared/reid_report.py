"""`seps reid report`: several seeds of one or more sets, beside the figures of the papers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from seps.cli.shared.argtypes import default_device, device, input_file, non_negative, output_folder
from seps.cli.shared.errors import EXIT_INTERRUPTED
from seps.cli.shared.outputs import check_output, check_picture, save_picture, write_output
from seps.cli.shared.parser import add_plugins
from seps.cli.shared.text import print_json, printable, say
from seps.reid.config import ReidConfig

JSON, MARKDOWN, PICTURE = "report.json", "report.md", "report.png"


def add_report(commands: Any) -> None:
    """Put `report` beside the other sub-commands."""
    report = commands.add_parser(
        "report", help="train several seeds; the papers' figures, ours and the difference", settings=ReidConfig
    )
    report.add_argument(
        "--config",
        type=input_file,
        action="append",
        required=True,
        help="read settings from this YAML file; repeat the option for more sets",
    )
    report.add_argument(
        "--seeds", type=non_negative, nargs="+", default=[0, 1, 2], help="train with these seeds (default: 0 1 2)"
    )
    report.add_argument("--out", type=output_folder, required=True, help="write the runs and the report to this folder")
    report.add_argument("--missing", action="store_true", help="evaluate every set of missing sensors, too")
    report.add_argument("--figures", type=input_file, help="add the figures of more papers from this JSON file")
    report.add_argument("--device", type=device, help="compute on cpu, cuda or cuda:1 (default: a GPU if there is one)")
    add_plugins(report)
    report.add_argument("--json", action="store_true", help="print the rows as JSON")
    report.set_defaults(action=_report)


def _report(options: argparse.Namespace) -> int:
    from seps import settings
    from seps.cli.shared.progress import training_progress
    from seps.files import write_text
    from seps.reid.report import PUBLISHED, Plan, joined, markdown, picture, read_figures, rows_of, run_seeds

    out = Path(options.out)
    check_output(out / JSON, "--out", "seps_reid_report")
    check_picture(out / PICTURE, "--out")
    names = [Path(config).stem for config in options.config]
    if len(set(names)) != len(names) or len(set(options.seeds)) != len(options.seeds):
        raise ValueError("Each --config needs another file name, and each of --seeds another number.")
    plans = [
        Plan(name, settings.load(ReidConfig, config, options.settings))
        for name, config in zip(names, options.config, strict=True)
    ]
    published = joined(PUBLISHED, read_figures(Path(options.figures)) if options.figures else {})
    finished = run_seeds(
        plans,
        options.seeds,
        out,
        missing=options.missing,
        device=options.device or default_device(),
        progress=training_progress(),
        log=say,
    )
    rows = rows_of(finished, published)
    whole = len(finished) == len(plans) * len(options.seeds)
    if finished:
        write_output(out / JSON, {"seps_reid_report": 1, "seeds": finished, "table": [row.cells() for row in rows]})
        write_text(out / MARKDOWN, markdown(finished, rows, plans))
        save_picture(picture(rows), out / PICTURE)
    if options.json:
        print_json([{**vars(row), "mean": row.mean, "deviation": row.deviation} for row in rows])
    else:
        _print_table([row.cells() for row in rows])
        seconds = sum(seed["seconds"] for seed in finished)
        print(f"{len(finished)} of {len(plans) * len(options.seeds)} runs are finished; {seconds:.0f} s of training.")
        for name in (MARKDOWN, PICTURE) if finished else ():
            print(printable(out / name))
    if not whole:
        say("The report was interrupted: the same command continues it.")
    return 0 if whole else EXIT_INTERRUPTED


def _print_table(rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from seps.reid.report import HEAD

    table = Table()
    for name in HEAD:
        table.add_column(name, justify="left" if name in HEAD[:4] else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)
