"""Do the tests find faults? Plants them one at a time by the syntax tree, runs the tests of the room, counts.

    python tools/mutations.py --list            the faults of this seed, without running anything
    python tools/mutations.py                   all thirty; each runs the tests of its module until one fails
    python tools/mutations.py --only 3 --seed 2

Works on a copy of the tree in a temporary folder, so that a run that ends early leaves nothing behind. A fault is an
operator, a comparison, a condition or a constant that becomes another one. A failed test counts only if it passes
without the fault. A run that reaches the limit is reported apart: a loop without end, or a slow machine. Exit
status 1 where a fault was not found: look at it, for it may change nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {"method": 8, "scoring": 6, "retrieval": 6, "reid": 5, "photos": 5}
"""How many faults each room gets."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Fault:
    """One change of one file: the text from `start` to `end` becomes `new`."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old!r} -> {self.new!r}"


def changed(node: ast.expr) -> ast.expr | None:
    """The faulty form of an expression; None where there is none."""
    copy = deepcopy(node)
    if isinstance(copy, (ast.BinOp, ast.BoolOp)) and type(copy.op) in SWAPS:
        copy.op = SWAPS[type(copy.op)]()  # type: ignore[assignment]
    elif isinstance(copy, ast.Compare) and type(copy.ops[0]) in SWAPS:
        copy.ops[0] = SWAPS[type(copy.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(copy, ast.IfExp):
        copy.test = ast.UnaryOp(ast.Not(), copy.test)
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, bool):
        copy.value = not copy.value
    elif isinstance(copy, ast.Constant) and isinstance(copy.value, (int, float)):
        if copy.value + 1 == copy.value:  # 3e38, infinity
            return None
        copy.value = copy.value + 1
    else:
        return None
    return copy


def faults(path: Path) -> Iterator[Fault]:
    """Everything in a file that can be changed, outside annotations and texts."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    apart: set[int] = set()
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            apart |= {id(inner) for inner in ast.walk(part)} if isinstance(part, ast.AST) else set()
        if isinstance(node, ast.JoinedStr):
            apart |= {id(inner) for inner in ast.walk(node)}
    starts = [0]  # of lines, in bytes, as the tree counts columns
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in apart and (new := changed(node)) is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            old = source.encode()[start:end].decode()
            yield Fault(str(path.relative_to(ROOT)), node.lineno, start, end, old, f"({ast.unparse(new)})")


def chosen(seed: int) -> list[Fault]:
    """The faults of a seed: in each room as many as `ROOMS` says, each in a module drawn anew."""
    chance, found = random.Random(seed), []
    for room, count in ROOMS.items():
        modules = sorted((ROOT / "src/seps" / room).rglob("*.py"))
        taken: set[tuple[str, int]] = set()
        while len(taken) < count:
            options = list(faults(chance.choice(modules)))
            fault = chance.choice(options) if options else None
            if fault is not None and (fault.path, fault.start) not in taken:
                taken.add((fault.path, fault.start))
                found.append(fault)
    return found


def tests_of(path: str) -> list[str]:
    """The tests that name the module, and those of its room: first the files that name it, then the folder."""
    parts = Path(path).with_suffix("").parts[2:]  # below src/seps
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    names = {"seps." + ".".join(parts)}
    if len(parts) > 1:
        package, module = ".".join(("seps", *parts[:-1])), parts[-1]
        names |= {f"from {package} import {module}"}
    pattern = re.compile("|".join(rf"{re.escape(name)}\b" for name in sorted(names)))
    naming = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if pattern.search(file.read_text())]
    folder = ROOT / "tests" / parts[0]
    inner = folder / parts[1] if len(parts) > 1 and (folder / parts[1]).is_dir() else folder
    files = naming + [file for file in sorted(inner.rglob("test_*.py")) if file not in naming]
    return [str(file.relative_to(ROOT)) for file in files]


def copy_tree(tree: Path) -> None:
    """Copy the files that belong to the repository, without what a working tree has beside them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def run_tests(tree: Path, tests: list[str], limit: float) -> tuple[int, list[str]]:
    """The exit status of the tests, and which functions failed; stops at the first failure."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile=ci"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit)
    # Without the parameters: pytest does not find all names again that it prints.
    return done.returncode, re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)


def verdict(fault: Fault, tree: Path, limit: float) -> str:
    """Plant the fault in a copy of the tree, run its tests, and take it out again.

    "found by ..." where a test fails that passes without the fault; "NOT FOUND"; "NO ANSWER" at the limit. Raises
    `RuntimeError` where the test fails without the fault, too: then the tree is red, and no count means anything.
    """
    place = tree / fault.path
    text = place.read_bytes()
    place.write_bytes(text[: fault.start] + fault.new.encode() + text[fault.end :])
    try:
        status, failed = run_tests(tree, tests_of(fault.path), limit)
    except subprocess.TimeoutExpired:
        return "NO ANSWER"
    finally:
        place.write_bytes(text)
    if status == 0:
        return "NOT FOUND"
    if not failed or run_tests(tree, failed, limit)[0] != 0:
        raise RuntimeError(f"The tests of {fault.path} fail without a fault, too (status {status}): {failed}")
    return f"found by {failed[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the faults and their tests alone")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of some faults")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one fault (%(default)s)")
    options = parser.parse_args()
    planted = list(enumerate(chosen(options.seed), 1))
    if options.only:
        planted = [(number, fault) for number, fault in planted if number in options.only]
    if options.list:
        for number, fault in planted:
            print(f"{number:2} {fault}, {len(tests_of(fault.path))} files of tests")
        return 0
    count = 0
    with tempfile.TemporaryDirectory(prefix="seps-mutations-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for number, fault in planted:
            start = time.monotonic()
            result = verdict(fault, tree, options.limit)
            count += result.startswith("found")
            print(f"{number:2} {time.monotonic() - start:4.0f} s  {fault}: {result}", flush=True)
    print(f"{count} of {len(planted)} faults found (seed {options.seed})")
    return int(count < len(planted))


if __name__ == "__main__":
    sys.exit(main())
