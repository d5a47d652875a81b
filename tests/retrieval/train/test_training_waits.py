"""What a training step reads from the device: each value that is read makes the caller wait for a GPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seps.method.checks import values_unchecked
from seps.method.config import SlimmingConfig
from seps.method.network import PatchSlimming
from seps.retrieval.config import PartWeights, RunConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.train.task import RetrievalTask
from seps.scoring import score_with_gradient
from seps.training.config import TrainConfig
from stores import model

_WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
"""A value that Python reads (`int`, `bool`, `.item()`), and a result whose size is not known before."""


ON_CPU = 2
"""Read on a CPU alone, where each saves work: whether logits spread too far (`unsafe_images`), ties of the top K."""
TIES = 1
"""With noise: the ties of the selection, on a CPU alone."""


class Reads(TorchDispatchMode):
    """Counts what waits; `.cpu()` and `.tolist()` are methods that a CPU's tensors answer themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        for name in ("cpu", "tolist"):
            plain = getattr(Tensor, name)
            monkeypatch.setattr(Tensor, name, lambda tensor, plain=plain: self._noted(plain, tensor))

    def _noted(self, plain, tensor):
        self.count += 1
        return plain(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in _WAITING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("decision", "expected"), [("topk", 1 + ON_CPU), ("gumbel", TIES)])
def test_the_scorer_reads_one_value_and_none_with_noise(decision, expected, monkeypatch):
    """Whether logits spread too far for the factored form; with noise the form is known."""
    net = PatchSlimming(SlimmingConfig.default(decision=decision, embed_size=16, num_patches=12)).train()
    images, words = torch.randn(6, 13, 16).requires_grad_(), torch.randn(6, 5, 16).requires_grad_()
    dense, lengths = torch.randn(6, 4, 16), [5, 3, 4, 5, 2, 1]
    state = torch.get_rng_state()
    with Reads(monkeypatch) as reads, values_unchecked():
        found = score_with_gradient(net, images, words, lengths, dense=dense, dense_lengths=torch.tensor([4] * 6))
        found.similarity.square().sum().backward()
    assert reads.count == expected
    torch.set_rng_state(state)
    again = score_with_gradient(net, images, words, torch.tensor(lengths), dense=dense)
    assert torch.equal(found.similarity, again.similarity)


def test_a_step_reads_one_value(scenes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captions and descriptions are counted where the batch is made. A third of the images has no description."""
    data = load_jsonl(scenes)
    records = [replace(record, dense=None) if i % 3 == 0 else record for i, record in enumerate(data.records)]
    parts = PartWeights(fused=1.0, pixels=0.5, description=0.5, distill=0.1)
    own = copy.deepcopy(model())
    task = RetrievalTask(
        own,
        RunConfig(model=own.config, parts=parts, train=TrainConfig(batch_size=12)),
        replace(data, records=records),
        [],
    )
    batch = task.batch(0, 0, 0, 1)
    with torch.no_grad():
        _, _, mask, _, description_mask = task.encode(batch)
    assert batch.word_counts.tolist() == mask.sum(dim=1).tolist()
    assert batch.description_counts.tolist() == description_mask.sum(dim=1).tolist()
    assert 0 in batch.description_counts and batch.description_counts.any()
    features = tuple(value.detach() for value in task.encode(batch))
    with Reads(monkeypatch) as reads, values_unchecked():
        task.loss_from_features(features, batch, 0)[0].backward()
    assert reads.count == 1 + ON_CPU
