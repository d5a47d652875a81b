"""What every test shares: the golden figures and one thread per process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Golden(dict[str, torch.Tensor]):
    """Tensors of one golden file, with its settings and the reference's weights apart."""

    settings: dict[str, Any]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {k.removeprefix("state."): v for k, v in self.items() if k.startswith("state.")}


@pytest.fixture
def golden():
    """golden("open_source_vit") -> the tensors and settings of that file."""

    def load(name: str) -> Golden:
        tensors = Golden(load_file(GOLDEN / f"{name}.safetensors"))
        tensors.settings = json.loads((GOLDEN / "manifest.json").read_text())[name]
        return tensors

    return load
