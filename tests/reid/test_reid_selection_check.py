"""`seps.reid.check`: shapes, cost and gradients of a selection inside a model, ours, DeMo's or written by hand."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from reid_toys import SENSORS, toy_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import seps.reid
from seps import MultiModalSDTPS
from seps.modules import single_file
from seps.reid import selection_check

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "drop_in_for_demo.py"
OLD_PYTHON = os.environ.get("SEPS_OLD_PYTHON", "/usr/bin/python3")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drop_in_for_demo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shots(count: int = 3) -> dict[str, torch.Tensor]:
    return {key: torch.randn(count, 3, 256, 128) for key in SENSORS}


def test_a_drop_in_is_checked(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.ThreeSensors(MultiModalSDTPS(**example.SETTINGS))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = seps.reid.check(model, shots())
    assert [(s.name, s.patches, s.kept, s.tokens, s.width) for s in found.sensors] == [
        (name, 128, [64, 64, 64], 26, 64) for name in ("rgb", "nir", "tir")
    ]
    assert found.problems == [] and "No problem found." in str(found)
    assert found.selection_parameters == sum(p.numel() for p in model.sdtps.parameters()) < found.parameters
    assert set(found.gradients) == {"plain", "Gumbel"}
    assert all(0 < value < 1 for parts in found.gradients.values() for row in parts.values() for value in row)
    # The model was not trained, switched or hooked.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and "slim" not in vars(model.sdtps)
    assert model.sdtps.rgb_sparse.decision == "topk"


def test_multiply_adds_are_those_of_the_layers() -> None:
    """A model that is one linear layer and the selection: counted by hand, the selection by its linear layers."""

    class Small(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.inner = nn.Linear(8, inner, bias=False)
            self.back = nn.Linear(inner, 8, bias=False)
            self.sdtps = MultiModalSDTPS(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.sdtps(*[self.back(self.inner(x))] * 3, *[x.mean(dim=1)] * 3)
            return torch.cat([part.mean(dim=1) for part in tokens[:3]], dim=1)

    x = torch.randn(2, 10, 8)
    counts = [seps.reid.check(Small(inner), x).multiply_adds for inner in (16, 24)]
    assert counts[0] is not None and counts[1] is not None
    # Each sample: 10 patches x 8 x 8 more inner channels, in and out.
    assert counts[1] - counts[0] == 10 * 8 * 8 * 2


def test_the_hand_written_selection_explodes_with_gumbel_and_ours_does_not(example: ModuleType) -> None:
    largest = []
    for selection in (example.HandWritten(**example.SETTINGS), MultiModalSDTPS(**example.SETTINGS)):
        torch.manual_seed(0)
        found = seps.reid.check(example.ThreeSensors(selection), shots())
        assert [s.tokens for s in found.sensors] == [26] * 3
        largest.append(max(found.gradients["Gumbel"]["predictor"]))
    assert largest[0] > 1e3 > 1 > largest[1]


def test_a_model_of_ours_is_checked() -> None:
    model = toy_model()
    found = seps.reid.check(model, torch.rand(4, 3, 3, 64, 32))
    assert [(s.patches, set(s.kept), s.tokens) for s in found.sensors] == [(8, {4}, 3)] * 3
    assert found.problems == []


def test_what_does_not_fit_is_named(example: ModuleType) -> None:
    class CallsTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sdtps = MultiModalSDTPS(8, 9, check_num_patches=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.sdtps(*[x] * 3, *[x.mean(dim=1)] * 3)
            return tokens[0].mean(dim=1)

    found = seps.reid.check(CallsTwo(), torch.randn(2, 10, 8))
    assert "rgb has 10 patches, the module was built for 9: is a CLS token left in?" in found.problems
    with pytest.raises(ValueError, match="has 0 modules"):
        seps.reid.check(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(ValueError, match="did not call its selection"):
        model = toy_model()
        model.embed = lambda *_: torch.zeros(1, requires_grad=True)  # type: ignore[method-assign, assignment]
        model.forward = lambda *_: torch.zeros(1, requires_grad=True)  # type: ignore[method-assign, assignment]
        seps.reid.check(model, torch.rand(1, 3, 3, 64, 32))


def test_the_products_of_attention_count_and_every_torch_counts_the_same() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.attend = nn.Conv2d(3, 16, 4, 4), nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            patches = self.cut(pixels).flatten(2).transpose(1, 2)
            return self.attend(patches, patches, patches, need_weights=False)[0]

    model, pixels = Attending(), torch.randn(2, 3, 16, 16)
    # 16 patches: cut; four projections; scores and their sums.
    expected = 16 * 48 * 16 + 4 * 16 * 16 * 16 + 2 * 16 * 16 * 16
    assert selection_check._multiply_adds(model, (pixels,), {}, 2) == expected
    with sdpa_kernel(SDPBackend.MATH):  # an older torch has no other
        assert selection_check._products(model.train(), (pixels,), {}, 2) == expected


@pytest.mark.slow
def test_the_example_and_the_check_run_on_torch_1_13_with_the_single_file(tmp_path: Path) -> None:
    """No seps there: the file of `seps modules`, the example and the check, copied into one folder."""
    version = [OLD_PYTHON, "-I", "-c", "import torch; print(torch.__version__)"]
    there = subprocess.run(version, capture_output=True, text=True)
    if not there.stdout.startswith("1.13."):
        pytest.skip(f"needs torch 1.13 in {OLD_PYTHON}: apt-get install python3-torch")
    (tmp_path / "seps_modules.py").write_text(single_file("annotated", "en"), encoding="utf-8")
    shutil.copy(EXAMPLE, tmp_path)
    shutil.copy(selection_check.__file__, tmp_path)
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "import drop_in_for_demo\n"
        "drop_in_for_demo.main()\n"
        "assert 'seps' not in sys.modules\n"
    )
    done = subprocess.run([OLD_PYTHON, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pattern 3: (4, 384), apart by" in done.stdout and "No problem found." in done.stdout
    assert "tir         128 ->    64 ->    26       64" in done.stdout
