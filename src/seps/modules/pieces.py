"""A module taken apart into its definitions, so that a file can hold those alone that its classes need."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .contents import BundleError
from .slim import span


class Piece(NamedTuple):
    """A definition at the top of a module, with the comments above it: what it defines, what it uses, its text."""

    names: tuple[str, ...]
    uses: frozenset[str]
    text: str
    is_code: bool
    """A function or class, and not a value."""


def pieces(source: str, module: str) -> list[Piece]:
    """The definitions of a module in the order of its lines, without its head and imports."""
    lines = source.splitlines(keepends=True)
    found: list[Piece] = []
    body = ast.parse(source).body
    for place, node in enumerate(body):
        if isinstance(node, ast.Import | ast.ImportFrom) or (place == 0 and _is_text(node)):
            continue
        first, last = span(node)
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
        text = "".join(lines[first - 1 : last])
        if _is_text(node):  # the docstring of the value above it
            found[-1] = found[-1]._replace(text=found[-1].text + text)
            continue
        names = tuple(_defined(node))
        if not names:
            raise BundleError(f"{module}, line {node.lineno}: a single file has no place for {text.splitlines()[0]!r}.")
        uses = frozenset(name for part in ast.walk(node) for name in _used(part))
        found.append(Piece(names, uses, text, isinstance(node, ast.FunctionDef | ast.ClassDef)))
    return found


def needed(pieces_by_name: Mapping[str, Piece], roots: Iterable[str]) -> set[str]:
    """The roots and all names that these use. Raises `BundleError` for a root that is not there."""
    open_ends, found = list(roots), set()
    for name in open_ends:
        if name not in pieces_by_name:
            raise BundleError(f"No module of the single file defines {name}.")
        if name not in found:
            found.add(name)
            open_ends += [use for use in pieces_by_name[name].uses if use in pieces_by_name]
    return found


def imports_of(source: str, module: str) -> list[ast.Import | ast.ImportFrom]:
    """What a module imports from outside. Raises `BundleError` where it renames what comes from inside."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.parse(source).body:
        match node:
            case ast.ImportFrom() if (node.module or "").split(".")[0] in ("seps", "__future__"):
                renamed = [alias.name for alias in node.names if alias.asname]
                if renamed:
                    raise BundleError(f"{module} renames {renamed} on import; a single file cannot.")
            case ast.Import() | ast.ImportFrom():
                found.append(node)
    return found


def merged_imports(imports: Iterable[ast.Import | ast.ImportFrom], text: str) -> str:
    """One line for each module, of the names that `text` uses."""
    used = {name for node in ast.walk(ast.parse(text)) for name in _used(node)}
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in imports:
        for alias in node.names:
            if (alias.asname or alias.name.split(".")[0]) not in used:
                continue
            if isinstance(node, ast.Import):
                plain.add(ast.unparse(ast.Import([alias])))
            else:
                # Those of collections.abc take no brackets at run time before Python 3.9.
                module = "typing" if node.module == "collections.abc" else node.module or ""
                names.setdefault(module, set()).add(ast.unparse(alias))
    listed = [f"from {module} import {', '.join(sorted(parts))}" for module, parts in sorted(names.items())]
    return "\n".join([*sorted(plain), *listed])


def _is_text(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Assign(targets=targets):
            yield from (name for target in targets for name in _used(target))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in node.names)
        case ast.If():
            for part in (*node.body, *node.orelse):
                yield from _defined(part)


def _used(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name):
            yield name
