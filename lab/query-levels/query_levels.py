"""Whether what a query is like helps to tell that nothing fits: the confidence, standardised per query.

    python -m benchmarks.query_levels --data dev.jsonl --other dev-llava.jsonl [--model base] [--work DIR]

Some sentences score higher than others with any photo. Facts of a query that could say so: its number of words, its
level over the sentences of the bank, and mean and standard deviation of its scores over the gallery. Each is tried in
two ways. *Without answers*: the best scores of the sentences that calibrate the confidence are regressed on the fact,
and the prediction is taken off every best score. *By answers*: a logistic regression tells captions with their photo
from the same captions without it, by score and facts, on one data set, and is measured on the other and on its own (the
latter is an upper bound, not honest). AUROC against captions whose photo is taken out, and against the 60 of
`nothing_fits.txt`; good: part that has a confidence of at least `GOOD`, of captions with their photo, without it, and
of those about nothing. Scores are those of a search, less `STRENGTH` b. Random parts of 20 and 50 photos likewise,
without answers. The parts of the scores are those of `benchmarks.fusion`, which keeps them in `--work`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bank import KINDS, auroc, best_scores
from benchmarks.fusion import Parts, parts_of, shipped
from seps.retrieval.confidence import STRENGTH, Calibration
from seps.retrieval.index.bank import GOOD
from seps.retrieval.pretrained import from_pretrained

FACTS = ("words", "level over the bank", "gallery mean", "gallery deviation")
CHOICES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3))


@dataclass(frozen=True)
class Queries:
    """Best scores of queries, in deviations of those of the asked sentences, and their facts likewise."""

    there: Tensor
    out: Tensor
    nothing: Tensor
    asked: Tensor
    facts: Tensor
    """(T, 4) of the captions."""
    nothing_facts: Tensor
    asked_facts: Tensor
    images: int
    spread: float
    """Deviation of one query's scores over the photos."""


def queries(parts: Parts, weights: Tensor) -> Queries:
    """What the searches of a gallery give."""
    level = STRENGTH * parts.level(weights)
    means = torch.zeros_like(weights)
    means[[1, 4]] = weights[[1, 4]]

    def scores(some: Tensor) -> Tensor:
        return torch.einsum("k,kbt->bt", weights, some[: len(weights)]) - level

    def facts(some: Tensor, own: Tensor) -> Tensor:
        rough = torch.einsum("k,kbt->bt", means, some[: len(weights)]) - level
        return torch.stack([own[:, 1], own[:, 0], rough.mean(dim=0), rough.std(dim=0)], dim=1)

    there, out = best_scores(scores(parts.scores), parts.owner)
    asked, nothing = scores(parts.asked), scores(parts.nothing).amax(dim=0)
    best = asked.amax(dim=0)
    middle, unit = best.mean(), best.std()
    three = [
        facts(*some)
        for some in (
            (parts.scores, parts.captions),
            (parts.nothing, parts.nothing_captions),
            (parts.asked, parts.asked_captions),
        )
    ]
    usual, wide = three[2].mean(dim=0), three[2].std(dim=0)
    spread = float(asked.double().var(dim=0).mean().sqrt() / unit)
    standard = [(some - middle) / unit for some in (there, out, nothing, best)]
    return Queries(*standard, *((some - usual) / wide for some in three), images=len(level), spread=spread)


def without_answers(q: Queries, chosen: tuple[int, ...]) -> list[Tensor]:
    """Best scores less what the facts predict: with the photo, without it, about nothing, and of the asked."""
    rows = list(chosen)
    ones = torch.ones(len(q.asked), 1)
    fit = torch.linalg.lstsq(torch.cat([ones, q.asked_facts[:, rows]], dim=1), q.asked[:, None]).solution[1:, 0]
    pairs = ((q.there, q.facts), (q.out, q.facts), (q.nothing, q.nothing_facts), (q.asked, q.asked_facts))
    return [scores - facts[:, rows] @ fit for scores, facts in pairs]


def good_rates(q: Queries, scores: list[Tensor]) -> list[float]:
    """Per cent of each kind whose confidence is good."""
    made = Calibration.of(scores[3].tolist(), q.images, STRENGTH, q.spread)
    return [
        100 * sum(made.confidence(score) >= GOOD for score in some.tolist()) / max(1, len(some)) for some in scores[:3]
    ]


def logistic(q: Queries, chosen: tuple[int, ...]) -> Tensor:
    """Weights of a constant, the score and the facts: captions with their photo are told from those without by them."""
    facts = q.facts[:, list(chosen)]
    rows = torch.cat([torch.cat([some[:, None], facts], dim=1) for some in (q.there, q.out)])
    rows = torch.cat([torch.ones(len(rows), 1), rows], dim=1)
    right = torch.cat([torch.ones(len(q.there)), torch.zeros(len(q.out))])
    weights = torch.zeros(rows.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.binary_cross_entropy_with_logits(rows @ weights, right) + 1e-3 * weights[1:].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call, arg-type]
    return weights.detach()


def judged(q: Queries, weights: Tensor, chosen: tuple[int, ...]) -> tuple[float, float]:
    """AUROC against taken out and about nothing, by `logistic`."""
    pairs = ((q.there, q.facts), (q.out, q.facts), (q.nothing, q.nothing_facts))
    there, out, nothing = (weights[1] * scores + facts[:, list(chosen)] @ weights[2:] for scores, facts in pairs)
    return auroc(there, out), auroc(there, nothing)


def name(chosen: tuple[int, ...]) -> str:
    """The facts in words."""
    return ", ".join(FACTS[i] for i in chosen) or "score alone"


def small(parts: Parts, weights: Tensor, size: int, chosen: tuple[int, ...]) -> list[float]:
    """Good rates and AUROC in random parts of the gallery, without answers."""
    chance, found = torch.Generator().manual_seed(size), []
    for _ in range(min(20, 800 // size)):
        some = parts.some(torch.randperm(parts.scores.shape[1], generator=chance)[:size])
        q = queries(some, weights)
        scores = without_answers(q, chosen)
        found.append([*good_rates(q, scores), auroc(scores[0], scores[1]), auroc(scores[0], scores[2])])
    return torch.tensor(found).mean(dim=0).tolist()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.query_levels", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with captions and a description per photo")
    parser.add_argument("--other", type=Path, required=True, help="another one")
    parser.add_argument("--model", default="base", help="'mini', 'base', or a model folder")
    parser.add_argument("--work", type=Path, help="folder with the parts of benchmarks.fusion")
    options = parser.parse_args()
    model = from_pretrained(options.model).eval()
    sets = {
        path.stem: parts_of(options.model, model, path, None, None, options.work)
        for path in (options.data, options.other)
    }
    own = shipped(model)
    pixels = own * torch.tensor([1, 1, 0, 0, 0]) / own[0]
    weights = dict(zip(KINDS, (pixels, own), strict=True))
    print(f"{options.model}; AUROC against taken out / about nothing; good: there, taken out, nothing\n")
    print(
        "| photos by | facts | data | without answers | good | by answers of its own (not honest) | of the other set |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        found = {data: queries(parts, weights[kind]) for data, parts in sets.items()}
        for chosen in CHOICES:
            for data, q in found.items():
                (other,) = (some for label, some in found.items() if label != data)
                scores = without_answers(q, chosen)
                good = ", ".join(f"{rate:.1f}" for rate in good_rates(q, scores))
                pairs = [(auroc(scores[0], scores[1]), auroc(scores[0], scores[2]))]
                pairs += [judged(q, logistic(some, chosen), chosen) for some in (q, other)]
                cells = [f"{out:.3f} / {nothing:.3f}" for out, nothing in pairs]
                print(
                    f"| {kind} | {name(chosen)} | {data} | {cells[0]} | {good} % | {cells[1]} | {cells[2]} |",
                    flush=True,
                )
    print("\n| photos by | photos | facts | good: there | taken out | nothing | AUROC, taken out | nothing |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        for size in (20, 50):
            for chosen in CHOICES[:5]:
                row = small(sets[options.data.stem], weights[kind], size, chosen)
                cells = " | ".join([*(f"{rate:.1f} %" for rate in row[:3]), *(f"{area:.3f}" for area in row[3:])])
                print(f"| {kind} | {size} | {name(chosen)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
