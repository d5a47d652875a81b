"""A trained model scored word by word: its own head against head `maxsim` on the same features, without training.

    python -m benchmarks.maxsim_untrained --data dev.jsonl [--model base] [--features FILE.pt] --out FILE.jsonl

`maxsim` takes the model's weight of the description. Lines: rSum by pixels and with descriptions of both, and what
`maxsim` has more, with its standard error, paired by photo. `--features`: a file of `torch.save({"tokens": ...})` with
the photos encoded before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.lines import append_line
from seps.metrics import metrics_from_ranks, ranks, rsum_by_image
from seps.retrieval.data import load_jsonl
from seps.retrieval.eval.evaluate import encode_images
from seps.retrieval.heads import ImageFeatures, MaxSimHead, SlimmingHead
from seps.retrieval.pretrained import from_pretrained
from seps.scoring.blocks import scoring_memory


@torch.no_grad()
def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="base")
    parser.add_argument("--features", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, data = from_pretrained(options.model).eval(), load_jsonl(options.data)
    assert isinstance(model.head, SlimmingHead) and model.head.description_logit is not None
    other = MaxSimHead(model.head.net.config)
    assert other.trust is not None
    other.trust.copy_(model.head.description_logit)
    if options.features:
        tokens = torch.load(options.features, weights_only=True)["tokens"].float()
    else:
        tokens = encode_images(model, data)
    texts = model.encode_texts(data.captions)
    dense = model.encode_descriptions(data.dense)
    memory = scoring_memory(tokens.device)
    for name, images in (("pixels", ImageFeatures(tokens)), ("described", ImageFeatures(tokens, *dense))):
        if name == "described" and not any(data.dense):
            continue
        sums, found = [], []
        for head in (model.head, other):
            i2t, t2i = ranks(head.score(images, texts, memory=memory), data.image_of_caption)
            sums.append(rsum_by_image(i2t, t2i, data.image_of_caption))
            found.append(round(metrics_from_ranks(i2t, t2i).rsum, 2))
        gap = sums[1] - sums[0]
        line = {
            "model": options.model,
            "data": options.data.name,
            "score": name,
            "own": found[0],
            "maxsim": found[1],
            "more": round(float(gap.mean()), 2),
            "error": round(float(gap.std() / len(gap) ** 0.5), 2),
        }
        append_line(options.out, line)
        print(line, flush=True)


if __name__ == "__main__":
    main()
