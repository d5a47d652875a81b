"""What the commands that index say of a run, beside its counts: what is left out, and what could not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from seps.cli.shared.text import counted, list_problems, list_skipped, say

if TYPE_CHECKING:
    from seps.photos.indexing.build import IndexReport


def tell_left_out(report: IndexReport, option: str, again: str = "") -> None:
    """Say on standard error what of the folders is not found, by reason; `option` lists all of it.

    Files that could not be read before either are counted alone where `again`, a command that lists them, is given.
    """
    if report.excluded:
        verb = "is" if report.excluded == 1 else "are"
        say(f"{counted(report.excluded, 'picture')} of the store {verb} excluded: hidden from search, still stored.")
    if report.kept > report.excluded:
        say(f"{report.kept - report.excluded} of the store are kept although their files could not be read.")
    for folder in report.away:
        say(f"{folder} is not there. Is the disk mounted? What the store holds of it stays.")
    told = replace(report, problems=[problem for problem in report.problems if not (again and problem.again)])
    list_problems(told.problems, "could not be indexed", option, told.unread)
    if known := len(report.problems) - len(told.problems):
        has, them = ("has", "it") if known == 1 else ("have", "them")
        say(f"{known} could not be read before and {has} not changed; {again} tries again and lists {them}.")
    what = "description was not used, was cut, or may be out of date"
    if len(report.description_problems) != 1:
        what = what.replace("description was", "descriptions were").replace(", was", ", were")
    list_problems(report.description_problems, what, option)
    list_skipped(report.skipped)
    if is_all_excluded(report):
        say(
            "All pictures are excluded, by --exclude or a file .sepsignore, so there is nothing to search. What the "
            "store held is kept; change the patterns to have it back."
        )


def is_all_excluded(report: IndexReport) -> bool:
    """Whether patterns leave no picture."""
    left = report.new + report.changed + report.moved + report.unchanged
    return not left and any(reason.startswith("excluded") for reason in report.skipped)
