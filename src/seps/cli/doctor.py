"""`seps doctor`: what is installed, what of it works, what is missing and how to get it.

Exit status 0 when the core works and nothing installed is broken, 1 otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from seps.cli.shared.parser import Parser
from seps.cli.shared.text import print_json, printable
from seps.doctor import Report, examine

_DEVELOPERS = ("dev", "docs")
_SIGNS = {"ok": "[green]works[/]", "missing": "[yellow]not there[/]", "broken": "[bold red]broken[/]"}


def build_parser() -> argparse.ArgumentParser:
    """The options of `seps doctor`."""
    parser = Parser("seps doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Examine and print."""
    options = build_parser().parse_args(arguments)
    report = examine()
    if options.json:
        print_json(report.as_dict())
    else:
        try:
            _show(report)
        except ImportError:  # the tables need a package that may be what is missing
            print("\n".join(plain_lines(report)))
    return 0 if report.ok else 1


def plain_lines(report: Report) -> list[str]:
    """The report without colours and frames."""
    lines = [f"seps {report.version}, Python {report.python}, {report.platform}"]
    lines += [f"{finding.check:<20} {finding.status:<8} {printable(finding.detail)}" for finding in report.findings]
    return [*lines, *advice(report)]


def advice(report: Report) -> list[str]:
    """The closing sentences, with the commands that help."""
    broken = [finding.check for finding in report.findings if finding.status == "broken"]
    needed = [finding.check for finding in report.findings if finding.status == "missing" and not finding.extra]
    ending = "Everything that is installed works."
    if not report.ok:
        ending = f"Broken: {', '.join([*broken, *needed])}."
    remedies = [f"  {command}" for command in report.remedies()]
    return [ending, *(["To get or repair the rest:", *remedies] if remedies else [])]


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(f"seps {report.version}, Python {report.python}, {report.platform}", highlight=False)
    table = Table(title="What works")
    for name in ("part", "", "what was tried, and found"):
        table.add_column(name)
    for finding in report.findings:
        table.add_row(finding.check, _SIGNS[finding.status], escape(printable(finding.detail)))
    console.print(table)
    if report.packages:
        table = Table(title="Packages")
        table.add_column("extra")
        table.add_column("installed")
        table.add_column("not installed")
        extras = dict.fromkeys(package.extra for package in report.packages if package.extra not in _DEVELOPERS)
        for extra in extras:
            asked = [package for package in report.packages if package.extra == extra]
            here = ", ".join(f"{package.name} {package.version}" for package in asked if package.version)
            absent = ", ".join(f"{package.name}{package.wanted}" for package in asked if not package.version)
            table.add_row(extra or "(always)", escape(here), escape(absent))
        console.print(table)
    for line in advice(report):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
