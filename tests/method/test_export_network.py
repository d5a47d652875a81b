"""The network as ONNX: equal to torch in onnxruntime, at other sizes than it was traced with, ties included."""

from __future__ import annotations

import pytest
import torch

import seps
from messages import naming
from seps import export
from seps.method.encoded import Texts
from seps.method.select import hard_topk

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PRESETS = {
    "default": seps.SlimmingConfig.default,
    "paper": seps.SlimmingConfig.paper,
    "open_source": seps.SlimmingConfig.open_source,
}
SIZES = ((1, 1, 1, 1), (5, 2, 3, 4), (2, 7, 11, 30))
"""Images, texts, words, words of a description."""


def make_net(preset: str, prefix: int = 1, **overrides) -> seps.PatchSlimming:
    torch.manual_seed(0)
    sizes = {"embed_size": 16, "num_patches": 12, "sparse_ratio": 0.5, "aggr_ratio": 0.5, "num_prefix_tokens": prefix}
    return seps.PatchSlimming(PRESETS[preset](**{**sizes, **overrides})).eval()


def make_inputs(sizes, prefix=1, descriptions=True):
    images, texts, words, dense = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    inputs = {
        "images": torch.randn(images, prefix + 12, 16, generator=generator),
        "words": torch.randn(texts, words, 16, generator=generator),
        "lengths": torch.randint(1, words + 1, (texts,), generator=generator),
    }
    if descriptions:
        inputs["dense"] = torch.randn(images, dense, 16, generator=generator)
        inputs["dense_lengths"] = torch.randint(0, dense + 1, (images,), generator=generator)
        inputs["dense_lengths"][-1] = 0 if images > 1 else 1
    return inputs


def run(path, inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])


@pytest.mark.parametrize(
    ("preset", "prefix", "descriptions"),
    [
        ("default", 1, True),
        pytest.param("paper", 0, True, marks=pytest.mark.slow),
        pytest.param("open_source", 1, False, marks=pytest.mark.slow),
    ],
)
def test_score_is_that_of_the_network(tmp_path, preset, prefix, descriptions):
    net, path = make_net(preset, prefix), tmp_path / "score.onnx"
    export.export_score(net, path, descriptions=descriptions)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["score.onnx"]
    for sizes in SIZES:
        inputs = make_inputs(sizes, prefix, descriptions)
        torch.testing.assert_close(run(path, inputs), net(**inputs).detach(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_of_equal_scores_the_lower_index_is_kept(tmp_path):
    # A patch and its fourfold have the same cosines, but are not the same: which is kept shows in the score. K is 5.
    net, path = make_net("open_source", 0, sparse_ratio=0.4), tmp_path / "score.onnx"
    export.export_score(net, path, descriptions=False)
    inputs = make_inputs((4, 3, 5, 1), 0, descriptions=False)
    half = inputs["images"][:, :6].clone()
    expected = []
    for first, second in ((1.0, 4.0), (4.0, 1.0)):
        inputs["images"] = torch.stack([first * half, second * half], dim=2).flatten(1, 2)
        expected.append(net(**inputs).detach())
        torch.testing.assert_close(run(path, inputs), expected[-1], atol=1e-5, rtol=0)
    assert ((expected[0] - expected[1]).abs() > 1e-3).all()


@pytest.mark.parametrize("decision", ["binary", "gumbel"])
def test_decision_of_tied_scores(tmp_path, decision):
    net = make_net("default", decision=decision).sparse_net_cap
    scores = torch.tensor([[0.5] * 12, [0.1, 0.9] * 6, [0.0] * 11 + [1.0]])

    class Decide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, scores):
            return self.net.decide(scores)

    path = tmp_path / "decide.onnx"
    export.export_onnx(Decide().eval(), path, {"scores": scores}, {"scores": {0: "image"}}, ["kept"])
    kept = run(path, {"scores": scores})
    assert torch.equal(kept, net.decide(scores).detach())
    if decision == "gumbel":
        assert torch.equal(kept, hard_topk(scores, 0.5))
        assert kept[0].tolist() == [1.0] * 6 + [0.0] * 6


def test_an_export_leaves_the_module_as_it_was(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).train()
    module[0].eval()
    inputs = {"input": torch.randn(2, 4)}
    export.export_onnx(module, tmp_path / "module.onnx", inputs, {"input": {0: "row"}}, ["output"])
    assert [part.training for part in module.modules()] == [True, False, True]
    assert export.largest_difference(module.eval(), tmp_path / "module.onnx", inputs) < 1e-6


def test_pairs_are_the_diagonal():
    for preset in PRESETS:
        net, inputs = make_net(preset), make_inputs((4, 4, 6, 5))
        side = net.encode_images(inputs["images"], dense=inputs["dense"], dense_lengths=inputs["dense_lengths"])
        mask = torch.arange(6)[None] < inputs["lengths"][:, None]
        pairs = net.score(side, Texts.of(inputs["words"][None], mask[None])).similarity[:, 0]
        torch.testing.assert_close(pairs, net(**inputs).diagonal(), atol=1e-6, rtol=0)


def test_what_has_no_file_is_refused_in_a_sentence(monkeypatch, tmp_path):
    with pytest.raises(export.ExportError, match="audio"):
        export.export_score(make_net("default", extra_guides={"audio": 0.1}), tmp_path / "score.onnx")
    with pytest.raises(export.ExportError, match="description"):
        export.export_score(make_net("default", dense="none"), tmp_path / "score.onnx", descriptions=True)
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(export.ExportError, match=naming("seps[export]")):
        export.export_score(make_net("default"), tmp_path / "score.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ideas_of_ones_own_are_exported_with_the_network(tmp_path):
    class Even:
        form = "scores"

        def __call__(self, scores, count, valid):
            return (torch.arange(scores.shape[-1]) % 2 == 0).float().expand_as(scores)

    class Largest:
        form = "maxima"

        def __call__(self, best, mask):
            return (best if mask is None else best.masked_fill(~mask, -1.0)).amax(dim=-1)

    plain = make_net("default")
    net, path = seps.PatchSlimming(plain.config, decision=Even(), alignment=Largest()).eval(), tmp_path / "score.onnx"
    export.export_score(net, path)
    inputs = make_inputs(SIZES[1])
    torch.testing.assert_close(run(path, inputs), net(**inputs).detach(), atol=1e-5, rtol=0)
