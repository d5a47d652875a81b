"""What descriptions of some photos cost the others: recall of the undescribed photos in a partly described gallery.

    python -m benchmarks.quality.partly_described [--data FILE.jsonl] [--model mini] [--halves 20] [--part 0.5] [--bank]

By default on the photos that ship with the package. A photo's score depends on its own description and on nothing
else, so two score matrices (no photo described, all described) hold every partly described gallery: a random part of
the photos takes its rows from the second. The recall of the other photos is compared with what it was before.
With `--bank` the scores are those of a search: a part of each photo's level over the background queries is taken off,
and all of what descriptions raise the levels by in that gallery.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from seps.retrieval.data import RetrievalDataset, decode_all, load_jsonl
from seps.retrieval.demo import gallery_file
from seps.retrieval.engine.loading import engine_of
from seps.retrieval.engine.pictures import PatchPictures
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.ranking.bank import background, bank_of, description_gap
from seps.retrieval.ranking.confidence import BACKGROUND_STRENGTH

Levels = tuple[Tensor, Tensor]
"""(photos,) over the bank: with no photo described, and with all of them."""


@dataclass(frozen=True)
class PartlyDescribed:
    """Recall at `cutoff` in per cent, captions asking for photos: means over random parts of the gallery."""

    photos: int
    captions: int
    cutoff: int
    part: float
    """Share of the photos that get their description."""
    halves: int
    """How many random parts were drawn."""
    undescribed_before: float
    """Photos without description, while no photo has one."""
    undescribed_after: float
    """The same photos, once the others are described."""
    described_before: float
    described_after: float

    @property
    def cost(self) -> float:
        """Points that the undescribed photos lose."""
        return self.undescribed_before - self.undescribed_after


@torch.no_grad()
def score_matrices(model: RetrievalModel, dataset: RetrievalDataset) -> tuple[Tensor, Tensor, Levels]:
    """Scores (photos, captions) with no photo described, and with all of them; the photos' levels in either case.

    Raises ValueError if one cannot be described.
    """
    bare = [record.id for record, text in zip(dataset.records, dataset.dense, strict=True) if not (text or "").strip()]
    if bare:
        raise ValueError(f"{len(bare)} photos have no description, {bare[0]!r} among them; this needs one for each.")
    tokens = encode_images(model, dataset, pixels=decode_all(dataset, model.image_size))
    captions = model.encode_texts(dataset.captions)
    bare, described = ImageFeatures(tokens), ImageFeatures(tokens, *model.encode_descriptions(dataset.dense))
    engine = engine_of(model)
    pictures = [PatchPictures(images, model.vision.num_prefix_tokens) for images in (bare, described)]
    levels = tuple(torch.from_numpy(bank_of(engine).levels(engine, some, engine.vectors(some))) for some in pictures)
    return model.score(bare, captions), model.score(described, captions), levels


def measure(
    bare: Tensor,
    described: Tensor,
    image_of_caption: Sequence[int],
    *,
    part: float = 0.5,
    halves: int = 20,
    cutoff: int = 5,
    levels: Levels | None = None,
    strength: float = BACKGROUND_STRENGTH,
    whole_gap: bool = True,
) -> PartlyDescribed:
    """Recall before and after a random `part` of the photos is described, over `halves` draws with seeds 0, 1, ...

    With `levels` scores are corrected as those of a search; without `whole_gap` by `strength` of the level alone.
    """
    photos, captions = bare.shape
    count = round(part * photos)
    if not 0 < count < photos:
        raise ValueError(f"part is {part}, which describes {count} of {photos} photos; some must be and some not.")
    target = torch.as_tensor(image_of_caption)
    found: dict[str, list[float]] = {name: [] for name in ("bare_before", "bare_after", "text_before", "text_after")}
    for seed in range(halves):
        chosen = torch.zeros(photos, dtype=torch.bool)
        chosen[torch.randperm(photos, generator=torch.Generator().manual_seed(seed))[:count]] = True
        before, after = bare, torch.where(chosen[:, None], described, bare)
        if levels is not None:
            own = torch.where(chosen, levels[1], levels[0])
            gap = description_gap(own[chosen].tolist(), own[~chosen].tolist()) if whole_gap else 0.0
            before = before + torch.tensor(background(levels[0].tolist(), strength))[:, None]
            after = after + torch.tensor(background(own.tolist(), strength, chosen.tolist(), gap))[:, None]
        hits_before, hits_after = (_found(scores, target, cutoff) for scores in (before, after))
        for name, mask in (("bare", ~chosen[target]), ("text", chosen[target])):
            found[f"{name}_before"].append(100 * float(hits_before[mask].float().mean()))
            found[f"{name}_after"].append(100 * float(hits_after[mask].float().mean()))
    values = [mean(found[name]) for name in ("bare_before", "bare_after", "text_before", "text_after")]
    return PartlyDescribed(photos, captions, cutoff, part, halves, *values)


def _found(scores: Tensor, target: Tensor, cutoff: int) -> Tensor:
    """(captions,) whether fewer than `cutoff` photos score above the caption's own; ties count against it."""
    own = scores[target, torch.arange(scores.shape[1])]
    return (scores >= own).sum(dim=0) - 1 < cutoff


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.partly_described", description=__doc__)
    parser.add_argument("--data", type=Path, help="JSONL with captions and descriptions (default: the shipped photos)")
    parser.add_argument("--model", default="mini", help="'mini', a model folder, or a run of seps train")
    parser.add_argument("--part", type=float, default=0.5, help="share of the photos that are described")
    parser.add_argument("--halves", type=int, default=20, help="random parts to average over")
    parser.add_argument("--cutoff", type=int, default=5, help="K of R@K")
    parser.add_argument("--bank", action="store_true", help="take off the photos' levels, as seps search does")
    options = parser.parse_args()
    dataset = load_jsonl(options.data or gallery_file())
    bare, described, levels = score_matrices(from_pretrained(options.model), dataset)
    found = measure(
        bare,
        described,
        dataset.image_of_caption,
        part=options.part,
        halves=options.halves,
        cutoff=options.cutoff,
        levels=levels if options.bank else None,
    )
    facts = {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(found).items()}
    print(json.dumps({**facts, "cost": round(found.cost, 2)}))


if __name__ == "__main__":
    main()
