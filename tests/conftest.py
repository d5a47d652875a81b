"""What every test shares: the golden figures, tiny encoders and scenes, one thread per process."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

# Processes that tests start inherit this, so that they round as the tests' own process does.
os.environ["OMP_NUM_THREADS"] = "1"
# Stores are compared with evaluations, which torch encodes; OpenVINO, by products of bfloat16, is tested on its own.
os.environ["SEPS_OPENVINO"] = "0"
# Encoded banks of background queries: those of this run alone, for every process of it.
if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers inherit it
    os.environ["HF_ASSETS_CACHE"] = tempfile.mkdtemp(prefix="seps-test-assets-")
    atexit.register(shutil.rmtree, os.environ["HF_ASSETS_CACHE"], ignore_errors=True)
if not torch.cuda.is_available():
    # Before anything imports triton: without a GPU its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
from single_files import module_of

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail where a test is skipped that tests/skips.py lacks")


def pytest_configure(config: pytest.Config) -> None:
    from skips import NoSkips, wanted

    # Only the process that ends the run: under xdist the workers report to it.
    if wanted(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NoSkips(), "no-skips")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from skips import report_untested

    report_untested(terminalreporter)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _switches() -> dict[str, Any]:
    """The settings of torch for a whole process that decide how it rounds."""
    return {
        "threads": torch.get_num_threads(),
        "float type": torch.get_default_dtype(),
        "products of float32": torch.get_float32_matmul_precision(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "plain attention": torch.backends.cuda.math_sdp_enabled(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    """A test that changes how this process rounds would change what the tests after it see."""
    before = _switches()
    yield
    assert _switches() == before


@pytest.fixture(scope="session", name="seps", params=["package", "annotated-zh"])
def _package_or_file(request: pytest.FixtureRequest) -> ModuleType:
    """The package, then one of the files that `seps modules` writes."""
    import seps

    return seps if request.param == "package" else module_of(request.param)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """One small Ray cluster for every test that needs one: starting it takes longer than they do."""
    import ray

    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is refused."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def own_registry() -> Iterator[None]:
    """A registry without the ideas of other tests; plugins that a test loads are forgotten."""
    from ideas import forget_plugins
    from seps import registry

    with mock.patch.dict(registry._IDEAS, clear=True):
        yield
        forget_plugins()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


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


@pytest.fixture(scope="session")
def encoders(tmp_path_factory) -> dict[str, str]:
    """Folders of a tiny vision and a tiny text encoder."""
    from tiny import save_text_encoder, save_vision_encoder

    root = tmp_path_factory.mktemp("encoders")
    return {"vision": str(save_vision_encoder(root / "vit")), "text": str(save_text_encoder(root / "bert"))}


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> Path:
    """JSONL of 48 scenes."""
    from tiny import make_scenes

    return make_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="session")
def dev_scenes(tmp_path_factory) -> Path:
    """JSONL of 24 other scenes."""
    from tiny import make_scenes

    return make_scenes(tmp_path_factory.mktemp("dev"), 24, seed=1, name="dev")
