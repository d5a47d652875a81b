"""Shape comments read from source files; `shape_comments` has their grammar, and compares them with running code."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Shape = list[str] | None
"""The axes of a shape; None for "-"."""
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
_ALLOWED = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Name, ast.Load, ast.Constant)


class Unreadable(ValueError):
    """A comment that begins like a shape and is none."""


def split(text: str, separator: str = ",") -> list[str]:
    """The parts of `text` between separators that stand outside of parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == separator and not depth:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise Unreadable("parentheses do not match")
    return [part.strip() for part in parts]


def parse_shape(text: str) -> Shape:
    """`(B, N + 1)` -> ["B", "N + 1"]."""
    if text == "-":
        return None
    if not (text.startswith("(") and text.endswith(")")):
        raise Unreadable(f"{text!r} is not a shape")
    axes = [axis for axis in split(text[1:-1]) if axis]
    for place, axis in enumerate(axes):
        if axis == "...":
            if place:
                raise Unreadable("'...' stands in front alone")
            continue
        for one in axis.split(" or "):
            try:
                nodes = list(ast.walk(ast.parse(one, mode="eval")))
            except SyntaxError as error:
                raise Unreadable(f"{one!r} is not an axis") from error
            names = [node.id for node in nodes if isinstance(node, ast.Name)]
            letters = all(len(name) == 1 and name.isupper() for name in names)
            if not letters or not all(isinstance(node, _ALLOWED) for node in nodes):
                raise Unreadable(f"{one!r} is not an axis")
    return axes


@dataclass
class Comment:
    """A parsed comment."""

    text: str
    inputs: list[Shape]
    results: list[Shape]
    each: bool
    more: bool


def parse_comment(text: str) -> Comment | None:
    """The shapes of a comment, None if it is none of shapes; raises `Unreadable` if it only begins like one."""
    text = text.lstrip("#").strip()
    if not text.startswith(("(", "each (", "-, (")):
        return None
    shapes = split(text, ":")[0]
    before, arrow, after = shapes.rpartition("->")
    each = after.strip().startswith("each ")
    results = split(after.strip().removeprefix("each "))
    more = results[-1] == "..."
    inputs = [parse_shape(part) for part in split(before)] if arrow else []
    if each and len(results) > 1:
        raise Unreadable("'each' takes one shape")
    return Comment(text, inputs, [parse_shape(part) for part in results[: len(results) - more]], each, more)


@dataclass
class Statement:
    """A statement that gives names a value, or returns one."""

    place: str
    node: ast.stmt
    value: ast.expr
    comment: Comment | None = None
    compared: int = 0
    makes_tensor: bool = False

    @property
    def names(self) -> list[str]:
        """The names it binds; none for `return`."""
        if isinstance(self.node, ast.Return):
            return []
        targets = self.node.targets if isinstance(self.node, ast.Assign) else [self.node.target]
        first = targets[0]
        parts = first.elts if isinstance(first, ast.Tuple) else [first]
        return [part.id for part in parts if isinstance(part, ast.Name)]

    @property
    def alias(self) -> bool:
        """Whether it only gives a tensor another name, or returns what already has one."""
        return isinstance(self.value, ast.Name | ast.Attribute)

    def reads(self) -> list[ast.expr]:
        """Names, attributes and subscripts in its right side, without calls inside."""
        kinds = ast.Name | ast.Attribute | ast.Subscript
        found = [node for node in ast.walk(self.value) if isinstance(node, kinds)]
        return [node for node in found if not any(isinstance(part, ast.Call) for part in ast.walk(node))]


class Source:
    """The statements of one file, by line, and what is wrong with its comments as text."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        text = self.path.read_text(encoding="utf-8")
        self.problems: list[str] = []
        self.statements: list[Statement] = []
        self.at: dict[int, Statement] = {}
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                for node in self._simple(function.body):
                    self._add(node)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                self._attach(token)

    def __str__(self) -> str:
        return self.path.name

    @property
    def letters(self) -> set[str]:
        """All letters in its comments."""
        comments = [statement.comment for statement in self.statements if statement.comment]
        shapes = [shape for comment in comments for shape in (*comment.inputs, *comment.results) if shape]
        return {letter for shape in shapes for axis in shape for letter in axis if letter.isupper()}

    def _simple(self, body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
        for node in body:
            if isinstance(node, _SIMPLE):
                yield node
            elif not isinstance(node, ast.FunctionDef | ast.ClassDef):
                for part in ("body", "orelse", "finalbody"):
                    yield from self._simple(getattr(node, part, []))

    def _add(self, node: ast.stmt) -> None:
        value = getattr(node, "value", None)
        if value is None:
            return
        statement = Statement(f"{self.path.name}:{node.lineno}", node, value)
        if isinstance(node, ast.Return) or statement.names:
            self.statements.append(statement)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                self.at[line] = statement

    def _attach(self, token: tokenize.TokenInfo) -> None:
        line, place = token.start[0], f"{self.path.name}:{token.start[0]}"
        try:
            comment = parse_comment(token.string)
        except Unreadable as error:
            self.problems.append(f"{place}: {token.string}: {error}")
            return
        if comment is None:
            return
        alone = not token.line[: token.start[1]].strip()
        statement = self.at.get(line + 1 if alone and line not in self.at else line)
        lines = (
            () if statement is None else (statement.node.lineno - 1, statement.node.lineno, statement.node.end_lineno)
        )
        if statement is None or line not in lines or statement.comment:
            self.problems.append(f"{place}: {token.string}: it stands at no assignment or return")
            return
        statement.comment = comment
