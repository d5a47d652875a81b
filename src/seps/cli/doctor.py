"""`seps doctor`: print which parts work, which are missing, and how to install them.

Exit status 0 when the core works and nothing installed is broken, 1 otherwise.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import asdict

import seps
from seps.cli.shared.parser import Parser
from seps.cli.shared.text import print_json, printable
from seps.doctor import CheckResult, examine, failed
from seps.extras import install_command

WITHOUT_TORCH = (
    "Without torch it searches by `base` with one vector per picture; patches, explanations, training and other models "
    f"need torch: {install_command('torch')}"
)


def add_options(parser: Parser) -> None:
    """The options of `seps doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Examine and print."""
    results = examine()
    if options.json:
        about = {"version": seps.__version__, "python": platform.python_version(), "platform": platform.platform()}
        print_json({**about, "findings": [asdict(result) for result in results], "ok": not failed(results)})
    else:
        # Plain text: the package that draws tables may be the one that is missing.
        print("\n".join(report_lines(results)))
    return 1 if failed(results) else 0


def report_lines(results: Sequence[CheckResult]) -> list[str]:
    """Results, what the installation can do, and the commands that help."""
    lines = [f"seps {seps.__version__}, Python {platform.python_version()}, {platform.platform()}", ""]
    lines += [f"{result.check:<20} {result.status:<8} {printable(result.detail)}" for result in results]
    broken = ", ".join(failed(results))
    remedies = dict.fromkeys(f"  {result.remedy}" for result in results if result.remedy)
    lines += ["", f"Broken: {broken}." if broken else "Everything that is installed works."]
    if any(result.check == "torch" and result.status == "missing" for result in results):
        lines.append(WITHOUT_TORCH)
    return [*lines, *(["To get or repair the rest:", *remedies] if remedies else [])]
