"""Heads, word weights and fused descriptions, trained on frozen features of a model: a limited experiment on a CPU.

    python -m benchmarks.frozen_rows --data DEV.jsonl --test LLAVA.jsonl --words TRAIN.jsonl --out rows.jsonl
    python -m benchmarks.frozen_rows --report rows.jsonl

Photos and texts are encoded once by the model and stay as they are; patches are merged into a grid of 8 x 8 means, or
of `--side`. DEV, whose photos the model has not seen in its training, is cut into three folds. Fold f is tested by what
was trained on the other two with seed f (the first 200 of its photos, for speed), and LLAVA by each of the three. Each
row trains the same steps on the same batches: one linear map of the words, from the identity, and its head, from the
model's own where it has one. The encoder was trained before with the default head: what another head could make of an
encoder trained with it is not measured here.

Rows by pixels alone: mean, keep-all, random (half of the patches), top-half, top-tenth, per-word (five patches for
every word), maxsim (one, the nearest); trained (half, and the predictor of Eq. 1 learns by a straight-through
gradient); swapped (the same, and every picture tells its caption from that caption with one object swapped for
another). `--captions`: the photos of DEV with other captions to train on, such as benchmarks/named_captions.py writes;
the tests ask those of DEV.
Rows with descriptions, a loss for each part: default (the default head with every patch kept, which is cheap); stop,
idf and learned, which are default with weights of words in Eq. 5 and in the mean word, of captions and descriptions;
mean-late (cosines of the two means, added); vsd (the description is fused into the image's one vector on the gallery
side, in the manner of VSD, arXiv 2507.08590). Row "start" is the model before training, with the head of default.
Each line: row, seed, data, and by photo what it adds to rSum. `--report` prints means and paired differences.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.frozen_features import SIDE, Frozen, Texts, freeze_set, packed, unpacked, with_captions
from benchmarks.lines import append_line
from benchmarks.word_weights import paired, photo_sums, token_idf
from seps.losses import InfoNCELoss
from seps.nn.guidance import min_max
from seps.retrieval.data import load_data
from seps.retrieval.heads import SlimmingHead
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained

RATIO, MERGED, POOLED = 0.5, 12, 2.0
SOFT, SWAPPED_WEIGHT = 0.1, 0.5
"""Temperature of the straight-through selection (scores lie in [0, 1]), and weight of the swapped captions' loss."""
BATCH, RATE, FOLDS = 64, 1e-4, 3


@dataclass(frozen=True)
class Row:
    """What a row selects, how words are weighed, and what is done with descriptions."""

    select: str
    words: str = "plain"
    described: str = ""
    swapped: bool = False
    chosen: int = 5
    """Patches that every word of "per-word" takes."""

    @property
    def ratio(self) -> float:
        return 0.1 if self.select == "tenth" else RATIO

    @property
    def score_range(self) -> float:
        return {"mean": 1.0, "per-word": 3.0}.get(self.select, 4.0)


ROWS = {
    "mean": Row("mean"),
    "keep-all": Row("all"),
    "random": Row("random"),
    "default": Row("all", described="late"),
    "stop": Row("all", "stop", "late"),
    "idf": Row("all", "idf", "late"),
    "learned": Row("all", "learned", "late"),
    "vsd": Row("mean", described="vsd"),
    "mean-late": Row("mean", described="late"),
    "per-word": Row("per-word"),
    "maxsim": Row("per-word", chosen=1),
    "top-half": Row("half"),
    "top-tenth": Row("tenth"),
    "trained": Row("trained"),
    "swapped": Row("trained", swapped=True),
}
MORE = ("maxsim", "top-tenth", "trained", "swapped")
"""Rows that are run where they are asked for."""


class FrozenHead(nn.Module):
    """The trained part of one row: maps of both sides, and what scores."""

    def __init__(self, model: RetrievalModel, row: Row) -> None:
        super().__init__()
        assert isinstance(model.head, SlimmingHead)
        net, width = model.head.net, model.config.embed_size
        self.row, self.prefix, self.beta = row, model.vision.num_prefix_tokens, net.config.beta
        self.read = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.read.weight)
        self.predictor = copy.deepcopy(net.sparse_net_cap).requires_grad_(row.select == "trained")
        self.merging = copy.deepcopy(net.aggr_net)
        last = self.merging.weight[
            -1
        ]  # every fourth of the model's merged patches: a grid has a quarter of its patches
        chosen = torch.linspace(0, last.out_features - 1, MERGED).long()
        last.weight, last.bias = nn.Parameter(last.weight[chosen].detach()), nn.Parameter(last.bias[chosen].detach())
        self.trust = float(net.description_weight.detach())
        self.gate = nn.Linear(width, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, math.log(math.e - 1))  # softplus of it is 1
        self.fuse = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))
        nn.init.zeros_(self.fuse[-1].weight)
        nn.init.zeros_(self.fuse[-1].bias)
        self.mix = nn.Parameter(torch.zeros(()))
        self.loss_pixels = InfoNCELoss(0.05 * row.score_range)
        self.loss_description = InfoNCELoss(0.05 * row.score_range)

    def weights(self, texts: Texts, words: Tensor) -> Tensor:
        """(T, M), zero at padding; each row sums to 1."""
        found = texts.mask.float()
        if self.row.words == "stop":
            found = found * ~texts.stop
            found = torch.where(found.sum(dim=1, keepdim=True) > 0, found, texts.mask.float())
        elif self.row.words == "idf":
            found = found * texts.idf
        elif self.row.words == "learned":
            found = found * F.softplus(self.gate(words)).squeeze(-1)
        return found / found.sum(dim=1, keepdim=True)

    def forward(self, tokens: Tensor, texts: Texts, dense: Texts | None) -> tuple[Tensor, Tensor | None]:
        """Scores (B, T) by pixels, and by the description where the row has one; of "vsd" one score, the fused."""
        words = self.read(texts.words)
        patches = tokens[:, self.prefix :]
        weights = self.weights(texts, words)
        caption = F.normalize(torch.einsum("tmc,tm->tc", words, weights), dim=-1)
        mean = F.normalize(patches.mean(dim=1), dim=-1)
        described = None
        if dense is not None and self.row.described:
            read = F.normalize(self.read(dense.words), dim=-1)
            share = self.weights(dense, read)
            described = F.normalize(torch.einsum("blc,bl->bc", read, share), dim=-1)
        if self.row.described == "vsd":
            if described is None:
                return mean @ caption.T, None
            together = mean + self.mix.exp() * described + self.fuse(torch.cat([mean, described], dim=1))
            return F.normalize(together, dim=-1) @ caption.T, None
        pooled = mean @ caption.T
        if self.row.select == "mean":
            return pooled, None if described is None else described @ caption.T
        unit = F.normalize(words, dim=-1)[texts.mask]  # (W, C)
        pixels = POOLED * pooled + self.aligned(tokens, patches, unit, texts, weights, caption)
        if described is None or dense is None:
            return pixels, None
        cosines = torch.einsum("wc,blc->bwl", unit, read).masked_fill(~dense.mask[:, None], -2.0)
        rest = (self.best_word(cosines, texts) * share[:, None]).sum(dim=2)
        return pixels, POOLED * (described @ caption.T) + self.by_word(cosines, texts, weights) + rest

    def by_word(self, cosines: Tensor, texts: Texts, weights: Tensor) -> Tensor:
        """Mean of `max_k A_jk` over the words: (B, W, K) -> (B, T)."""
        best = cosines.amax(dim=2) * weights[texts.mask]
        owner = texts.mask.nonzero()[:, 0]
        return best.new_zeros(len(best), len(texts.mask)).index_add(1, owner, best)

    def best_word(self, cosines: Tensor, texts: Texts) -> Tensor:
        """`max_j A_jk` over the words that may win: (B, W, K) -> (B, T, K)."""
        if self.row.words == "stop":
            alone = (texts.mask & ~texts.stop).sum(dim=1) == 0
            out = (texts.stop & ~alone[:, None])[texts.mask]
            cosines = cosines.masked_fill(out[None, :, None], -2.0)
        padded = cosines.new_full((len(cosines), *texts.mask.shape, cosines.shape[2]), -2.0)
        padded[:, texts.mask] = cosines
        return padded.amax(dim=2)

    def aligned(
        self, tokens: Tensor, patches: Tensor, unit: Tensor, texts: Texts, weights: Tensor, caption: Tensor
    ) -> Tensor:
        """Eq. 1-5 without the pooled part, in the factored form: (B, T)."""
        logits = self.merging.logits(patches)
        if self.row.select in ("all", "random"):  # no caption has a say: the tokens are those of the image
            keep, dropped = self.unasked(patches)
            shares = keep[:, :, None] * torch.softmax(logits.masked_fill(~keep[:, :, None].bool(), -1e4), dim=1)
            columns = torch.cat([shares, dropped[:, :, None]], dim=2)
            merged = torch.cat([tokens[:, : self.prefix], columns.transpose(1, 2) @ patches], dim=1)
            cosines = torch.einsum("bkc,wc->bwk", F.normalize(merged, dim=-1), unit)
            return self.by_word(cosines, texts, weights) + self.best_word(cosines, texts).mean(dim=2)
        products = torch.einsum("bnc,wc->bwn", patches, unit)  # (B, W, N)
        if self.row.select == "per-word":
            cosines = products / patches.norm(dim=-1).clamp_min(1e-12)[:, None]
            best = cosines.topk(self.row.chosen, dim=-1).values.mean(dim=-1, keepdim=True)
            return self.by_word(best, texts, weights)
        keep, dropped = self.selected(patches, caption)  # (B, T, N) each
        shares = (logits - logits.amax(dim=1, keepdim=True)).exp()  # (B, N, Q)
        owner = texts.mask.nonzero()[:, 0]
        gram = patches @ patches.transpose(1, 2)
        merged = (products * keep[:, owner]) @ shares
        extra = (products * dropped[:, owner]).sum(dim=2, keepdim=True)
        columns = torch.cat([keep[:, :, None] * shares.transpose(1, 2)[:, None], dropped[:, :, None]], dim=2)
        lengths = ((columns.flatten(1, 2) @ gram) * columns.flatten(1, 2)).sum(dim=2).clamp_min(1e-12).sqrt()
        lengths = lengths.unflatten(1, columns.shape[1:3])  # (B, T, Q + 1)
        cosines = torch.cat([merged, extra], dim=2) / lengths[:, owner]
        first = torch.einsum("bpc,wc->bwp", F.normalize(tokens[:, : self.prefix], dim=-1), unit)
        cosines = torch.cat([first, cosines], dim=2)
        return self.by_word(cosines, texts, weights) + self.best_word(cosines, texts).mean(dim=2)

    @torch.no_grad()
    def unasked(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """D (B, N) of all patches, or of half of them at random, and the even weights of the others."""
        if self.row.select == "all":
            return torch.ones(patches.shape[:2]), torch.zeros(patches.shape[:2])
        best = torch.rand(patches.shape[:2]).topk(round(RATIO * patches.shape[1]), dim=-1).indices
        keep = torch.zeros(patches.shape[:2]).scatter_(-1, best, 1.0)
        return keep, (1 - keep) / (1 - keep).sum(dim=1, keepdim=True)

    def selected(self, patches: Tensor, caption: Tensor) -> tuple[Tensor, Tensor]:
        """D (B, T, N), and the weights of the extra token over the others; of "trained" with a gradient."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.row.select == "trained"):
            return self._selected(patches, caption.detach())

    def _selected(self, patches: Tensor, caption: Tensor) -> tuple[Tensor, Tensor]:
        unit = F.normalize(patches, dim=-1)
        pairs = torch.einsum("bnc,tc->btn", unit, caption)
        own = min_max((unit * F.normalize(patches.mean(dim=1), dim=-1)[:, None]).sum(dim=-1))
        low, high = pairs.amin(dim=-1, keepdim=True), pairs.amax(dim=-1, keepdim=True)
        fixed = (1 - 2 * self.beta) * self.predictor.predict(patches) + 2 * self.beta * own
        scores = fixed[:, None] + self.beta * (pairs - low) / (high - low + 1e-8)
        best = scores.topk(round(self.row.ratio * scores.shape[-1]), dim=-1)
        keep = torch.zeros_like(scores).scatter_(-1, best.indices, 1.0)
        if self.row.select == "trained":
            soft = torch.sigmoid((scores - best.values[..., -1:].detach()) / SOFT)
            keep = keep + soft - soft.detach()
        dropped = (1 - keep) * (scores - scores.amax(dim=-1, keepdim=True)).exp()
        return keep, dropped


def train_row(model: RetrievalModel, row: Row, data: Frozen, seed: int, steps: int) -> FrozenHead:
    torch.manual_seed(seed)
    head = FrozenHead(model, row).train()
    generator = torch.Generator().manual_seed(1000 + seed)
    parameters = [part for part in head.parameters() if part.requires_grad]
    fast = ("gate", "predictor")
    slow = [part for name, part in head.named_parameters() if part.requires_grad and not name.startswith(fast)]
    # The gate starts at zero: at the rate of the maps, which start as the identity, it would stay there.
    groups = [{"params": slow}, {"params": list(head.gate.parameters()), "lr": 100 * RATE}]
    if row.select == "trained":
        groups.append({"params": list(head.predictor.parameters()), "lr": 10 * RATE})
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0)
    rise = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    first = torch.searchsorted(data.owner, torch.arange(len(data.tokens)))
    counts = torch.bincount(data.owner)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(data.tokens), generator=generator)
        rows, order = order[:BATCH], order[BATCH:]
        asked = first[rows] + (torch.rand(BATCH, generator=generator) * counts[rows]).long()
        dense = data.dense.take(rows) if row.described else None
        pixels, described = head(data.tokens[rows].float(), data.captions.take(asked), dense)
        loss = head.loss_pixels(pixels)
        if described is not None:
            loss = loss + 0.5 * head.loss_description(described)
        if row.swapped and data.swapped is not None:
            others = head(data.tokens[rows].float(), data.swapped.take(asked), None)[0]
            gap = (others.diagonal() - pixels.diagonal()) / (0.05 * row.score_range)
            loss = loss + SWAPPED_WEIGHT * F.softplus(gap).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 2.0)
        optimizer.step()
        schedule.step()
    return head.eval()


@torch.no_grad()
def scores_of(head: FrozenHead, data: Frozen) -> dict[str, Tensor]:
    """Scores (B, T) by protocol."""
    torch.manual_seed(0)
    texts = data.captions.take(torch.arange(len(data.owner)))
    alone, joint = [], []
    for start in range(0, len(data.tokens), 8):
        rows = torch.arange(start, min(start + 8, len(data.tokens)))
        tokens = data.tokens[rows].float()
        pixels, described = head(tokens, texts, data.dense.take(rows) if head.row.described else None)
        if head.row.described == "vsd":
            joint.append(pixels)
            pixels = head(tokens, texts, None)[0]
        elif described is not None:
            joint.append((1 - head.trust) * pixels + head.trust * described)
        alone.append(pixels)
    found = {"pixels": torch.cat(alone)}
    if joint:
        found["described"] = torch.cat(joint)
    return found


def report(path: Path) -> None:
    """Means over seeds, and differences from the rows that each is compared with, paired by photo."""
    found: dict[tuple[str, str, str], dict[int, Tensor]] = defaultdict(dict)
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found[entry["data"], entry["protocol"], entry["row"]][entry["seed"]] = torch.tensor(entry["photos"])
    folded = {data for data, _, _ in found} - {"dev-llava"}
    for (data, protocol, row), seeds in sorted(found.items()):
        sums = torch.stack([one.mean() for one in seeds.values()])
        text = f"{data:10s} {protocol:10s} {row:10s} {sums.mean():6.1f} +- {sums.std():.1f} ({len(sums)} seeds)"
        for other in ("start", "mean", "keep-all", "random", "default", "mean-late"):
            base = found.get((data, protocol, other))
            if base and other != row:
                gaps = [seeds[seed] - base[seed] for seed in sorted(set(seeds) & set(base))]
                # The folds hold different photos; of a set that every seed is tested on, a photo counts once.
                gap = torch.cat(gaps) if data in folded else torch.stack(gaps).mean(dim=0)
                change, error = paired(gap, torch.zeros_like(gap))
                text += f"  {other} {change:+.1f} +- {error:.1f}"
        print(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--model", default="base")
    parser.add_argument("--data")
    parser.add_argument("--test")
    parser.add_argument("--captions", help="the photos of --data with other captions, which the rows train on")
    parser.add_argument("--words", help="the training set whose captions say how common words are")
    parser.add_argument("--features", nargs="*", default=[], help="tokens encoded before: of --data, then of --test")
    parser.add_argument("--cache", type=Path, help="keep the frozen features here, for further calls")
    parser.add_argument("--image-size", type=int, help="px of a side; left out, the model's own")
    parser.add_argument("--side", type=int, default=SIDE, help="patches of a side after merging them into means")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--photos", type=int, default=200, help="tested of each fold")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(FOLDS)))
    parser.add_argument("--rows", nargs="+", default=[row for row in ROWS if row not in MORE], choices=list(ROWS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.report:
        report(options.report)
        return 0
    model = from_pretrained(options.model).eval()
    idf = token_idf(model, load_data(options.words))
    if options.cache and options.cache.exists():
        whole, test = (unpacked(one) for one in torch.load(options.cache))
    else:
        sets = []
        for place, file in enumerate((options.data, options.test)):
            tokens = torch.load(options.features[place])["tokens"] if options.features else None
            with torch.no_grad():
                size = {"side": options.side, "size": options.image_size}
                sets.append(freeze_set(model, load_data(file), Path(file).stem, idf, tokens, **size))
        whole, test = sets
        if options.cache:
            torch.save([packed(one) for one in sets], options.cache)
    with torch.no_grad():
        learned = with_captions(whole, model, load_data(options.captions), idf) if options.captions else whole
    print("encoded", flush=True)
    fold = torch.arange(len(whole.tokens)) % FOLDS

    def write(name: str, seed: int, head: FrozenHead, dev: Frozen, seconds: float) -> None:
        for data in (dev, test):
            for protocol, scores in scores_of(head, data).items():
                photos = photo_sums(scores, data.owner)
                entry = {"row": name, "seed": seed, "data": data.name, "protocol": protocol, "steps": options.steps}
                entry |= {
                    "size": options.image_size or model.image_size[0],
                    "side": options.side,
                    **({"captions": Path(options.captions).name} if options.captions else {}),
                    "batch": BATCH,
                    "rate": RATE,
                    "seconds": seconds,
                    "rsum": float(photos.mean()),
                }
                entry |= {"photos": [round(value, 2) for value in photos.tolist()]}
                append_line(options.out, entry)
                print(name, seed, data.name, protocol, f"{photos.mean():.1f}", f"{seconds:.0f} s", flush=True)

    for seed in options.seeds:
        train = learned.photos((fold != seed % FOLDS).nonzero()[:, 0])
        dev = whole.photos((fold == seed % FOLDS).nonzero()[: options.photos, 0])
        if "default" in options.rows:
            write("start", seed, FrozenHead(model, ROWS["default"]).eval(), dev, 0.0)
        for name in options.rows:
            start = time.process_time()
            head = train_row(model, ROWS[name], train, seed, options.steps)
            write(name, seed, head, dev, time.process_time() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
