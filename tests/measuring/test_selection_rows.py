"""The rows of `benchmarks/selection_rows.py` that begin with the encoders' first weights: each trains a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.selection_rows import ROWS, task_of

from seps.retrieval.config import ModelConfig, RunConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.model import RetrievalModel
from seps.training import TrainConfig

FIRST = [name for name in ROWS if not name.startswith(("fast-", "fused-"))]


@pytest.mark.parametrize("name", FIRST)
def test_every_row_has_a_loss_and_gradients_at_the_patches(encoders, scenes, name):
    train = TrainConfig(epochs=40, batch_size=8, prefetch=0)
    config = ROWS[name].change(RunConfig(model=ModelConfig(**encoders, embed_size=16), train=train))
    assert config.train.epochs == (30 if name.startswith("long-") else 6 if name.startswith("336-") else 10)
    assert config.model.image_size == ((336, 336) if name.startswith("336-") else (224, 224))
    # The pictures of the tests are small, and so are the encoders.
    config = replace(config, model=replace(config.model, image_size=(32, 32)))
    torch.manual_seed(0)
    model = RetrievalModel(config.model)
    task = task_of(model, config, load_jsonl(scenes), [])
    batch = task.batch(0, 0, 0, 1)
    assert len(batch.ids) == (16 if name == "swapped" else 8)
    loss, _ = task.loss(batch, 0)
    loss.backward()
    gradient = model.project_patches[1].weight.grad
    assert torch.isfinite(loss) and gradient is not None and gradient.abs().max() > 0
