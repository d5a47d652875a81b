"""The rows of the study: what is trained, and what trained weights are evaluated as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal[
    "score",
    "all",
    "random",
    "inverted",
    "oracle",
    "sighted",
    "agreement",
    "agreement+score",
    "left-out",
    "telling",
    "pooled",
]
Branch = Literal["none", "mean", "sdtps", "match"]
RATIOS = (0.15, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Row:
    """One way to train.

    rule: who decides what is kept: the published "score"; "all", nothing is dropped; "random"; "inverted", the worst
        scores; "oracle", the patches that show most of the figure, by the drawing; "sighted", those of which less than
        half is blind, by the drawing; "agreement", those that the other sensors' patches at the same place predict
        best; "agreement+score", the sum of both; "left-out", a predictor trained on what leaving one patch out costs;
        "telling", a predictor trained on how well a patch by itself tells whose it is; "pooled", a gate on the stem's
        patches, trained by the identity loss of their mean under its weights.
    ratio: part that is kept ("all" and "sighted" do not read it).
    branch: the second branch: "none", the plain "mean" of the patches, "sdtps", or "match", whose tokens are compared
        one with another instead of by their mean.
    early: select before the last blocks of the encoder, which then see the kept patches alone.
    first: select before the first block.
    """

    name: str
    rule: Rule = "score"
    ratio: float = 1.0
    branch: Branch = "sdtps"
    early: bool = False
    first: bool = False


@dataclass(frozen=True)
class Swap:
    """Weights trained as row `of`, evaluated as `row`."""

    name: str
    of: str
    row: Row


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}"


def _at(rule: Rule, word: str, ratio: float, branch: Branch = "sdtps", early: bool = False, first: bool = False) -> Row:
    prefix = "first-" if first else "early-" if early else "match-" if branch == "match" else ""
    return Row(f"{prefix}{word}-{_percent(ratio)}", rule, ratio, branch, early, first)


def _rows() -> list[Row]:
    """In the order in which they are trained: what a verdict needs first, so that a cut study can say something."""
    rows = [Row("keep-all", "all"), _at("score", "topk", 0.5), _at("random", "random", 0.5)]
    rows += [_at("oracle", "oracle", 0.25), _at("score", "topk", 0.25), _at("random", "random", 0.25)]
    rows += [Row("concat", "all", branch="none"), Row("mean-pool", "all", branch="mean"), Row("sighted", "sighted")]
    rows += [_at("inverted", "inverted", 0.5), _at("oracle", "oracle", 0.5)]
    rows += [_at("score", "topk", 0.25, early=True), _at("random", "random", 0.25, early=True)]
    rows += [_at("oracle", "oracle", 0.25, early=True), _at("score", "topk", 0.5, early=True)]
    rows += [Row("match-all", "all", branch="match"), _at("score", "topk", 0.25, "match")]
    rows += [_at("random", "random", 0.25, "match"), _at("oracle", "oracle", 0.25, "match")]
    rows += [_at("agreement", "agreement", 0.5), _at("agreement+score", "agreement+score", 0.25)]
    rows += [_at("left-out", "left-out", 0.25), _at("left-out", "left-out", 0.5)]
    rows += [_at("oracle", "oracle", 0.15), _at("score", "topk", 0.15), _at("random", "random", 0.15)]
    rows += [_at("oracle", "oracle", 0.75), _at("score", "topk", 0.75), _at("random", "random", 0.75)]
    rows += [_at("random", "random", 0.5, early=True), _at("oracle", "oracle", 0.5, early=True)]
    rows += [_at("agreement", "agreement", 0.25), _at("agreement", "agreement", 0.75)]
    rows += [_at("score", "topk", 0.5, "match"), _at("random", "random", 0.5, "match")]
    rows += [_at("telling", "telling", ratio) for ratio in (0.15, 0.25, 0.5)]
    rows += [_at("telling", "telling", ratio, early=True) for ratio in (0.25, 0.5)]
    rows += [_at("inverted", "inverted", 0.25), _at("inverted", "inverted", 0.25, early=True)]
    rows += [_at("pooled", "pooled", ratio) for ratio in (0.15, 0.25, 0.5)]
    rows += [_at("pooled", "pooled", 0.25, early=True), _at("pooled", "pooled", 0.25, first=True)]
    rows += [_at("random", "random", 0.25, first=True), _at("oracle", "oracle", 0.25, first=True)]
    rows += [_at("pooled", "pooled", 0.15, first=True), _at("random", "random", 0.15, first=True)]
    return rows


ROWS: dict[str, Row] = {row.name: row for row in _rows()}
SWAPS: tuple[Swap, ...] = (
    *(Swap(f"topk-{p} as keep-all", f"topk-{p}", ROWS["keep-all"]) for p in ("25", "50")),
    *(Swap(f"keep-all as topk-{p}", "keep-all", ROWS[f"topk-{p}"]) for p in ("25", "50")),
    *(Swap(f"keep-all as oracle-{p}", "keep-all", ROWS[f"oracle-{p}"]) for p in ("25", "50")),
    Swap("topk-25 as match", "topk-25", ROWS["match-topk-25"]),
    Swap("keep-all as match", "keep-all", ROWS["match-all"]),
)


def random_twin(row: Row) -> str | None:
    """The name of the row that keeps as many at random; None where there is none to compare with."""
    if row.rule in ("all", "random", "sighted") or row.branch in ("none", "mean"):
        return None
    return _at("random", "random", row.ratio, row.branch, row.early, row.first).name


def keep_all_twin(row: Row) -> str:
    """The row that drops nothing and is compared in the same way."""
    return "match-all" if row.branch == "match" else "keep-all"
