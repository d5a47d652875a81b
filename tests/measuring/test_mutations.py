"""tools/mutations.py counts a fault as found only where a test fails because of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutations  # noqa: E402


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one module of two functions, of which one is tested."""
    home = tmp_path / "home"
    (home / "src/seps/method/shared").mkdir(parents=True)
    (home / "tests/method").mkdir(parents=True)
    for package in ("seps", "seps/method", "seps/method/shared"):
        (home / "src" / package / "__init__.py").write_text("")
    (home / "src/seps/method/shared/sums.py").write_text(
        "def add(a, b):\n    return a + b\n\n\ndef limit():\n    return 7\n"
    )
    (home / "tests/method/test_sums.py").write_text(
        "import pytest\nfrom seps.method.shared import sums\n\n\n"
        "@pytest.mark.parametrize('name', ['(a \\\\b)'])\ndef test_add(name):\n    assert sums.add(2, 3) == 5\n"
    )
    (home / "build").mkdir()
    (home / "build/left.py").write_text("")
    (home / ".gitignore").write_text("/build/\n")
    subprocess.run(["git", "init", "-q", str(home)], check=True)
    monkeypatch.setattr(mutations, "ROOT", home)
    copy = tmp_path / "copy"
    mutations.copy_tree(copy)
    return copy


def test_every_file_of_the_repository_is_copied(tree: Path) -> None:
    files = {path.relative_to(tree).as_posix() for path in tree.rglob("*.py")}
    assert {"src/seps/method/shared/sums.py", "tests/method/test_sums.py"} <= files and "build/left.py" not in files


@pytest.mark.slow
def test_a_fault_is_found_or_not_and_a_red_tree_is_an_error(tree: Path) -> None:
    module = mutations.ROOT / "src/seps/method/shared/sums.py"
    add, limit = sorted(mutations.faults(module), key=lambda fault: fault.start)
    assert mutations.verdict(add, tree, 60) == "found by tests/method/test_sums.py::test_add"
    assert mutations.verdict(limit, tree, 60) == "NOT FOUND"
    assert (tree / "src/seps/method/shared/sums.py").read_text() == module.read_text()
    (tree / "tests/method/test_sums.py").write_text("import a_module_that_is_missing\n")
    with pytest.raises(RuntimeError, match="without a fault"):
        mutations.verdict(limit, tree, 60)


def test_a_change_that_leaves_the_value_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("LARGE = 3e38\nSMALL = 3\n")
    assert [fault.old for fault in mutations.faults(tmp_path / "a.py")] == ["3"]
