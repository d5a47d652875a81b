"""Are explanations faithful? Paint over the patches they name, and as many at random, and compare the scores.

    python -m benchmarks.faithful --data dev.jsonl [--photos 200] [--patches 8 16]

Each photo meets its first caption, pixels alone. The named patches are those that add most to the score; a patch is
painted over with the photo's mean colour before encoding. Random patches are drawn several times (seed 0).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor

from seps.retrieval.data import load_jsonl, read_image
from seps.retrieval.explanation import Explainer
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained
from seps.retrieval.threads import computing_threads


def painted(pixels: Tensor, cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """(3, H, W) uint8 with some cells of the grid in the mean colour."""
    mask = torch.zeros(grid[0] * grid[1], dtype=torch.bool)
    mask[cells] = True
    height, width = pixels.shape[1] // grid[0], pixels.shape[2] // grid[1]
    covered = mask.view(grid).repeat_interleave(height, 0).repeat_interleave(width, 1)
    colour = pixels.float().mean(dim=(1, 2), keepdim=True).to(torch.uint8)
    return torch.where(covered, colour, pixels)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faithful", description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--patches", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    model = from_pretrained(options.model)
    explainer, dataset = Explainer(model), load_jsonl(options.data)
    cells = explainer.grid[0] * explainer.grid[1]
    step = max(1, len(dataset) // options.photos)

    @torch.no_grad()
    def drops(index: int) -> list[tuple[float, float]]:
        """For each number of patches: what the named ones and what random ones take off the score."""
        record, chance = dataset.records[index], torch.Generator().manual_seed(index)
        pixels = read_image(record.source, model.image_size)
        order = torch.tensor(explainer.picture(pixels, record.captions[0]).patches).argsort(descending=True)
        views = [pixels]
        for count in options.patches:
            chosen = [order[:count], *(torch.randperm(cells, generator=chance)[:count] for _ in range(options.draws))]
            views += [painted(pixels, some, explainer.grid) for some in chosen]
        tokens = torch.cat([model.encode_pixels(view[None].float() / 255) for view in views])
        texts = model.encode_texts([record.captions[0]])
        whole, *rest = model.score(ImageFeatures(tokens), texts)[:, 0].tolist()
        each = [rest[start : start + 1 + options.draws] for start in range(0, len(rest), 1 + options.draws)]
        return [(whole - named, whole - sum(random) / len(random)) for named, *random in each]

    pool = computing_threads(torch.get_num_threads(), "faithful")
    found = list(pool.map(drops, range(0, len(dataset), step)[: options.photos]))
    pool.shutdown()
    for place, count in enumerate(options.patches):
        pairs: Any = torch.tensor([photo[place] for photo in found])
        facts = {
            "photos": len(found),
            "patches": count,
            "of": cells,
            "named_lower_it_more": round(float((pairs[:, 0] > pairs[:, 1]).float().mean()), 3),
            "mean_drop_named": round(float(pairs[:, 0].mean()), 3),
            "mean_drop_random": round(float(pairs[:, 1].mean()), 3),
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
