"""Shape comments as assertions: read them from source files, run the code, compare each with the tensor it names.

The grammar of a comment behind a statement::

    comment  = [inputs "->"] results [": " any words]
    inputs   = shape {", " shape}      each is the shape of a tensor that the statement reads
    results  = ["each "] shape {", " shape} [", ..."]
    shape    = "(" axis {", " axis} ")"    or "()" for a scalar, or "-" for a value that is no tensor
    axis     = a capital letter, a number, a sum or product of these, "...", or alternatives: "B or 1"

It belongs to `name = ...`, `a, b = ...` or `return ...`, and stands on the first or the last line of the statement, or
alone on the line above it. Several results belong to the values of a tuple; ", ..." says that more may follow. With
"each" the one shape belongs to all tensors of a list, tuple or dict. As an axis, "..." stands for any axes in front.
None is not compared.

A letter belongs to one call: its first use binds it, each further use must agree. Sums are compared at the end of the
call, when their letters are bound; a single free letter in one is solved for. A parameter's suffix binds too:
`patches_BNC` has the shape (B, N, C), where an axis of size 1 may stand for any size, and X in front for any axes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from shape_source import Shape, Source, Statement


@dataclass
class Call:
    """What is known of one running call."""

    sizes: dict[str, int] = field(default_factory=dict)
    later: list[tuple[Statement, str, int]] = field(default_factory=list)
    pending: Statement | None = None
    returning: Statement | None = None
    inputs: list[tuple[int, ...]] = field(default_factory=list)

    def fits(self, axis: str, size: int, statement: Statement) -> bool:
        """Whether an axis has this size; binds a free letter, and puts sums aside until all letters are bound."""
        options = axis.split(" or ")
        if str(size) in options or any(self.sizes.get(option) == size for option in options):
            return True
        for option in options:
            if option.isalpha() and option not in self.sizes:
                self.sizes[option] = size
                return True
            if not option.isalpha() and not option.isdigit():
                self.later.append((statement, option, size))
                return True
        return False

    def match(self, shape: list[str], found: tuple[int, ...], statement: Statement) -> bool:
        """Whether a shape of the comment is the one found."""
        if shape[:1] == ["..."]:
            shape = shape[1:]
            if len(found) < len(shape):
                return False
            found = found[len(found) - len(shape) :]
        return len(shape) == len(found) and all(
            self.fits(axis, size, statement) for axis, size in zip(shape, found, strict=True)
        )


class Watch:
    """Within it every call into the given files is followed and its comments are compared; see `problems`."""

    def __init__(self, paths: Iterable[Path], legend: Mapping[str, set[int]] | None = None) -> None:
        """`legend` holds the sizes that a letter can have in the calls to come; a letter that it lacks can have any."""
        self.legend = legend or {}
        self.sources = {str(source.path): source for source in map(Source, paths)}
        self.problems = [problem for source in self.sources.values() for problem in source.problems]
        self.calls: dict[int, Call] = {}

    def __enter__(self) -> Watch:
        self._former = sys.gettrace()
        sys.settrace(self._enter_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._former)

    @property
    def statements(self) -> list[Statement]:
        """Of all files."""
        return [statement for source in self.sources.values() for statement in source.statements]

    def finish(self) -> list[str]:
        """Everything wrong, also comments that no call has reached."""
        idle = [s for s in self.statements if s.comment and not s.compared]
        return [*dict.fromkeys(self.problems), *(f"{s.place}: # {s.comment.text}: never compared" for s in idle)]

    def coverage(self) -> tuple[list[Statement], list[Statement]]:
        """The executed statements that make a tensor, and those of them without a comment."""
        made = [s for s in self.statements if s.makes_tensor and (s.comment or not s.alias)]
        return made, [s for s in made if s.comment is None]

    def _enter_call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self.sources or frame.f_code.co_name.startswith("<"):
            return None
        call = self.calls[id(frame)] = Call()
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            self._bind_suffix(call, name, frame.f_locals[name], f"{Path(code.co_filename).name}:{code.co_firstlineno}")
        return self._follow

    def _bind_suffix(self, call: Call, name: str, value: object, place: str) -> None:
        suffix = name.rpartition("_")[2]
        if not isinstance(value, Tensor) or not suffix or suffix != suffix.upper() or not suffix[0].isalpha():
            return
        sizes = list(value.shape)
        if suffix.startswith("X"):
            suffix = suffix[1:]
            sizes = sizes[len(sizes) - len(suffix) :]
        fit = len(sizes) == len(suffix)
        for letter, size in zip(suffix, sizes, strict=False):
            if letter.isdigit():
                fit = fit and size == int(letter)
            elif size != 1:
                fit = fit and call.sizes.setdefault(letter, size) == size
        if not fit:
            self.problems.append(f"{place}: {name} has the shape {tuple(value.shape)}, {call.sizes}")

    def _follow(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
        call = self.calls[id(frame)]
        source = self.sources[frame.f_code.co_filename]
        if event == "exception":
            call.pending = call.returning = None
        elif event == "line":
            statement = source.at.get(frame.f_lineno)
            if statement is not None and statement is call.pending:
                return self._follow  # another line of the same statement
            self._done(call, frame)
            call.pending = statement
            if statement is not None:
                if isinstance(statement.node, ast.Return):
                    call.returning = statement
                if statement.comment and statement.comment.inputs:
                    call.inputs = list(_shapes_read(statement, frame))
        elif event == "return":
            self._done(call, frame)
            if call.returning is not None:
                self._compare(call, call.returning, value)
            self._settle(call)
            self._check_legend(call, frame)
            del self.calls[id(frame)]
        return self._follow

    def _done(self, call: Call, frame: FrameType) -> None:
        """Compare the statement that has just run."""
        statement, call.pending = call.pending, None
        if statement is None or isinstance(statement.node, ast.Return):
            return
        values = tuple(frame.f_locals.get(name) for name in statement.names)
        self._compare(call, statement, values[0] if len(values) == 1 else values)

    def _compare(self, call: Call, statement: Statement, value: object) -> None:
        statement.makes_tensor = statement.makes_tensor or _holds_tensors(value)
        comment = statement.comment
        if comment is None or value is None:
            return
        if comment.each:
            held = value.values() if isinstance(value, Mapping) else value
            parts = [part for part in held if part is not None]  # type: ignore[attr-defined]
            wanted = comment.results * len(parts)
        else:
            several = isinstance(value, tuple) and (comment.more or len(comment.results) > 1)
            parts = list(value) if several else [value]  # type: ignore[call-overload]
            parts = parts[: len(comment.results)] if comment.more else parts
            wanted = comment.results
        if len(parts) != len(wanted):
            self._report(call, statement, f"{len(parts)} values")
            statement.compared += 1
            return
        for shape, part in zip(wanted, parts, strict=True):
            if shape is not None and not isinstance(part, Tensor):
                self._report(call, statement, type(part).__name__)
            elif shape is not None and not call.match(shape, tuple(part.shape), statement):
                self._report(call, statement, str(tuple(part.shape)))
            statement.compared += shape is not None
        unmatched = list(call.inputs)
        for shape in comment.inputs:
            read = next((found for found in unmatched if _matches(call, shape, found, statement)), None)
            if read is None:
                self._report(call, statement, f"it reads {call.inputs}")
            else:
                unmatched.remove(read)

    def _report(self, call: Call, statement: Statement, found: str) -> None:
        text = statement.comment.text if statement.comment else ""
        self.problems.append(f"{statement.place}: # {text}: found {found} with {call.sizes}")

    def _check_legend(self, call: Call, frame: FrameType) -> None:
        for letter, size in call.sizes.items():
            if size not in self.legend.get(letter, {size}):
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_firstlineno}"
                self.problems.append(f"{place}: {letter} is {size} in {frame.f_code.co_name}, {call.sizes}")

    def _settle(self, call: Call) -> None:
        """Compare the sums, now that the letters of the call are bound; one free letter is solved for."""
        left = call.later
        while left:
            later, left = left, []
            for statement, axis, size in later:
                free = {name for name in axis if name.isupper()} - call.sizes.keys()
                if len(free) > 1:
                    left.append((statement, axis, size))
                    continue
                zero = _evaluate(axis, {**call.sizes, **dict.fromkeys(free, 0)})
                slope = _evaluate(axis, {**call.sizes, **dict.fromkeys(free, 1)}) - zero
                if slope and (size - zero) % slope == 0:
                    call.sizes[free.pop()] = (size - zero) // slope
                elif size != zero:
                    self._report(call, statement, f"{size} where {axis} = {zero}")
            if len(left) == len(later):
                for statement, axis, _ in left:
                    self._report(call, statement, f"letters of {axis!r} without a size")
                return


def _evaluate(axis: str, sizes: dict[str, int]) -> int:
    return int(eval(axis, {"__builtins__": {}}, sizes))


def _matches(call: Call, shape: Shape, found: tuple[int, ...], statement: Statement) -> bool:
    """`Call.match` that binds nothing unless it fits."""
    trial = Call(dict(call.sizes))
    if shape is None or not trial.match(shape, found, statement):
        return False
    call.sizes = trial.sizes
    call.later += trial.later
    return True


def _shapes_read(statement: Statement, frame: FrameType) -> Iterable[tuple[int, ...]]:
    for node in statement.reads():
        try:
            value = eval(compile(ast.Expression(node), "<read>", "eval"), frame.f_globals, frame.f_locals)
        except Exception:  # an attribute of None, a name of a comprehension: no tensor that can be read here
            continue
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        yield from (tuple(part.shape) for part in parts if isinstance(part, Tensor))


def _holds_tensors(value: object) -> bool:
    """Whether it is a tensor with axes, or a tuple, list or dict with one among tensors."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(part, Tensor) and part.dim() > 0 for part in value)
    return isinstance(value, Tensor) and value.dim() > 0
