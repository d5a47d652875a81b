"""The docstrings of `method`: shapes of what goes in and out; for modules also the equation and the flow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import seps

PACKAGE = Path(seps.__file__).parent
FILES = sorted((PACKAGE / "method").rglob("*.py"))
SHAPE = re.compile(r"\(([A-Z]|\d+|\.\.\.)(,| or | \+ |_)[^()]*\)|\bscalars?\b|\(rows, \w+")
EQUATION = re.compile(r"\bEq\. \d|`[^`]+ = [^`]+`|^ +\w.* = ", re.MULTILINE)
SEE = re.compile(r"\b(see|as|as in|first three of) `\w+")


def definitions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef, ast.ClassDef | None]]:
    """Public functions, classes and their public methods, with the class they stand in."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node, None
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                    yield f"{node.name}.{part.name}", part, node


ALL = [(path.stem, name, node, owner) for path in FILES for name, node, owner in definitions(path)]


def computes(node: ast.AST) -> bool:
    """Whether a function gives tensors to its caller."""
    return isinstance(node, ast.FunctionDef) and node.returns is not None and "Tensor" in ast.unparse(node.returns)


FUNCTIONS = [pytest.param(node, id=f"{stem}.{name}") for stem, name, node, _ in ALL if computes(node)]
MODULES = [
    pytest.param(node, id=f"{stem}.{name}")
    for stem, name, node, _ in ALL
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "nn.Module" for base in node.bases)
]


def test_the_lists_are_not_empty() -> None:
    assert len(FUNCTIONS) > 50 and len(MODULES) == 13


@pytest.mark.parametrize("node", FUNCTIONS)
def test_a_function_that_computes_names_shapes(node: ast.FunctionDef) -> None:
    text = ast.get_docstring(node) or ""
    assert SHAPE.search(text) or SEE.search(text), text


@pytest.mark.parametrize("node", MODULES)
def test_a_module_has_its_equation_and_the_flow_of_shapes(node: ast.ClassDef) -> None:
    text = ast.get_docstring(node) or ""
    assert EQUATION.search(text), text
    assert "Flow" in text and SHAPE.search(text), text
