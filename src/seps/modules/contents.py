"""The front matter of the single file: contents, legend of the shapes, and the seven differences with line numbers.

Line numbers are found in the generated text itself, so they cannot go stale.
"""

from __future__ import annotations

import ast
import re
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
        '"learned": predictor and scaled attentions (Eq. 1-3)',
        '"sum": of two cosines',
        ("SlimmingConfig", "scoring: Scoring | str ="),
        (
            ("SlimmingConfig.predictor_weight", 'if self.scoring == "learned"'),
            ("SlimmingConfig.branches", "unit = self.beta if self.scoring"),
            ("TokenSparse.predict", "if not self.use_paper_version"),
            ("TokenSparse._scores", "if not self.use_paper_version"),
            ("PatchSlimming._sparse_net", "config.scoring =="),
            ("PatchSlimming._fixed_scores", "self.config.scoring =="),
            ("PatchSlimming.guided", "self.config.scoring =="),
            ("CrossSparseAggrNet.forward", "self.config.scoring =="),
        ),
    ),
    Difference(
        "dense",
        '"guide": the description guides selection and merging',
        '"branch": a second branch, its similarity added',
        ("SlimmingConfig", "dense: DenseRole ="),
        (
            ("SlimmingConfig.uses_dense_branch", 'self.dense == "branch"'),
            ("SlimmingConfig.branches", "shares = self.dense in"),
            ("PatchSlimming.__init__", 'config.dense == "tokens"'),
            ("PatchSlimming.encode_images", 'config.dense != "none"'),
            ("PatchSlimming.encode_images", 'config.dense == "tokens"'),
            ("PatchSlimming.encode_images", 'config.dense == "branch"'),
            ("PatchSlimming._align_patches", 'self.config.dense == "branch"'),
            ("score_pairing_texts", 'net.config.dense != "branch"'),
        ),
    ),
    Difference(
        "aggregation",
        '"dual": two weight matrices (Eq. 4)',
        '"single": one',
        ("SlimmingConfig", "aggregation: Aggregation | str ="),
        (
            ("SlimmingConfig.uses_dense_branch", 'self.aggregation == "dual"'),
            ("PatchSlimming.__init__", 'config.aggregation == "dual"'),
            ("PatchSlimming.image_tokens", 'self.config.aggregation == "dual"'),
        ),
    ),
    Difference(
        "alignment",
        '"topk": mean + MLP of the 5 best (Eq. 5)',
        '"mean"',
        ("SlimmingConfig", "alignment: Alignment | str ="),
        (("pool_relevance", "if mlp is None"), ("PatchSlimming.__init__", 'config.alignment == "topk"')),
    ),
    Difference(
        "similarity",
        '"cosine"',
        '"leaky": LeakyReLU(0.1) of the cosine',
        ("SlimmingConfig", "similarity: Similarity ="),
        (("pool_both", "if leaky"), ("PatchSlimming.__init__", 'config.similarity == "leaky"')),
    ),
    Difference(
        "decision",
        '"gumbel": Gumbel-Softmax; "relaxed": its gradient alone',
        '"topk": the K best',
        ("SlimmingConfig", "decision: DecisionKind | str ="),
        (
            ("TokenSparse.decide", 'if self.decision == "topk"'),
            ("TokenSparse.decide", 'if self.decision in ("gumbel", "relaxed")'),
            ("PatchSlimming._sparse_net", "decision=config.decision"),
        ),
    ),
    Difference(
        "ratio_form",
        '"printed": rho less the weighted sum of both means (Eq. 7)',
        '"unified": the mean of D_s + D_d ("separate", a term each, is the dual-mode file\'s)',
        ("LossConfig", "ratio_form: RatioForm ="),
        (
            ("ratio_loss", 'if form == "unified"'),
            ("ratio_loss", 'if form == "printed"'),
            ("RatioLoss.forward", "form = self.form or"),
        ),
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
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[prefix + node.name] = (node.lineno, node.end_lineno or node.lineno)
                visit(node.body, f"{prefix}{node.name}.")

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
    told, both = [], say("{}; {}")
    for symbol, words in sorted(meanings.items()):
        # "words of a caption" says what "words" says.
        own = [word for word in words if not any(other.startswith((f"{word} ", f"{word}\uff08")) for other in words)]
        told.append(f"    {symbol}  {reduce(both.format, own)}")
    return told


def front_matter(heads: Mapping[str, str], body: str | None, say: Callable[[str], str]) -> str:
    """Contents, legend and differences; the line numbers are those of `body`, the whole file, or 0 without it.

    The number of lines does not depend on `body`, so that a first pass without it can be replaced by a second. `say`
    translates the words of this page; the heads come translated.
    """
    lines = body.splitlines() if body else []
    spans = definitions(body) if body else {}

    def number(place: tuple[str, str]) -> int:
        return line_of(lines, spans, place) if body else 0

    told = [say("Contents (line: section)"), ""]
    for name, head in heads.items():
        at = lines.index(section(name)) + 1 if body else 0
        told.append(f"    {at:5d}: {name}.py  {first_sentence(head)}")
    told += ["", say("Shapes: the axes of a tensor in brackets; a name such as `patches_BNC` ends with its axes."), ""]
    told += [*legend(heads, say), "", say("The seven differences between the paper and its published code"), ""]
    for i, row in enumerate(DIFFERENCES, start=1):
        acts = ", ".join(str(number(place)) for place in row.acts_at)
        told += [
            f"    {i}. {row.option}",
            "       " + say("paper  {}").format(say(row.paper)),
            "       " + say("code   {}").format(say(row.code)),
            "       " + say("set    line {}").format(number(row.set_at)),
            "       " + say("acts   lines {}").format(acts),
        ]
    return "\n".join(told)


def section(name: str) -> str:
    """The line at which the section of a module begins."""
    return f"# --- {name}.py"


def first_sentence(text: str) -> str:
    """The first sentence of a docstring as one line; the points of "Eq. 5", "e.g." and "i.e." do not end it."""
    paragraph = one_line(text.strip().split("\n\n")[0])
    found = re.match(r".*?(?:(?<!Eq)(?<!e\.g)(?<!i\.e)[.](?=\s|$)|\u3002)", paragraph)
    return found.group() if found else paragraph


def one_line(text: str) -> str:
    """A paragraph as one line; between Chinese characters, and behind Chinese points, no space is put."""
    return " ".join(_BREAK.sub("", text.strip()).split())
