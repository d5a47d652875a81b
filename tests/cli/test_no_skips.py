"""A skip that is not in the list turns a run red, in one process and in several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skips import ALLOWED, allowed

TESTS = Path(__file__).parents[1]
CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
from skips import NoSkips, report_untested as pytest_terminal_summary, wanted

def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true")

def pytest_configure(config):
    if wanted(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NoSkips())
"""
ONE = "import pytest\ndef test_a():\n    pass\n@pytest.mark.skip(reason='no browser')\ndef test_b():\n    pass\n"
WHOLE = "import pytest\npytest.importorskip('no_such_package')\ndef test_a():\n    pass\n"
EXPECTED = "import pytest\n@pytest.mark.xfail(reason='later')\ndef test_a():\n    assert False\n"
LISTED = "import pytest\n@pytest.mark.skip(reason='needs a GPU')\ndef test_gpu_equals_cpu():\n    pass\n"


def ran(folder: Path, *options: str, ci: str = "") -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CI"))}
    variables |= {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    return subprocess.run(
        [*command, str(folder)], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(TESTS)))
    (tmp_path / "test_expected.py").write_text(EXPECTED)
    (tmp_path / "tests" / "metrics").mkdir(parents=True)
    (tmp_path / "tests" / "metrics" / "test_metrics_x.py").write_text(LISTED)
    return tmp_path


def test_an_unlisted_skip_turns_the_run_red(suite: Path) -> None:
    (suite / "test_one.py").write_text(ONE)
    assert ran(suite).returncode == 0  # a developer without the package is not kept from working
    told = ran(suite, "--no-skips")
    assert told.returncode == 1 and "test_one.py::test_b: " in told.stdout and "no browser" in told.stdout
    (suite / "test_one.py").write_text(WHOLE)
    told = ran(suite, "-p", "xdist", "-n", "1", ci="true")
    assert told.returncode == 1 and "not in the list" in told.stdout and "no_such_package" in told.stdout


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_a_run_without_a_browser_says_so_at_its_end(suite: Path, options: tuple[str, ...]) -> None:
    (suite / "tests" / "e2e").mkdir()
    assert "browser" not in ran(suite, *options).stdout
    (suite / "tests" / "e2e" / "test_page.py").write_text(WHOLE)
    done = ran(suite, *options)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines()[-4:] if "browser" in line and "chromium" in line]


def test_expected_failures_and_listed_skips_stay_green(suite: Path) -> None:
    done = ran(suite, ci="true")
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout and "1 xfailed" in done.stdout


def test_the_list_is_short_and_every_entry_is_a_test_that_is_there() -> None:
    assert len(ALLOWED) <= 6
    for pattern, why in ALLOWED:
        start = re.match(r"\^tests/(\w+)/", pattern)
        assert start and why
        names = {file: f"tests/{file.relative_to(TESTS).as_posix()}" for file in (TESTS / start[1]).rglob("test_*.py")}
        found = [file for file, name in names.items() if re.search(pattern.split("::")[0] + "$", name)]
        assert found and all(why in file.read_text() for file in found), pattern
    assert not allowed("tests/e2e/test_page.py", "no Chromium is installed")
    assert not allowed("tests/metrics/test_metrics_reid.py::test_gpu_equals_cpu", "another reason")
