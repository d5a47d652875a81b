"""Which tests may be skipped where every test must run, and the plugin that fails the run for any other skip.

Active with `--no-skips`, and where CI is set (`CI=true`). It works with pytest-xdist: the reports of the workers reach
the process that ends the run.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

ALLOWED: tuple[tuple[str, str], ...] = (
    (r"^tests/metrics/test_metrics_\w+\.py::test_gpu_equals_cpu$", "needs a GPU"),
    (r"^tests/scoring/gpu/test_scoring_kernels\.py::", "needs a GPU"),
)
"""(pattern of the test's id, the reason it gives): both must match. Keep it short; a test that can run has no place."""
FAILED_BY_SKIPS = 1


def allowed(test: str, reason: str) -> bool:
    """Whether this skip is in the list."""
    return any(re.search(pattern, test) and why in reason for pattern, why in ALLOWED)


def wanted(config: pytest.Config) -> bool:
    """Whether unlisted skips fail this run."""
    return bool(config.getoption("--no-skips")) or os.environ.get("CI", "").lower() in ("1", "true", "yes")


def report_untested(terminalreporter: Any) -> None:
    """One line at the end of the run where the page was not tested in a browser."""
    skipped = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
    files = {name.partition("::")[0] for name in skipped if name.startswith("tests/e2e/")}
    if files:
        terminalreporter.line(
            f"The page was NOT tested in a browser, {len(files)} files of tests/e2e were skipped: "
            "apt-get install chromium; pip install playwright",
            yellow=True,
        )


class NoSkips:
    """Collects skips and turns the run red at its end where one is not in the list."""

    def __init__(self) -> None:
        self.unlisted: list[tuple[str, str]] = []

    def _note(self, report: Any) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not allowed(report.nodeid, reason) and (report.nodeid, reason) not in self.unlisted:
            self.unlisted.append((report.nodeid, reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that was skipped."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A whole file that was skipped."""
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run that was green until here."""
        if self.unlisted and exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = FAILED_BY_SKIPS

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say which."""
        if not self.unlisted:
            return
        terminalreporter.section("skipped, but not in the list of tests/skips.py", red=True)
        for test, reason in self.unlisted:
            terminalreporter.line(f"{test}: {reason}")
        terminalreporter.line("Install what they need, or add them to the list with the reason.")
