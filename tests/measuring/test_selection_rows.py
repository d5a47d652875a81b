"""The rows of `benchmarks/selection_rows.py`: each that begins with the encoders' first weights trains a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = """
import json, sys
from dataclasses import replace
import torch
from benchmarks.selection_rows import ROWS, task_of
from seps.retrieval.config import ModelConfig, RunConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.model import RetrievalModel
from seps.training import TrainConfig

encoders, scenes = json.loads(sys.argv[1]), sys.argv[2]
train = TrainConfig(epochs=40, batch_size=8, prefetch=0)
for name, row in ROWS.items():
    if name.startswith(("after-", "fast-", "fused-")):  # they begin with the weights of `base`
        continue
    config = row.change(RunConfig(model=ModelConfig(**encoders, embed_size=16), train=train))
    size = config.model.image_size
    # The pictures of the tests are small, and so are the encoders.
    config = replace(config, model=replace(config.model, image_size=(64, 64)))
    torch.manual_seed(0)
    model = RetrievalModel(config.model)
    task = task_of(model, config, load_jsonl(scenes), [])
    batch = task.batch(0, 0, 0, 1)
    loss, _ = task.loss(batch, 0)
    loss.backward()
    gradient = float(model.project_patches[1].weight.grad.abs().max())
    print(json.dumps([name, config.train.epochs, size[0], len(batch.ids), loss.item(), gradient]))
"""


def test_every_row_has_a_loss_and_gradients_at_the_patches(encoders, scenes):
    """In a process of its own: the rows register ideas and a suite."""
    given = [json.dumps({name: str(path) for name, path in encoders.items()}), str(scenes)]
    done = subprocess.run(
        [sys.executable, "-c", STEP, *given], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"mean", "keep-all", "random", "swapped", "maxsim", "per-word", "336-maxsim", "long-maxsim"} <= {
        row[0] for row in rows
    }
    for name, epochs, size, captions, loss, gradient in rows:
        large, long = name.startswith("336-"), name.startswith("long-")
        assert (epochs, size) == (6 if large else 30 if long else 10, 336 if large else 224), name
        assert captions == (16 if name == "swapped" else 8), name
        assert 0 < loss < 20 and gradient > 0, name


AFTER = """
import torch
from benchmarks.selection_rows import ROWS
from seps.encoders import parameters_by_depth
from seps.retrieval.config import ModelConfig, RunConfig
from seps.retrieval.model import freeze_parts
from seps.retrieval.pretrained import begin, from_pretrained

base = from_pretrained("base")
for name in (name for name in ROWS if name.startswith("after-")):
    config = ROWS[name].change(RunConfig(model=ModelConfig(vision="dinov2-s-focus", special_tokens=False)))
    assert config.start == "base" and config.train.epochs == 3 and config.parts.description == 0, name
    model = begin(config.model, config.start)
    for part in ("vision", "text"):
        own, first = getattr(model, part).state_dict(), getattr(base, part).state_dict()
        assert all(torch.equal(own[key], first[key]) for key in first), (name, part)
    if config.model.head == "slimming":
        own, first = model.head.net.aggr_net.state_dict(), base.head.net.aggr_net.state_dict()
        assert all(torch.equal(own[key], first[key]) for key in first), name
    freeze_parts(model, config)
    groups = parameters_by_depth(model.vision)
    learning = [any(part.requires_grad for part in group) for group in groups]
    # Of the embedding and the twelve blocks, those above the sixth block, and what stands behind the last.
    assert learning == [False] * 7 + [True] * (len(groups) - 7), (name, learning)
    print(name)
"""


def test_rows_after_base_begin_with_its_weights_and_train_the_upper_half():
    done = subprocess.run(
        [sys.executable, "-c", AFTER], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {f"after-{row}" for row in ("mean", "keep-all", "random", "no-own", "maxsim")}
