"""The four single files run on torch 1.13 (Debian's `python3-torch`) and use nothing newer than Python 3.8.

By hand in another environment, as with Python 3.8: `SEPS_OLD_PYTHON=/path/to/python pytest THIS_FILE`.
"""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from single_files import VARIANTS, text_of

OLD_PYTHON = os.environ.get("SEPS_OLD_PYTHON", "/usr/bin/python3")
RUN_ALL = """
import runpy, sys, warnings

warnings.simplefilter("error")
for name in sys.argv[1:]:
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        print(name, "status", end.code)
"""


def version_there() -> str:
    """Of torch in the old Python, or why there is none."""
    try:
        done = subprocess.run(
            [OLD_PYTHON, "-I", "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
        )
    except OSError as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_files_pass_with_torch_1_13(tmp_path: Path) -> None:
    found = version_there()
    if not found.startswith("1.13."):
        pytest.skip(f"needs torch 1.13 in {OLD_PYTHON} (found: {found}): apt-get install python3-torch")
    for variant in VARIANTS:
        (tmp_path / f"{variant}.py").write_text(text_of(variant), encoding="utf-8")
    files = [f"{variant}.py" for variant in VARIANTS]
    done = subprocess.run([OLD_PYTHON, "-I", "-c", RUN_ALL, *files], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    assert [line for line in done.stdout.splitlines() if "status" in line] == [f"{name} status 0" for name in files]
    assert "FAILED" not in done.stdout and done.stdout.count("torch 1.13.") == len(files)


NEWER = {"removeprefix", "removesuffix", "pairwise", "batched", "is_relative_to", "bit_count", "cache"}
"""Names of the standard library that came after Python 3.8."""


def newer_than_3_8(text: str) -> list[str]:
    """What Python 3.8 has not, outside annotations (which no version evaluates here), with its line."""
    tree = ast.parse(text, feature_version=(3, 8))
    annotations = set()
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            annotations |= {id(inner) for inner in ast.walk(part)} if part is not None else set()
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "") in ("collections", "collections.abc", "contextlib")
        for alias in node.names
    }
    generic = imported | {"dict", "frozenset", "list", "set", "tuple", "type"}
    found = []
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        named = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(node, ast.keyword) and node.arg in ("strict", "kw_only", "slots"):
            found.append(f"{node.value.lineno}: {node.arg}=")
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in generic:
            found.append(f"{node.lineno}: {node.value.id}[...]")
        elif (
            isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr) and isinstance(node.value, ast.DictComp)
        ):
            found.append(f"{node.lineno}: dict |=")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and isinstance(node.left, ast.Dict):
            found.append(f"{node.lineno}: dict |")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            found += [f"{node.lineno}: isinstance |"] * isinstance(node.args[1], ast.BinOp)
        elif named in NEWER:
            found.append(f"{node.lineno}: {named}")
    return found


def test_python_3_8_has_every_word_of_the_file() -> None:
    assert newer_than_3_8(text_of(VARIANTS[0])) == []


@pytest.mark.parametrize(
    "planted",
    [
        "for a, b in zip(x, y, strict=True): pass",
        "from collections.abc import Callable\nPart = Callable[..., int]",
        "weights |= {n: 1 for n in x}",
        "isinstance(x, int | str)",
        "x.removeprefix('a')",
        "Rows = list[int]",
    ],
)
def test_newer_words_are_seen(planted: str) -> None:
    assert newer_than_3_8(planted)
