"""The front matter of the single file: contents, legend of the shapes, and the seven differences with line numbers.

Line numbers are found in the generated text itself, so they cannot go stale.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

_WIDE = "\u3000-\u303f\u4e00-\u9fff\uff00-\uffef"
_BREAK = re.compile(rf"(?<=[{_WIDE}])\s*\n\s*(?=[{_WIDE}])|(?<=[\u3000-\u303f\uff00-\uffef])\s*\n\s*")


class BundleError(RuntimeError):
    """The modules cannot be put into one file."""


class Difference(NamedTuple):
    """One difference between the paper and its published code."""

    option: str
    paper: str
    code: str
    set_at: tuple[str, str]
    """Where the option is set: the definition it stands in, and a part of its line."""
    acts_at: tuple[tuple[str, str], ...]
    """Where it acts, likewise. The part of a line must occur once in its definition."""


DIFFERENCES = (
    Difference(
        "scoring",
        "predictor and scaled attentions (Eq. 1-3)",
        "sum of two cosines",
        ("CrossSparseAggrNet.__init__", "use_paper_version: bool"),
        (
            ("TokenSparse.score", "if not self.use_paper_version"),
            ("TokenSparse.predict", "if not self.use_paper_version"),
        ),
    ),
    Difference(
        "dense text",
        "guides selection and merging",
        "a second branch, its similarity added",
        ("CrossSparseAggrNet.__init__", "use_paper_version: bool"),
        (
            ("CrossSparseAggrNet.choose", "if not self.use_paper_version"),
            ("CrossSparseAggrNet.align", "for tokens, (text"),
        ),
    ),
    Difference(
        "aggregation",
        "two weight matrices (Eq. 4)",
        "one",
        ("CrossSparseAggrNet.__init__", "use_dual_aggr: bool"),
        (
            ("CrossSparseAggrNet.__init__", "if self.use_dual_aggr"),
            ("CrossSparseAggrNet.merge", "if not self.use_dual_aggr"),
        ),
    ),
    Difference(
        "alignment",
        "mean + MLP of the 5 best (Eq. 5)",
        "mean",
        ("CrossSparseAggrNet.__init__", "use_paper_version: bool"),
        (("HRPA.__init__", "relevance_mlp(top_k) if"), ("HRPA.pool", "if self.relevance_mlp is None")),
    ),
    Difference(
        "similarity",
        "cosine",
        "LeakyReLU(0.1) of the cosine",
        ("HRPA.__init__", "scan: bool"),
        (("HRPA.__init__", "self.scan ="), ("HRPA.pool_both", "if self.scan")),
    ),
    Difference(
        "decision",
        "Gumbel-Softmax; the kept set is that of top-K",
        "top-K",
        ("CrossSparseAggrNet.__init__", "use_gumbel_softmax: bool"),
        (("TokenSparse.decide", 'if self.decision == "topk"'), ("TokenSparse.decide", "return gumbel_topk(")),
    ),
    Difference(
        "ratio loss",
        '"printed": rho minus the weighted sum of both means (Eq. 7)',
        '"unified": the mean of D_s + D_d; the dual-mode file has "separate"',
        ("SEPSLoss.__init__", "ratio_form: RatioForm"),
        (("ratio_loss", 'if form == "unified"'), ("ratio_loss", 'if form == "printed"')),
    ),
)
_SHAPES = re.compile(r"^(?:Shapes: |\u5f62\u72b6\uff1a)(.+?)[.\u3002]$", re.MULTILINE | re.DOTALL)
_LEGEND = {
    "D": "the decision: 1 at a kept patch, 0 at the others",
    "S": "the similarity of an image and a text",
    "X": "any positions or leading axes",
}


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """First and last line of every function and class by its dotted name."""
    found: dict[str, tuple[int, int]] = {}

    def visit(nodes: Sequence[ast.stmt], prefix: str) -> None:
        for node in nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found[prefix + name] = (node.lineno, node.end_lineno or node.lineno)
                    visit(node.body, f"{prefix}{name}.")

    visit(ast.parse(source).body, "")
    return found


def line_of(lines: Sequence[str], spans: Mapping[str, tuple[int, int]], place: tuple[str, str]) -> int:
    """The line of `place`, a definition and a part of a line in it. Raises `BundleError` unless there is just one."""
    name, part = place
    first, last = spans.get(name, (1, 0))
    found = [number for number in range(first, last + 1) if part in lines[number - 1]]
    if len(found) != 1:
        raise BundleError(f"{part!r} stands {len(found)} times in {name}, not once; correct DIFFERENCES.")
    return found[0]


def without_shapes(head: str) -> str:
    """A head without its "Shapes:" paragraph, which the legend of the file has."""
    return _SHAPES.sub("", head).strip()


def legend(heads: Mapping[str, str], say: Callable[[str], str]) -> list[str]:
    """One line per symbol, collected from the "Shapes:" paragraphs of the modules' heads."""
    meanings = {symbol: [say(meaning)] for symbol, meaning in _LEGEND.items()}
    for head in heads.values():
        for paragraph in _SHAPES.findall(head):
            for item in re.split(r", |\uff0c", one_line(paragraph)):
                symbol, _, meaning = item.partition(" ")
                if not re.fullmatch("[A-Z]", symbol) or not meaning:
                    raise BundleError(f"{item!r} in a head's shapes is not a capital letter and its meaning.")
                if meaning not in meanings.setdefault(symbol, []):
                    meanings[symbol].append(meaning)
    told, both = [], say("{}, {}")
    for symbol, words in sorted(meanings.items()):
        # "words of a caption" says what "words" says.
        own = [word for word in words if not any(other.startswith((f"{word} ", f"{word}\uff08")) for other in words)]
        told.append(f"{symbol} {reduce(both.format, own)}")
    lines = [""]
    for item in told:
        if lines[-1] and _width(f"{lines[-1]}; {item};") > 112:
            lines[-1] += ";"
            lines.append("")
        lines[-1] += f"; {item}" if lines[-1] else item
    return [f"    {line}" for line in lines]


def _width(text: str) -> int:
    """How wide a terminal shows it: Chinese characters and points take two columns."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


class Entry(NamedTuple):
    """A line of the contents: the title of a section, and what it says of itself."""

    title: str
    told: str


def front_matter(
    entries: Sequence[Entry], heads: Mapping[str, str], body: str | None, say: Callable[[str], str], table: bool
) -> str:
    """Contents, legend (of the heads) and (with `table`) differences; line numbers are those of `body`, or 0 without.

    The number of lines does not depend on `body`, so that a first pass without it can be replaced by a second. `say`
    translates the words of this page; the heads come translated.
    """
    lines = body.splitlines() if body else []
    spans = definitions(body) if body else {}

    def number(place: tuple[str, str]) -> int:
        return line_of(lines, spans, place) if body else 0

    told = [say("Contents (line: section)"), ""]
    for entry in entries:
        name = entry.title.split(",")[0]
        at = 0 if not body else spans[name][0] if name in spans else lines.index(section(entry.title)) + 1
        told.append(f"    {at:5d}: {entry.title}  {entry.told}".rstrip())
    told += ["", say("Shapes: the axes of a tensor in brackets; a name such as `patches_BNC` ends with its axes."), ""]
    told += legend(heads, say)
    if not table:
        return "\n".join(told)
    told += ["", say("The seven differences between the paper and its published code"), ""]
    for i, row in enumerate(DIFFERENCES, start=1):
        acts = ", ".join(str(number(place)) for place in row.acts_at)
        told += [
            f"    {i}. "
            + say("{}: set in line {}, acts in lines {}").format(say(row.option), number(row.set_at), acts),
            "       " + say("paper: {}").format(say(row.paper)),
            "       " + say("code: {}").format(say(row.code)),
        ]
    return "\n".join(told)


def section(title: str) -> str:
    """The line at which a section begins."""
    return f"# --- {title}"


def first_sentence(text: str) -> str:
    """The first sentence of a docstring as one line; the points of "Eq. 5", "e.g." and "i.e." do not end it."""
    paragraph = one_line(text.strip().split("\n\n")[0])
    found = re.match(r".*?(?:(?<!Eq)(?<!e\.g)(?<!i\.e)[.](?=\s|$)|\u3002)", paragraph)
    return found.group() if found else paragraph


def one_line(text: str) -> str:
    """A paragraph as one line; between Chinese characters, and behind Chinese points, no space is put."""
    return " ".join(_BREAK.sub("", text.strip()).split())
