"""Explanations: the shares sum to the score, of every kind of slimming network, and name what matters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from messages import naming
from seps.cli.main import call
from seps.method.config import SlimmingConfig
from seps.method.encoded import Texts
from seps.method.network import PatchSlimming
from seps.photos.search.searcher import Searcher
from seps.retrieval.explain.explanation import Explanation
from seps.retrieval.explain.picture import draw, make_panels
from seps.retrieval.explain.shares import shares
from stores import explain_file, explain_row, gallery, index, model, model_folder, paint

SHAPE = {"embed_size": 16, "num_patches": 12, "num_prefix_tokens": 2, "aggr_ratio": 0.5}
CONFIGS = {
    "default": SlimmingConfig(**SHAPE),
    "paper": SlimmingConfig.paper(**SHAPE),
    "paper, pooled": SlimmingConfig.paper(**SHAPE, pooled=1.5),
    "open source": SlimmingConfig.open_source(**SHAPE),
    "leaky tokens": SlimmingConfig(**{**SHAPE, "num_prefix_tokens": 0}, similarity="leaky", decision="binary"),
    "all kept": SlimmingConfig(**SHAPE, sparse_ratio=1.0),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("described", [True, False])
def test_shares_sum_to_the_score(name: str, described: bool) -> None:
    net = PatchSlimming(CONFIGS[name]).eval()
    images = torch.randn(1, net.config.num_prefix_tokens + 12, 16)
    words = torch.randn(7, 16)
    dense = torch.randn(1, 5, 16) if described else None
    side = net.encode_images(images, dense=dense, dense_lengths=[4] if described else None)
    score = float(net.score(side, Texts.of(words[None])).similarity.detach())
    found = shares(net, side, words)
    assert found.score == pytest.approx(score, abs=1e-4)
    assert sum(found.terms.values()) == pytest.approx(score, abs=1e-4)
    assert found.patches.shape == (7, 12)
    assert found.description.shape == (7, 4 if described and net.config.dense == "tokens" else 0)
    assert (found.rest != 0) == (net.config.alignment == "topk")
    assert float(found.elsewhere.abs().sum()) > 0 or net.config.num_prefix_tokens == 0


def test_a_dropped_patch_adds_only_to_the_mean_and_the_extra_token() -> None:
    net = PatchSlimming(SlimmingConfig(**{**SHAPE, "num_prefix_tokens": 0}, pooled=0.0)).eval()
    side = net.encode_images(torch.randn(1, 12, 16))
    found = shares(net, side, torch.randn(3, 16))
    assert found.kept.sum() == 6
    assert (found.groups[:, ~found.kept] == 0).all()
    torch.testing.assert_close(found.groups.sum(dim=1), torch.ones(len(found.groups)))


def check_sums(found: Explanation, score: float) -> None:
    assert found.score == pytest.approx(score, abs=1e-4)
    assert sum(part.contribution for part in found.words) + found.rest == pytest.approx(score, abs=1e-4)
    by_image = sum(found.patches) + found.elsewhere + sum(part.contribution for part in found.description)
    assert by_image + found.rest == pytest.approx(score, abs=1e-4)
    assert [sum(column) for column in zip(*[part.heat for part in found.words], strict=True)] == pytest.approx(
        found.patches, abs=1e-5
    )


@pytest.mark.parametrize("keep", [None, 5])
def test_stored_images(tmp_path: Path, keep: int | None) -> None:
    """The explanation of a stored image has the score that the search gave it."""
    index(gallery(tmp_path / "g", 4, described=2), tmp_path / "s", patches=keep)
    searcher = Searcher(tmp_path / "s", model())
    for hit in searcher.search("an unbelievable dog, running!", k=4):
        found = explain_row(searcher, hit.id, "an unbelievable dog, running!")
        check_sums(found, hit.score)
        assert [part.word for part in found.words if not part.special] == [
            "an", "unbelievable", "dog", ",", "running", "!",
        ]  # fmt: skip
        assert len(found.kept) == 9 and sum(found.stored) == (keep or 9)
        assert not any(kept and not there for kept, there in zip(found.kept, found.stored, strict=True))


def test_picture_and_drawing(tmp_path: Path) -> None:
    path = paint(tmp_path / "p.jpg", 3, (120, 80))
    found = explain_file(model(), path, "a dog", "Two words and a dog.")
    check_sums(found, found.score)
    assert found.grid == (3, 3) and found.description[1].word == "Two"
    sheet = draw(found, Image.open(path))
    assert sheet.width > 1000 and sheet.height > 300
    with pytest.raises(ValueError, match="caption"):
        explain_file(model(), path, " ")


def test_lists_for_people_name_the_words_that_a_picture_can_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Function words, commas and the tokenizer's marks are one line, and the lines still sum to the score."""
    path, sentence = paint(tmp_path / "p.jpg", 3, (120, 80)), "the dog is running, on a beach"
    found = explain_file(model(), path, sentence)
    named, others = found.shown_words
    assert [part.word for part in named] == ["dog", "running", "beach"]
    assert [part.word for part in others if not part.special] == ["the", "is", ",", "on", "a"]
    assert sum(part.contribution for part in named + others) + found.rest == pytest.approx(found.score, abs=1e-4)
    panels = make_panels(found, Image.open(path))[3:]
    assert [panel.title for panel in panels[:3]] == ["dog", "running", "beach"] and len(panels) == 4
    assert call("explain", [str(path), sentence, "--model", model_folder()]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    listed = dict(line.rsplit(maxsplit=1) for line in lines if line.startswith("  "))
    assert list(listed) == ["  dog", "  running", "  beach", "  (other words)"]
    assert sum(map(float, listed.values())) == pytest.approx(float(head.split()[1].rstrip(";")), abs=3e-3)


def test_a_sentence_of_function_words_alone_is_listed(tmp_path: Path) -> None:
    path = paint(tmp_path / "p.jpg", 3, (120, 80))
    found = explain_file(model(), path, "what is that")
    named, others = found.shown_words
    assert [part.word for part in named if not part.special] == ["what", "is", "that"] and not others


def test_masking_the_named_patches_lowers_the_score() -> None:
    """Taking away the patches that add most lowers the score more than taking away those that add least."""
    net = PatchSlimming(SlimmingConfig(**{**SHAPE, "num_prefix_tokens": 0, "num_patches": 12})).eval()
    drops = []
    for seed in range(10):
        torch.manual_seed(seed)
        images, words = torch.randn(1, 12, 16), torch.randn(4, 16)
        side = net.encode_images(images)
        found = shares(net, side, words).patches.sum(dim=0)
        order = found.argsort(descending=True)
        for chosen in (order[:3], order[-3:]):
            mask = torch.ones(1, 12, dtype=torch.bool)
            mask[0, chosen] = False
            masked = net.score(net.encode_images(images, patch_mask=mask), Texts.of(words[None]))
            drops.append(found.sum() - masked.similarity[0, 0])
    assert torch.stack(drops[0::2]).mean() > torch.stack(drops[1::2]).mean() + 0.05


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = paint(tmp_path / "p.jpg", 3), tmp_path / "out.png"
    assert call("explain", [str(path), "a dog", "-o", str(out), "--model", model_folder(), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert sum(part["contribution"] for part in values["words"]) == pytest.approx(values["score"], abs=1e-4)
    assert Image.open(out).format == "PNG"
    with pytest.raises(ValueError, match=naming(".png")):
        call("explain", [str(path), "a dog", "-o", "out.pdf", "--model", model_folder()])
