"""Are the kept patches those that matter? The rest is painted over, and four photos are asked for one of them.

    python -m benchmarks.kept_patches --data dev.jsonl [--model base] [--own-guide 2 0] [--photos 200] --out FILE.jsonl

`--own-guide`: values of `SlimmingConfig.own_guide` to compare on the same photos; none: the model as it is. Pixels
alone; each photo meets its first caption, and a line has, with standard errors over the photos:

- shown: part of the captions that find their photo first, and among ten, in the gallery of the photos, when all but
  the kept patches of that photo is painted over with its mean colour;
- hidden: the same when the kept patches are painted over. As many patches at random are a line of their own, and so
  are the whole photos;
- rsum: with `--rsum` nothing of the above, but rSum of all photos and captions by pixels and with descriptions, and the
  difference from the first value of the guide with its standard error, paired by photo;
- quarter: four photos are one picture, two by two, asked for one of them. Part of the kept patches in its quarter
  (chance 0.25, most 0.5 where half is kept), and part of what the caption's content words gain from patches there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.faithful import painted
from benchmarks.lines import append_line
from benchmarks.token_curve import difference
from seps.method.encoded import Texts
from seps.metrics import recall
from seps.retrieval.data import RetrievalDataset, load_jsonl
from seps.images.decoding import read_image
from seps.retrieval.evaluate.run import encode_images
from seps.retrieval.explain.explanation import Explainer, Explanation
from seps.retrieval.heads import ImageFeatures, SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

Facts = dict[str, float]
Tell = Callable[[Facts, str], None]


def mean_and_error(name: str, values: list[float]) -> Facts:
    """A mean and its standard error, by names."""
    found = torch.tensor(values)
    return {name: round(float(found.mean()), 3), f"{name}_error": round(float(found.std()) / len(values) ** 0.5, 3)}


class Gallery:
    """The photos, their captions and all scores; a photo of it can be replaced by a painted one."""

    def __init__(self, explainer: Explainer, dataset: RetrievalDataset, count: int) -> None:
        self.model, self.net, self.grid = explainer.model, explainer.net, explainer.grid
        self.records = dataset.records[:: max(1, len(dataset) // count)][:count]
        self.pixels = [read_image(record.source, self.model.image_size) for record in self.records]
        texts = self.model.encode_texts([record.captions[0] for record in self.records])
        self.words = [texts.words[i, : int(texts.mask[i].sum())] for i in range(len(texts.words))]
        self.tokens = torch.cat([self.encode(pixels) for pixels in self.pixels])

    def encode(self, pixels: Tensor) -> Tensor:
        """(1, P + N, C) of one photo."""
        return self.model.encode_pixels(pixels[None].float() / 255)

    def scores(self) -> Tensor:
        """(photos, captions)."""
        side = self.net.encode_images(self.tokens)
        return torch.cat([self.net.score(side, Texts.of(words[None])).similarity for words in self.words], dim=1)

    def kept(self) -> list[Tensor]:
        """The cells that the caption of each photo keeps of it."""
        sides = (self.net.encode_images(self.tokens[i : i + 1]) for i in range(len(self.tokens)))
        made = (self.net.select(side, Texts.of(words[None])) for side, words in zip(sides, self.words, strict=True))
        return [found[0].keep[0, 0].bool().nonzero().flatten() for found in made]

    def places(self, scores: Tensor, cells: list[Tensor] | None) -> list[int]:
        """The place at which each caption finds its photo, painted over at `cells`, among the others as they are."""
        found = []
        for i, words in enumerate(self.words):
            own = scores[i, i]
            if cells is not None:
                tokens = self.encode(painted(self.pixels[i], cells[i], self.grid))
                own = self.net.score(self.net.encode_images(tokens), Texts.of(words[None])).similarity[0, 0]
            others = torch.cat([scores[:i, i], scores[i + 1 :, i]])
            found.append(int((others >= own).sum()))
        return found

    def recalls(self, name: str, scores: Tensor, cells: list[Tensor] | None) -> Facts:
        """`places` as R@1 and R@10."""
        places = self.places(scores, cells)
        return {
            key: value
            for best in (1, 10)
            for key, value in mean_and_error(f"{name}_{best}", [float(place < best) for place in places]).items()
        }


def others_of(cells: Tensor, count: int) -> Tensor:
    """All cells but these."""
    mask = torch.ones(count, dtype=torch.bool)
    mask[cells] = False
    return mask.nonzero().flatten()


def four(dataset: RetrievalDataset, photos: list[int], size: tuple[int, int]) -> Tensor:
    """(3, H, W) uint8 of four photos, row by row."""
    half = (size[0] // 2, size[1] // 2)
    quarters = [read_image(dataset.records[photo].source, half) for photo in photos]
    return torch.cat([torch.cat(quarters[:2], dim=2), torch.cat(quarters[2:], dim=2)], dim=1)


def in_quarter(found: Explanation, quarter: int) -> tuple[float, float]:
    """Part of the kept patches, and of what content words gain, in one quarter of the picture."""
    mask = torch.zeros(found.grid, dtype=torch.bool)
    rows, columns = found.grid[0] // 2, found.grid[1] // 2
    top, left = divmod(quarter, 2)
    mask[top * rows : (top + 1) * rows, left * columns : (left + 1) * columns] = True
    inside, kept = mask.flatten(), torch.tensor(found.kept)
    heat = torch.tensor([word.heat for word in found.shown_words[0]]).clamp_min(0).sum(dim=0)
    return float((kept & inside).sum() / kept.sum()), float(heat[inside].sum() / heat.sum().clamp_min(1e-12))


def quarters(explainer: Explainer, dataset: RetrievalDataset, pictures: int) -> Facts:
    """`in_quarter` over pictures of four photos."""
    chance, parts = torch.Generator().manual_seed(0), []
    for number in range(pictures):
        photos, quarter = torch.randperm(len(dataset), generator=chance)[:4].tolist(), number % 4
        caption = dataset.records[photos[quarter]].captions[0]
        pixels = four(dataset, photos, explainer.model.image_size)
        parts.append(in_quarter(explainer.picture(pixels, caption), quarter))
    kept, heat = zip(*parts, strict=True)
    return {**mean_and_error("quarter_kept", list(kept)), **mean_and_error("quarter_heat", list(heat))}


def rsums(model: RetrievalModel, dataset: RetrievalDataset, guides: list[float], tell: Tell) -> None:
    """rSum of the whole data set with each value of the guide, and its difference from the first."""
    owner, texts = torch.as_tensor(dataset.image_of_caption), model.encode_texts(dataset.captions)
    plain = ImageFeatures(encode_images(model, dataset))
    net = cast(SlimmingHead, model.head).net
    for part in ("pixels", "described"):
        images = plain if part == "pixels" else replace(plain, **described(model, dataset))
        first: Tensor | None = None
        for value in guides:
            net.config = replace(net.config, own_guide=value)
            scores = model.score(images, texts)
            line: Facts = {f"rsum_{part}": round(recall(scores, owner).rsum, 2)}
            if first is None:
                first = scores
            else:
                change, error = difference(scores, first, owner)
                line |= {"change": round(change, 2), "change_error": round(error, 2)}
            tell(line, f"own_guide={value:g}")


def described(model: RetrievalModel, dataset: RetrievalDataset) -> dict[str, Tensor]:
    """The descriptions of the photos, as fields of `ImageFeatures`."""
    words, mask = model.encode_descriptions(dataset.dense)
    return {"dense": words, "dense_mask": mask}


@torch.no_grad()
def main() -> None:
    """Measure, print and append one line per value of the guide, and one for whole photos and random patches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept_patches", description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="base")
    parser.add_argument("--own-guide", type=float, nargs="*", default=[])
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--pictures", type=int, default=100, help="pictures of four photos")
    parser.add_argument("--rsum", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, dataset = from_pretrained(options.model).eval(), load_jsonl(options.data)
    explainer = Explainer(model)
    net, cells = explainer.net, explainer.grid[0] * explainer.grid[1]
    count = len(dataset) if options.rsum else min(options.photos, len(dataset))
    about = {"model": options.model, "data": Path(options.data).name, "photos": count}

    def tell(line: Facts, kind: str) -> None:
        append_line(options.out, {**about, "patches": kind, **line})
        print(kind, line, flush=True)

    guides = options.own_guide or [net.config.own_guide]
    if options.rsum:
        rsums(model, dataset, guides, tell)
        return
    gallery = Gallery(explainer, dataset, count)
    for value in guides:
        net.config = replace(net.config, own_guide=value)
        scores, kept = gallery.scores(), gallery.kept()
        line = gallery.recalls("shown", scores, [others_of(some, cells) for some in kept])
        line |= gallery.recalls("hidden", scores, kept)
        tell({**line, **quarters(explainer, dataset, options.pictures)}, f"own_guide={value:g}")
    chance = torch.Generator().manual_seed(0)
    random = [torch.randperm(cells, generator=chance)[: len(some)] for some in kept]
    tell({**gallery.recalls("whole", scores, None), **gallery.recalls("shown", scores, random)}, "random")


if __name__ == "__main__":
    main()
