"""What people type: words, phrases, confidences, results by date, and queries in other languages, asked of a store.

    seps index FOLDER --store STORE                 # the photos of --data, without their descriptions
    python -m benchmarks.quality.typed --store STORE --data dev.jsonl

The nouns of `typed_nouns.txt`, each as it is and with its article. A hit is right where a caption of its photo has the
noun or its plural. Of the ten best: the part that is right, of the right ones those that are good matches, of the good
ones those that are right, and queries without a good match; beside the page's confidence that of the score alone, as
sentences have it. By date: the right ones among the 24 of the first page. Nouns of `seps.retrieval.ranking.bank.nouns`
that no caption has stand for words of which there is no photo. Sentences: the first caption of `--sentences` photos
with the photo there and taken out, and `nothing_fits.txt`, by AUROC. Last, the queries of `typed_languages.txt`, and
all captions and their words, that are taken for another language. Photos get dates by chance, from their contents.

Phrases are those that the rules of `seps.retrieval.data.typed` make of captions, for `LEAST` photos or more; a photo
of which the captions leave it open counts as wrong. With `--rsum` the store's model is evaluated with the captions as
sentences too, by pixels and with descriptions: then all kinds of queries are in one table of figures.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.quality.bank import NOTHING, auroc
from seps.photos import Searcher
from seps.photos.search.query import CANDIDATES, Sort
from seps.photos.search.ranking import RELEVANT, in_order
from seps.photos.search.results import Hit
from seps.retrieval.data import RetrievalDataset, load_jsonl
from seps.retrieval.data.typed import queries_of_captions
from seps.retrieval.evaluate.run import evaluate_each
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking.bank import GOOD_CONFIDENCE, nouns

NOUNS, LANGUAGES = (Path(__file__).with_name(f"typed_{name}.txt") for name in ("nouns", "languages"))
CHOSEN = 20
"""Nouns at the beginning of the list that are a choice of plain ones."""
LEAST = 10
"""Photos that a noun of the second group has at least."""
LINES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Confidences from which hits could count as good."""
SORTS: tuple[Sort, ...] = ("score", "newest", "oldest")
Sure = Callable[[Hit], float]


def words(text: str) -> set[str]:
    """The words of a text in lower case."""
    return set(re.findall(r"[a-z]+", text.lower()))


def bare(noun: str) -> str:
    """Without its article."""
    return re.sub("^an? ", "", noun)


def name(hit: Hit) -> str:
    """The file of a photo, in a shard or not."""
    return hit.member or Path(hit.path).name


def listed_nouns() -> list[tuple[str, set[str]]]:
    """The nouns of the list, with article, and the words that count as each."""
    lines = [line.split("\t") for line in NOUNS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [(noun, {bare(noun), plural}) for noun, plural in lines]


def words_said(dataset: RetrievalDataset) -> dict[str, set[str]]:
    """By photo: the words of its captions."""
    return {record.id: words(" ".join([*record.captions, record.dense or ""])) for record in dataset.records}


def noun_forms(dataset: RetrievalDataset) -> list[tuple[tuple[str, str], set[str]]]:
    """Each noun of the list without and with its article, and the photos that are right."""
    said = words_said(dataset)
    return [
        ((bare(noun), noun), {photo for photo, text in said.items() if not form.isdisjoint(text)})
        for noun, form in listed_nouns()
    ]


def phrase_forms(dataset: RetrievalDataset) -> list[tuple[tuple[str, ...], set[str]]]:
    """Phrases in their forms, and the photos that are right."""
    found = queries_of_captions(dataset, fewest=LEAST)
    return [(query.texts, set(query.right)) for query in found if len(query.texts[0].split()) > 1]


def noun_rows(searcher: Searcher, said: dict[str, set[str]]) -> None:
    """Print the tables of nouns."""
    forms = listed_nouns()
    often = [sum(not form.isdisjoint(text) for text in said.values()) >= LEAST for _, form in forms]
    groups = {
        "20 plain nouns": forms[:CHOSEN],
        f"nouns of {LEAST} photos": [form for form, many in zip(forms, often, strict=True) if many],
    }
    score_alone = by_score(searcher)
    found = {text: searcher.search(text, CANDIDATES) for noun, _ in forms for text in (noun, bare(noun))}
    print(
        "| queries | number | right of ten | good of the right | right of the good | no good match | by score alone |"
    )
    print("|---" * 7 + "|")
    for group, some in groups.items():
        for form in (bare, str):
            asked = [(found[form(noun)], either) for noun, either in some]
            cells = [rates(asked, said, sure) for sure in (confidence, score_alone)]
            old = f"{cells[1][1]:.0f} %, {cells[1][2]:.0f} %, {cells[1][3]}"
            kind = f'{group}, "{form("a dog")}"'
            print(
                f"| {kind} | {len(some)} | {cells[0][0]:.1f} % | {cells[0][1]:.0f} % | {cells[0][2]:.0f} % | "
                f"{cells[0][3]} | {old} |"
            )
    print("\n| confidence from | queries | good of the right | right of the good |\n|---|---|---|---|")
    for line in LINES:
        for group, some in groups.items():
            for form in (bare, str):
                cells = rates([(found[form(noun)], either) for noun, either in some], said, confidence, line)
                print(f'| {line} | {group}, "{form("a dog")}" | {cells[1]:.0f} % | {cells[2]:.0f} % |')
    print(f"\n| queries | right of the first {RELEVANT} by score | newest first | oldest first |\n|---|---|---|---|")
    either = dict(forms)
    for noun, group in [("a bike", [("a bike", either["a bike"])]), *groups.items()]:
        counts = []
        for sort in SORTS:
            pages = [(in_order(dated(found[bare(text)]), sort)[:RELEVANT], form) for text, form in group]
            counts.append(sum(right(hit, form, said) for page, form in pages for hit in page) / len(pages))
        print(f"| {bare(noun)} | " + " | ".join(f"{count:.1f}" for count in counts) + " |")
    known = set().union(*said.values())
    absent = [
        noun for noun in nouns() if not any({w, w + "s", w.rstrip("s")} & known for w in words(noun) - {"a", "an"})
    ]
    best = [searcher.search(text, 1)[0] for noun in absent for text in (noun, bare(noun))]
    share, old = (
        100 * sum(sure(hit) >= GOOD_CONFIDENCE for hit in best) / len(best) for sure in (confidence, score_alone)
    )
    print(
        f"\nWords of which no caption speaks: {len(absent)}; with a good match {share:.1f} %, "
        f"by score alone {old:.1f} %"
    )


def phrase_rows(searcher: Searcher, dataset: RetrievalDataset) -> None:
    """Print the table of phrases."""
    groups: dict[str, list[tuple[tuple[str, ...], set[str]]]] = {"two words": [], "two nouns with a preposition": []}
    for texts, right in phrase_forms(dataset):
        group = "two words" if len(texts[0].split()) == 2 else "two nouns with a preposition"
        groups[group].append((texts, right))
    print("\n| phrases | number | right of ten | with articles |\n|---|---|---|---|")
    for group, some in groups.items():
        cells = []
        for form in (0, 1):
            asked = [(texts[form], right) for texts, right in some if len(texts) > form]
            shares = [sum(name(hit) in right for hit in searcher.search(text, 10)) / 10 for text, right in asked]
            cells.append(f"{100 * fmean(shares):.1f} %" if shares else "-")
        print(f"| {group} | {len(some)} | {cells[0]} | {cells[1]} |")


def rsum_rows(model: str, dataset: RetrievalDataset) -> None:
    """Print rSum of the captions."""
    print("\n| captions | rSum |\n|---|---|")
    for report in evaluate_each(from_pretrained(model), dataset, ["none", "image"]):
        kind = {"none": "pixels alone", "image": "with descriptions"}[report.protocol]
        print(f"| {kind} | {report.metrics.rsum:.1f} |")


def dated(hits: Sequence[Hit]) -> list[Hit]:
    """The hits with dates that have nothing to do with their rank."""
    return [replace(hit, taken=int(hit.sha256[:12], 16)) for hit in hits]


def confidence(hit: Hit) -> float:
    """That of the page."""
    return hit.confidence or 0.0


def by_score(searcher: Searcher) -> Sure:
    """The confidence that a sentence of that score has."""
    calibration = searcher.calibration
    assert calibration is not None, searcher.without_bank
    return lambda hit: calibration.confidence(hit.score)


def right(hit: Hit, form: set[str], said: dict[str, set[str]]) -> bool:
    """Whether a caption of the photo has one of the words."""
    return not form.isdisjoint(said[name(hit)])


def rates(
    asked: Sequence[tuple[list[Hit], set[str]]], said: dict[str, set[str]], sure: Sure, line: float = GOOD_CONFIDENCE
) -> tuple[float, ...]:
    """Per cent right, of the right good, of the good right; queries without a good match."""
    marks = [(right(hit, form, said), sure(hit) >= line) for hits, form in asked for hit in hits[:10]]
    both = sum(fits and good for fits, good in marks)
    fitting, goods = sum(fits for fits, _ in marks), sum(good for _, good in marks)
    none = sum(sure(hits[0]) < line for hits, _ in asked)
    return 100 * fitting / len(marks), 100 * both / fitting, 100 * both / max(1, goods), none


def sentence_rows(searcher: Searcher, captions: dict[str, str]) -> None:
    """Print the table of sentences."""
    rows = []
    for photo, caption in captions.items():
        hits = searcher.search(caption, 10)
        rows.append((hits[0], next(hit for hit in hits if name(hit) != photo)))
    nothing = [searcher.search(text, 1)[0] for text in NOTHING.read_text(encoding="utf-8").splitlines()]
    print("\n| sentences by | AUROC, photo taken out | AUROC, about nothing | good: there | taken out | nothing |")
    print("|---" * 6 + "|")
    for kind, sure in (("confidence", confidence), ("score alone", by_score(searcher))):
        # A caption's photo is "there" whatever its rank: the best hit counts.
        parts = [torch.tensor([sure(hit) for hit in part]) for part in (*zip(*rows, strict=True), nothing)]
        good = " | ".join(f"{100 * float((part >= GOOD_CONFIDENCE).double().mean()):.1f} %" for part in parts)
        print(f"| {kind} | {auroc(parts[0], parts[1]):.3f} | {auroc(parts[0], parts[2]):.3f} | {good} |")


def language_rows(searcher: Searcher, captions: Sequence[str]) -> None:
    """Print what is taken for another language."""

    def taken(texts: Sequence[str]) -> int:
        return sum(searcher.engine.unread(text).foreign for text in texts)

    print("\n| queries | number | taken for another language |\n|---|---|---|")
    for part in re.split(r"^\[", LANGUAGES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, *texts = part.strip().splitlines()
        print(f"| {title.rstrip(']')} | {len(texts)} | {taken(texts)} |")
    each = sorted(set().union(*map(words, captions)))
    print(
        f"| captions | {len(captions)} | {taken(captions)} |\n| their words, each alone | {len(each)} | {taken(each)} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.typed", description=__doc__)
    parser.add_argument("--store", required=True, help="store of the photos of --data")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with captions")
    parser.add_argument(
        "--model", help="another text side of the store's model, like runs/typed (default: the store's)"
    )
    parser.add_argument("--sentences", type=int, default=200, help="photos whose first caption is a sentence")
    parser.add_argument("--rsum", action="store_true", help="evaluate the model with all captions, too: minutes")
    options = parser.parse_args()
    dataset, searcher = load_jsonl(options.data), Searcher(options.store, options.model)
    texts = {record.id: [*record.captions, record.dense or ""] for record in dataset.records}
    name = options.model or searcher.store.settings.model
    print(f"{name} on {options.data.name}: {len(texts)} photos\n")
    noun_rows(searcher, words_said(dataset))
    phrase_rows(searcher, dataset)
    sentence_rows(searcher, {photo: texts[photo][0] for photo in list(texts)[: options.sentences]})
    language_rows(searcher, dataset.captions)
    if options.rsum:
        rsum_rows(name, dataset)


if __name__ == "__main__":
    main()
