"""Are explanations faithful? Take away the patches they name, and as many at random, and compare the scores.

    python -m benchmarks.quality.faithful --data dev.jsonl [--photos 200] [--patches 8 16]

Each photo meets its first caption, pixels alone. The named patches are those that add most to the score. They are taken
away in two ways: masked, so that the score is computed without them; and painted over with the photo's mean colour
before encoding, which also changes what the encoder sees round them. Random ones are drawn several times (seeded).
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from seps.images.decoding import read_image
from seps.method.encoded import Texts
from seps.retrieval.data import load_jsonl
from seps.retrieval.explain.patches import explain_patches
from seps.retrieval.heads import ImageFeatures
from seps.retrieval.pretrained import from_pretrained
from seps.threads import computing_threads


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.faithful", description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--patches", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    model = from_pretrained(options.model)
    grid, dataset = model.vision.grid_for(*model.image_size), load_jsonl(options.data)
    net = model.head.network
    cells = grid[0] * grid[1]
    step = max(1, len(dataset) // options.photos)

    @torch.no_grad()
    def drops(index: int) -> list[list[tuple[float, float]]]:
        """For each number of patches, masked and painted: what the named and what random ones take off the score."""
        record, chance = dataset.records[index], torch.Generator().manual_seed(index)
        pixels = read_image(record.source, model.image_size)
        image = ImageFeatures(model.encode_pixels(pixels[None].float() / 255))
        order = torch.tensor(explain_patches(model, image, record.captions[0], None).patches).argsort(descending=True)
        words = model.encode_texts([record.captions[0]])
        text = words.words[0, : int(words.mask[0].sum())]
        tokens = model.encode_pixels(pixels[None].float() / 255)
        whole = score(tokens, text)
        found = []
        for count in options.patches:
            chosen = [order[:count], *(torch.randperm(cells, generator=chance)[:count] for _ in range(options.draws))]
            masked = [score(tokens, text, some) for some in chosen]
            views = [painted(pixels, some, grid)[None].float() / 255 for some in chosen]
            repainted = [score(model.encode_pixels(view), text) for view in views]
            found.append([(whole - named, whole - sum(random) / len(random)) for named, *random in (masked, repainted)])
        return found

    def score(tokens: Tensor, text: Tensor, without: Tensor | None = None) -> float:
        mask = torch.ones(1, cells, dtype=torch.bool)
        if without is not None:
            mask[0, without] = False
        return float(net.score(net.encode_images(tokens, patch_mask=mask), Texts.of(text[None])).similarity)

    pool = computing_threads(torch.get_num_threads(), "faithful")
    found = list(pool.map(drops, range(0, len(dataset), step)[: options.photos]))
    pool.shutdown()
    for place, count in enumerate(options.patches):
        for kind, how in enumerate(("masked", "painted over")):
            pairs = torch.tensor([photo[place][kind] for photo in found])
            facts = {
                "photos": len(found),
                "patches": count,
                "of": cells,
                "how": how,
                "named_lower_it_more": round(float((pairs[:, 0] > pairs[:, 1]).float().mean()), 3),
                "mean_drop_named": round(float(pairs[:, 0].mean()), 3),
                "mean_drop_random": round(float(pairs[:, 1].mean()), 3),
            }
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
