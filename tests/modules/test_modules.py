"""The single file: made from the sources, torch alone, identical results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seps
from seps.cli.main import main
from seps.modules.network import CrossSparseAggrNet

SNIPPET = """
import sys
import torch
sys.modules["seps"] = None  # any import of the package fails
img_features, text_features, text_lens = torch.load("inputs.pt", weights_only=True)
torch.manual_seed(0)
from seps_modules import CrossSparseAggrNet, MultiModalSDTPS, SEPSLoss
seps = CrossSparseAggrNet(embed_size=512, num_patches=196, use_paper_version=False)
seps.train();  sim, mask = seps(img_features, text_features, text_lens)
seps.eval();   sim = seps(img_features, text_features, text_lens)
paper = CrossSparseAggrNet(embed_size=512, num_patches=196, use_paper_version=True, has_cls=True)
loss = SEPSLoss(max_violation=True)(*paper(img_features, text_features, text_lens, img_features, None))
sensors = MultiModalSDTPS(512, 196)(*[img_features[:, 1:]] * 3, *[img_features[:, 0]] * 3)
torch.save([sim, mask, *loss, *sensors], "outputs.pt")
assert not [name for name in sys.modules if name.startswith("seps.")]
"""


def test_single_file_runs_alone_and_agrees(tmp_path: Path):
    assert main(["modules", "-o", str(tmp_path / "seps_modules.py")]) == 0
    inputs = (torch.randn(2, 197, 512), torch.randn(2, 7, 512), torch.tensor([3, 7]))
    torch.save(inputs, tmp_path / "inputs.pt")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    subprocess.run([sys.executable, "-W", "ignore", "snippet.py"], cwd=tmp_path, check=True)
    ours = torch.load(tmp_path / "outputs.pt", weights_only=True)

    torch.manual_seed(0)
    net = seps.CrossSparseAggrNet(512, 196, has_cls=True).train()
    sim, mask = net(*inputs)
    paper = seps.CrossSparseAggrNet(512, 196, use_paper_version=True, has_cls=True)
    loss = seps.SEPSLoss(max_violation=True)
    loss.ratio_loss._checked = True
    losses = loss(*paper(*inputs, inputs[0], None))
    sensors = seps.MultiModalSDTPS(512, 196)(*[inputs[0][:, 1:]] * 3, *[inputs[0][:, 0]] * 3)
    for a, b in zip(ours, [sim, mask, *losses, *sensors], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("has_cls", [None, False])
def test_the_readable_network_is_that_of_the_package(paper: bool, dual: bool, paired: bool, has_cls: bool | None):
    torch.manual_seed(0)
    options = {"use_paper_version": paper, "use_dual_aggr": dual, "has_cls": has_cls}
    ours, theirs = CrossSparseAggrNet(16, 12, 0.5, 0.5, **options), seps.CrossSparseAggrNet(16, 12, 0.5, 0.5, **options)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(3, 12 + (has_cls is None), 16, requires_grad=True)
    batch = [images, torch.randn(4, 6, 16), torch.tensor([6, 1, 3, 4])]
    batch += [torch.randn(4, 9, 16), torch.tensor([9, 2, 5, 1])] if paired else []
    found = []
    for net in (ours, theirs):
        similarity, masks = net.train()(*batch)
        (gradient,) = torch.autograd.grad(similarity.square().sum(), images)
        found.append([similarity, gradient, *(masks if isinstance(masks, tuple) else (masks,))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    assert ours.eval()(images, torch.zeros(0, 6, 16)).shape == (3, 0)


def test_unknown_command_is_a_sentence(capsys):
    assert main(["dance"]) == 2
    assert "'dance'" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main(["modules", "-o", "/no/such/folder/x.py"]) == 2
    assert "seps modules:" in capsys.readouterr().err


def test_help_reads_like_the_paper():
    for name in ("TokenSparse", "TokenAggregation", "DualTokenAggregation", "HRPA", "CrossSparseAggrNet"):
        text = getattr(seps, name).__doc__
        assert "Eq. " in text and "(B" in text and "Flow" in text, name
    for name in seps.__all__:
        assert (getattr(seps, name).__doc__ or "").strip(), name
