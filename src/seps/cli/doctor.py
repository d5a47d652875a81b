"""`seps doctor`: what is installed, what of it works, what is missing and how to get it.

Exit status 0 when the core works and nothing installed is broken, 1 otherwise.
"""

from __future__ import annotations

import argparse

from seps.cli.shared.parser import Parser
from seps.cli.shared.text import print_json, printable
from seps.doctor import Report, examine


def add_options(parser: Parser) -> None:
    """The options of `seps doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Examine and print."""
    report = examine()
    if options.json:
        print_json(report.as_dict())
    else:
        # Plain text: the package that draws tables may be the one that is missing.
        print("\n".join(report_lines(report)))
    return 0 if report.ok else 1


def report_lines(report: Report) -> list[str]:
    """Results, packages by extra, and the commands that help."""
    lines = [f"seps {report.version}, Python {report.python}, {report.platform}", ""]
    lines += [f"{result.check:<20} {result.status:<8} {printable(result.detail)}" for result in report.findings]
    lines += ["", *(["Packages:"] if report.packages else [])]
    for extra in dict.fromkeys(package.extra for package in report.packages if package.extra not in ("dev", "docs")):
        asked = [package for package in report.packages if package.extra == extra]
        here = ", ".join(f"{package.name} {package.version}" for package in asked if package.version)
        absent = ", ".join(f"{package.name}{package.wanted}" for package in asked if not package.version)
        lines.append(f"  {extra or '(always)':<12} {here}{f'  (not installed: {absent})' if absent else ''}")
    lines.append("Everything that is installed works." if report.ok else f"Broken: {', '.join(report.failed)}.")
    remedies = [f"  {command}" for command in report.remedies()]
    return [*lines, *(["To get or repair the rest:", *remedies] if remedies else [])]
