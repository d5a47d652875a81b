"""A query never sees its target: what each protocol lets a score depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from seps.retrieval.config import ModelConfig
from seps.retrieval.data import load_jsonl
from seps.retrieval.evaluate.protocol import ProtocolError, View, view
from seps.retrieval.evaluate.run import evaluate, score_dataset
from seps.retrieval.heads import TextFeatures
from seps.retrieval.model import RetrievalModel


@pytest.fixture(scope="module", params=["default", "paper", "open_source"])
def model(request, encoders):
    torch.manual_seed(0)
    return RetrievalModel(ModelConfig(**encoders, embed_size=16, preset=request.param)).eval()


@pytest.fixture(scope="module")
def dataset(scenes):
    return load_jsonl(scenes).subset(range(12))


def change_owners(dataset):
    """The same images and captions in the same order, but half of the captions now belong to the next image."""
    captions = dataset.captions
    counts = [1] + [2] * (len(dataset) - 2) + [3]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    records = tuple(
        replace(record, captions=tuple(captions[start : start + count]))
        for record, start, count in zip(dataset.records, starts, counts, strict=True)
    )
    moved = replace(dataset, records=records)
    assert moved.captions == captions
    assert (moved.image_of_caption != dataset.image_of_caption).sum() > len(dataset) // 2
    return moved


@pytest.mark.parametrize("protocol", ["image", "none"])
def test_whose_a_caption_is_never_changes_a_score(model, dataset, protocol):
    moved = change_owners(dataset)
    scores = score_dataset(model, dataset, view(dataset, protocol))
    assert torch.equal(score_dataset(model, moved, view(moved, protocol)), scores)


def test_under_published_it_does(model, dataset):
    moved = change_owners(dataset)
    scores = score_dataset(model, dataset, view(dataset, "published"))
    again = score_dataset(model, moved, view(moved, "published"))
    assert not torch.allclose(again, scores, atol=1e-4)


def test_a_description_changes_its_own_row_alone(model, dataset):
    before = score_dataset(model, dataset, view(dataset, "image"))
    records = list(dataset.records)
    records[3] = replace(records[3], dense="the picture shows a grey side with a yellow circle")
    changed = replace(dataset, records=tuple(records))
    after = score_dataset(model, changed, view(changed, "image"))
    same = [i for i in range(len(dataset)) if i != 3]
    assert torch.equal(after[same], before[same])
    assert not torch.allclose(after[3], before[3], atol=1e-4)
    hidden = score_dataset(model, changed, view(changed, "none"))
    assert torch.equal(hidden, score_dataset(model, dataset, view(dataset, "none")))


def test_descriptions_attached_to_captions_are_refused(dataset):
    attached = [str(record.dense) for record in dataset.records for _ in record.captions]
    for protocol in ("image", "none"):
        with pytest.raises(ProtocolError, match="description"):
            view(dataset, protocol, caption_dense=attached)
    assert view(dataset, "published", caption_dense=attached).query_descriptions is not None


def test_views_and_features_have_no_room_for_a_leak(dataset):
    for protocol in ("image", "none"):
        assert view(dataset, protocol).query_descriptions is None
    assert view(dataset, "none").image_descriptions is None
    # `counts` are the sums of `mask`.
    assert set(TextFeatures.__dataclass_fields__) == {"words", "mask", "counts"}
    assert "query_descriptions" in View.__dataclass_fields__


def test_every_report_names_its_protocol_and_published_warns(model, dataset):
    for protocol in ("image", "none", "published"):
        report = evaluate(model, dataset, protocol)
        assert report.as_dict()["protocol"] == protocol
        assert ("answer" in (report.warning or "")) == (protocol == "published")


def test_company_never_changes_a_score(model, dataset):
    scores = score_dataset(model, dataset, view(dataset, "image"))
    chosen = random.Random(0).sample(range(len(dataset)), 4)
    part = dataset.subset(chosen)
    alone = score_dataset(model, part, view(part, "image"))
    owner = dataset.image_of_caption.tolist()
    columns = [c for i in chosen for c in range(len(owner)) if owner[c] == i]
    torch.testing.assert_close(alone, scores[chosen][:, columns], atol=2e-5, rtol=0)
