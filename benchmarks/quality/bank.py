"""What the bank of background queries is worth: recall, a half-described gallery, and knowing that nothing fits.

    python -m benchmarks.quality.bank --data dev.jsonl [--model mini] [--work DIR]

Four tables. First rSum and, with a random half of the photos described, R@5 of both halves, for several numbers of
best scores and strengths: with that part of the level taken off, and with all of what descriptions raise the levels by
(`description_gap`) and that part of the rest, as a search does. Then, with the shipped ones, how well the best hit's
confidence tells queries whose photo is there from the same queries with their photo taken out, and from the 60 of
`nothing_fits.txt`, which are about no photo: AUROC, and the part of them that still gets an answer where 95 % of the
present ones do. Last the part of each that has a best hit of some confidence; a calibrated confidence c gives 1 - c of
the queries that were taken out. Then the same for random parts of the photos, of several sizes, with the confidence as
it is and without its correction for small galleries. The strength that `strength_without_labels` gives stands at the
end.
`--work` keeps the scores, so that a second call prints at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality.partly_described import measure
from seps.metrics import recall
from seps.retrieval.data import decode_all, load_jsonl
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.pictures import PatchPictures
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking.bank import BEST, GOOD_CONFIDENCE, SCORED_SENTENCES, bank_of, level, strength_without_labels
from seps.retrieval.ranking.confidence import BACKGROUND_STRENGTH, Calibration

NOTHING = Path(__file__).with_name("nothing_fits.txt")
KINDS = ("pixels", "descriptions")
DRAWN = 1600
"""Photos that the random parts of one size have together, at most 40 parts."""
SHOWN = (0.1, GOOD_CONFIDENCE, 0.5, 0.7, 0.9)


@torch.no_grad()
def score_all(name: str, data: Path) -> dict[str, Tensor]:
    """By "KIND WHAT": scores of all photos with their captions, the bank, its asked sentences, those about nothing."""
    model, dataset = from_pretrained(name), load_jsonl(data)
    tokens = encode_images(model, dataset, pixels=decode_all(dataset, model.image_size))
    described = ImageFeatures(tokens, *model.encode_descriptions(dataset.dense))
    captions = model.encode_texts(dataset.captions)
    nothing = model.encode_texts(NOTHING.read_text(encoding="utf-8").splitlines())
    engine = engine_of(model)
    bank = bank_of(engine)
    asked, every = bank.asked.text_features, bank.texts.text_features
    found = {}
    for kind, images in zip(KINDS, (ImageFeatures(tokens), described), strict=True):
        pictures = PatchPictures(images, model.vision.num_prefix_tokens)
        nearest = (engine.vectors(pictures) @ bank.vectors.T).topk(SCORED_SENTENCES, dim=1).indices
        found[f"{kind} bank"] = engine.score(pictures, bank.texts, chosen=nearest.cpu().numpy())
        for what, texts in (("captions", captions), ("asked", asked), ("nothing", nothing), ("all", every)):
            found[f"{kind} {what}"] = model.score(images, texts)
    return found


def auroc(present: Tensor, absent: Tensor) -> float:
    """Part of the pairs in which the present one scores higher; ties count half."""
    order = absent.sort().values
    below = torch.searchsorted(order, present, right=False) + torch.searchsorted(order, present, right=True)
    return float(below.double().mean() / 2 / len(absent))


def false_answers(present: Tensor, absent: Tensor, part: float = 0.95) -> float:
    """Per cent of the absent at or above the score that `part` of the present reach."""
    return 100 * float((absent >= present.quantile(1 - part)).double().mean())


def best_scores(scores: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """(captions,) the best score of each caption, and the best of the photos that are not its own."""
    without = scores.clone()
    without[owner, torch.arange(scores.shape[1])] = float("-inf")
    return scores.amax(dim=0), without.amax(dim=0)


def recall_table(found: dict[str, Tensor], owner: Tensor, halves: int) -> None:
    """Print rSum and the half-described gallery by number of best scores and strength."""
    halved = ("undescribed half", "described half", "undescribed, gap whole", "described, gap whole")
    print(
        "| best | strength | rSum, pixels | rSum, descriptions | "
        + " | ".join(f"R@5, {name}" for name in halved)
        + " |"
    )
    print("|---" * 8 + "|")
    bare, full = (found[f"{kind} captions"] for kind in KINDS)
    for best, strength in [(BEST, 0.0), *((k, a) for k in (5, BEST, 20) for a in (0.25, 0.5, 0.75, 1.0))]:
        low, high = (level(found[f"{kind} bank"], best) for kind in KINDS)
        cells = [
            recall(scores - strength * own[:, None], owner.tolist()).rsum for scores, own in ((bare, low), (full, high))
        ]
        for whole in (False, True):
            corrected = {"levels": (low, high), "strength": strength, "whole_gap": whole}
            half = measure(bare, full, owner.tolist(), halves=halves, **corrected)  # type: ignore[arg-type]
            cells += [half.undescribed_after, half.described_after]
        named = best if strength else "-"
        print(f"| {named} | {strength:g} | " + " | ".join(f"{value:.1f}" for value in cells) + " |", flush=True)
        if not strength:
            print(f"| - | none described: | | | {half.undescribed_before:.1f} | {half.described_before:.1f} | | |")


def confidence_tables(found: dict[str, Tensor], owner: Tensor) -> None:
    """Print how well queries are told apart, and what part of them has a hit of some confidence."""
    rows = []
    print("| photos by | strength | AUROC, taken out | false answers | AUROC, nothing | false answers |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        for strength in (0.0, BACKGROUND_STRENGTH):
            taken = strength * level(found[f"{kind} bank"])[:, None]
            present, absent = best_scores(found[f"{kind} captions"] - taken, owner)
            nothing = (found[f"{kind} nothing"] - taken).amax(dim=0)
            cells = [
                f"{auroc(present, other):.3f} | {false_answers(present, other):.1f} %" for other in (absent, nothing)
            ]
            print(f"| {kind} | {strength:g} | {' | '.join(cells)} |")
            made = Calibration.of_scores(found[f"{kind} asked"] - taken)
            sure = [torch.tensor([made.confidence(x) for x in some.tolist()]) for some in (present, absent, nothing)]
            if strength:
                rows += [
                    f"| {kind} | {c:g} | "
                    + " | ".join(f"{100 * float((s >= c).double().mean()):.1f} %" for s in sure)
                    + " |"
                    for c in SHOWN
                ]
    print("\n| photos by | confidence | photo there | taken out | about nothing |\n|---|---|---|---|---|")
    print("\n".join(rows))


def sizes_table(found: dict[str, Tensor], owner: Tensor, sizes: Sequence[int]) -> None:
    """Print how often a hit is called good in random parts of the gallery, with and without the correction."""
    print("| photos by | photos | confidence | AUROC, taken out | false answers | good: there | taken out | nothing |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        taken = BACKGROUND_STRENGTH * level(found[f"{kind} bank"])[:, None]
        captions, nothing, asked = (found[f"{kind} {what}"] - taken for what in ("captions", "nothing", "asked"))
        for size in [size for size in sizes if size < len(taken)] + [len(taken)]:
            plain, corrected = _parts(captions, nothing, asked, owner, size)
            for name, sure in (("plain", plain), ("corrected", corrected)):
                there, out = sure[:2]
                good = (f"{100 * float((some >= GOOD_CONFIDENCE).double().mean()):.1f} %" for some in sure)
                figures = f"{auroc(there, out):.3f} | {false_answers(there, out):.1f} % | {' | '.join(good)}"
                print(f"| {kind} | {size} | {name} | {figures} |", flush=True)


def _parts(captions: Tensor, nothing: Tensor, asked: Tensor, owner: Tensor, size: int) -> list[list[Tensor]]:
    """Confidences without and with the correction: of captions with their photo, without it, and about nothing."""
    chance = torch.Generator().manual_seed(size)
    total, sure = len(captions), [[[], [], []], [[], [], []]]  # type: ignore[var-annotated]
    for _ in range(max(1, min(40, DRAWN // size)) if size < total else 1):
        rows = torch.randperm(total, generator=chance)[:size] if size < total else torch.arange(total)
        place = torch.full((total,), -1)
        place[rows] = torch.arange(size)
        columns = (place[owner] >= 0).nonzero()[:, 0]
        queries = (*best_scores(captions[rows][:, columns], place[owner[columns]]), nothing[rows].amax(dim=0))
        plain = Calibration.of(asked[rows].amax(dim=0).tolist(), size)
        for made, own in zip((plain, Calibration.of_scores(asked[rows])), sure, strict=True):
            for scores, some in zip(queries, own, strict=True):
                some.append(torch.tensor([made.confidence(score) for score in scores.tolist()]))
    return [[torch.cat(some) for some in own] for own in sure]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.bank", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with captions and a description per photo")
    parser.add_argument("--model", default="mini", help="'mini', 'base', a model folder, or a run of seps train")
    parser.add_argument("--work", type=Path, help="folder to keep the scores in")
    parser.add_argument("--halves", type=int, default=5, help="random halves to describe")
    parser.add_argument("--sizes", type=int, nargs="*", default=[20, 50, 200], help="photos of smaller galleries")
    options = parser.parse_args()
    kept = options.work / f"{options.data.stem}-{Path(options.model).name}.pt" if options.work else None
    if kept is not None and kept.is_file():
        found = torch.load(kept, weights_only=True)
    else:
        found = score_all(options.model, options.data)
        if kept is not None:
            torch.save(found, kept)
    dataset = load_jsonl(options.data)
    owner = torch.as_tensor(dataset.image_of_caption)
    print(f"{options.model} on {options.data.name}: {len(dataset)} photos, {len(dataset.captions)} captions\n")
    recall_table(found, owner, options.halves)
    print()
    confidence_tables(found, owner)
    print()
    sizes_table(found, owner, options.sizes)
    print()
    for kind in KINDS:
        print(f"Strength without labels, {kind}: {strength_without_labels(found[f'{kind} all']):.3f}")


if __name__ == "__main__":
    main()
