"""The slim style: a module's source without checks of arguments, and without what both modes never use.

Both modes have no padding among the patches and a fixed number of kept ones. A condition of `_NEVER` is false there and
one of `_ALWAYS` true, and the arguments of `_UNUSED` have no value, so that all of these leave the source.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_CHECK = re.compile("_?check_")
"""How the functions and methods begin that only check arguments."""
_NOTE = re.compile(r"\s*# (?!Steps? |\(|each |-, )")
"""Comments on lines of their own that are no step and no shape."""
_NEVER = {
    "valid is not None",
    "valid_BN is not None",
    "valid_XN is not None",
    "fixed_BN is not None",
    "self.decision == 'binary'",
    "decision == 'binary'",
    "not isinstance(embed_size, int)",
    "sample",
    "self.decision == 'gumbel'",
    "torch.onnx.is_in_onnx_export()",
    "not (is_compiling() or torch.onnx.is_in_onnx_export())",
}
_ALWAYS = {"valid is None", "valid_BN is None", "valid_XN is None", "not full"}
_UNUSED = {"valid", "valid_BN", "valid_XN", "fixed_BN", "generator", "full_score", "full", "sample", "allow_empty"}
_WIDTH = 120
Span = tuple[int, int]


def slim(source: str) -> str:
    """The source in the slim style, with its comments and shapes."""
    source = "".join(line for line in source.splitlines(keepends=True) if not _NOTE.match(line))
    source = _cut(source, list(_checks(ast.parse(source).body)))
    source = _repeat(source, _without_branch)
    source = _cut(source, list(_dead(ast.parse(source))))
    source = _repeat(source, _without_choice)
    source = _repeat(source, _without_argument)
    return _joined(source)


def without_methods(source: str, left_out: frozenset[str]) -> str:
    """The source without the methods of those dotted names."""
    spans = []
    for node in ast.parse(source).body:
        for part in getattr(node, "body", []):
            match node, part:
                case ast.ClassDef(name=owner), ast.FunctionDef(name=name) if f"{owner}.{name}" in left_out:
                    spans.append(span(part))
    return _cut(source, spans)


def span(node: ast.stmt) -> Span:
    """The first and the last line of a statement, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(part.lineno for part in decorators)]), node.end_lineno or node.lineno


def _checks(body: Sequence[ast.stmt]) -> Iterator[Span]:
    for node in body:
        if _only_checks(node):
            yield span(node)
        else:
            for part in ("body", "orelse"):
                yield from _checks(getattr(node, part, []))


def _only_checks(node: ast.stmt) -> bool:
    match node:
        case ast.FunctionDef(name=name):
            return bool(_CHECK.match(name))
        case ast.If(body=body, orelse=[]) | ast.For(body=body, orelse=[]):
            return all(map(_only_checks, body))
        case ast.Raise(exc=ast.expr() as raised):
            return ast.unparse(raised).startswith("InputError(")
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return bool(_CHECK.match(name))
    return False


def _cut(source: str, spans: Sequence[Span]) -> str:
    lines = source.splitlines(keepends=True)
    for first, last in sorted(spans, reverse=True):
        while last < len(lines) and not lines[last].strip() and first > 1 and not lines[first - 2].strip():
            last += 1  # the blank lines that follow, where others stand in front
        del lines[first - 1 : last]
    return "".join(lines)


def _repeat(source: str, change: Callable[[str], str | None]) -> str:
    """The source after `change` as often as it finds something."""
    while (changed := change(source)) is not None:
        source = changed
    return source


def _without_branch(source: str) -> str | None:
    """One `if` of a known condition less: its lines go, or those of its body stay."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.If(test=test) if (known := _known(test)) is not None:
                chosen = node.body if known else node.orelse
            case _:
                continue
        first, last = span(node)
        kept: list[str] = []
        if chosen:
            start, end = chosen[0].lineno, chosen[-1].end_lineno or 0
            while lines[start - 2].lstrip().startswith("#"):
                start -= 1
            kept = [
                line.replace("elif ", "if ", 1) if i == 0 else line for i, line in enumerate(lines[start - 1 : end])
            ]
            deeper = chosen[0].col_offset - node.col_offset
            kept = [line[deeper:] for line in kept]
        return "".join([*lines[: first - 1], *kept, *lines[last:]])
    return None


def _known(test: ast.expr) -> bool | None:
    said = ast.unparse(test)
    return False if said in _NEVER else True if said in _ALWAYS else None


def _dead(tree: ast.AST) -> Iterator[Span]:
    """The statements behind a `return`."""
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [*before, ast.stmt()] as body:
                dead = next((i for i, statement in enumerate(before, 1) if type(statement) is ast.Return), None)
                if dead is not None:
                    yield span(body[dead])[0], span(body[-1])[1]


def _without_choice(source: str) -> str | None:
    """One `a if ... else b` of a known condition less."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.IfExp(test=test) if (known := _known(test)) is not None:
                chosen = node.body if known else node.orelse
                return _put(source, node, ast.get_source_segment(source, chosen) or "")
            case ast.keyword(value=value) if (known := _known(value)) is not None:
                return _put(source, value, str(known))
    return None


def _put(source: str, node: ast.expr, text: str) -> str:
    start, end = _places(source, node)
    return source[:start] + text + source[end:]


def _places(source: str, node: Any) -> Span:
    """Where a node begins and ends in the source."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(row: int, column: int) -> int:
        return starts[row - 1] + len(lines[row - 1].encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)


def _without_argument(source: str) -> str | None:
    """One parameter or argument less that has no value."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef():
                arguments = [*node.args.args, *node.args.kwonlyargs]
                defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + [*node.args.defaults]
                for argument, default in zip(arguments, [*defaults, *node.args.kw_defaults], strict=True):
                    if argument.arg in _UNUSED:
                        start, end = _places(source, argument)
                        return _without(source, start, _places(source, default)[1] if default else end)
            case ast.Call():
                for part in [*node.args, *node.keywords]:
                    match part:
                        case ast.keyword(arg=name) if name in _UNUSED:
                            return _without(source, *_places(source, part))
                        case ast.Name(id=name) | ast.keyword(value=ast.Name(id=name)) if name in _UNUSED:
                            return _without(source, *_places(source, part))
    return None


def _without(source: str, start: int, end: int) -> str:
    """The source without an argument and the comma at it."""
    after = re.match(r",\s*", source[end:])
    if after:
        return source[:start] + source[end + after.end() :]
    return re.sub(r",\s*\*?,?\s*$", "", source[:start]) + source[end:]


def _joined(source: str) -> str:
    """Statements and heads of functions of several lines on one line where they fit, and else filled lines."""
    lines = source.splitlines()
    comments = _comments(source)
    for node in sorted(ast.walk(ast.parse(source)), key=lambda part: -getattr(part, "lineno", 0)):
        is_function = False
        match node:
            case ast.FunctionDef():
                is_function = True
                first, last = node.lineno, max(node.lineno, node.body[0].lineno - 1)
                while last > first and not lines[last - 1].rstrip().endswith(":"):
                    last -= 1
            case ast.Return() | ast.Assign() | ast.Expr() | ast.AnnAssign():
                first, last = node.lineno, node.end_lineno or node.lineno
            case _:
                continue
        inside = [comments[row] for row in range(first, last + 1) if row in comments]
        if first == last or len(inside) > 1 or '"""' in lines[first - 1]:
            continue
        indent = lines[first - 1][: node.col_offset]
        code = [
            line[: comments[row][0]] if row in comments else line
            for row, line in enumerate(lines[first - 1 : last], first)
        ]
        text = " ".join(line.strip() for line in code)
        text = re.sub(r",? ([)\]}])", r"\1", re.sub(r"([(\[{]) ", r"\1", text))
        beside = f"  {inside[0][1]}" if inside else ""
        if len(indent + text + beside) <= _WIDTH:
            lines[first - 1 : last] = [indent + text + beside]
        elif is_function:
            lines[first - 1 : last] = _filled(indent, text)
    return "\n".join(lines) + "\n"


def _filled(indent: str, text: str) -> list[str]:
    """The head of a function with its parameters in filled lines."""
    start, _, rest = text.partition("(")
    inner, _, end = rest.rpartition(") ->")
    rows, row = [], ""
    for part in re.split(r", (?=[*\w]+(?::|=|,|$)|\*,|\*\w)", inner):
        if row and len(f"{indent}    {row}, {part},") > _WIDTH:
            rows.append(f"{indent}    {row},")
            row = part
        else:
            row = f"{row}, {part}" if row else part
    return [f"{indent}{start}(", *rows, f"{indent}    {row}", f"{indent}) ->{end}"]


def _comments(source: str) -> dict[int, tuple[int, str]]:
    """By line the column and the text of the comment behind its code."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = (token.start[1], token.string)
    return found
