"""Model folders go to a hub and come back: by the hub's own client, from a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seps
from hub_server import hub_server
from seps.retrieval.config import ModelConfig
from seps.retrieval.model import RetrievalModel
from seps.retrieval.pretrained import from_pretrained, save_pretrained
from tiny import save_text_encoder, save_vision_encoder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub")
    vision, text = (str(save(folder / kind)) for kind, save in (("v", save_vision_encoder), ("t", save_text_encoder)))
    save_pretrained(RetrievalModel(ModelConfig(vision=vision, text=text, embed_size=16)), folder / "model")
    (folder / "model" / "holiday.jpg").write_bytes(b"a photo of somebody")
    (folder / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder / "model"


def run(program: str, address: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own: the client reads its addresses when it is imported."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(seps.__file__).parents[1]),
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_TOKEN": "a-token",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run([sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True)


PUSH = "import sys; from seps.hub import push_to_hub; print(push_to_hub(sys.argv[1], 'somebody/photos'))"
LOAD = """
import sys
from seps.retrieval.pretrained import from_pretrained
model = from_pretrained("somebody/photos")
print(float(sum(value.double().sum() for value in model.state_dict().values())))
"""


@pytest.mark.slow
def test_a_folder_goes_to_the_hub_and_comes_back(saved, tmp_path):
    with hub_server() as hub:
        pushed = run(PUSH, hub.address, tmp_path / "a", str(saved))
        assert pushed.returncode == 0, pushed.stderr
        assert "somebody/photos/commit" in pushed.stdout
        names = set(hub.files["somebody/photos"])
        assert {"config.json", "model.safetensors", "README.md", "text/tokenizer.json"} <= names
        assert not names & {"holiday.jpg", "pytorch_model.bin"}
        hub.files["somebody/photos"]["evil.bin"] = b"a pickle"
        loaded = run(LOAD, hub.address, tmp_path / "b")
        assert loaded.returncode == 0, loaded.stderr
        own = sum(value.double().sum() for value in from_pretrained(saved).state_dict().values())
        assert float(loaded.stdout) == pytest.approx(float(own))
        assert not list((tmp_path / "b").rglob("*.bin"))
        # What is in the cache is found without the hub.
    again = run(LOAD, hub.address, tmp_path / "b")
    assert again.returncode == 0 and again.stdout == loaded.stdout, again.stderr


@pytest.mark.slow
def test_the_library_loads_a_model_of_the_hub(saved, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from seps.retrieval.sentence_transformers import save

    save(from_pretrained(saved), tmp_path / "folder")
    program = """
import json
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("somebody/photos", trust_remote_code=True, device="cpu")
print(json.dumps(model.encode(["a red square"])[0].tolist()))
"""
    with hub_server() as hub:
        assert run(PUSH, hub.address, tmp_path / "a", str(tmp_path / "folder")).returncode == 0
        loaded = run(program, hub.address, tmp_path / "b")
    assert loaded.returncode == 0, loaded.stderr
    local = library.SentenceTransformer(str(tmp_path / "folder"), trust_remote_code=True, device="cpu")
    assert json.loads(loaded.stdout) == pytest.approx(local.encode("a red square").tolist(), abs=1e-6)


def test_what_goes_wrong_is_a_sentence(saved, tmp_path):
    program = PUSH.replace("print", "import seps.hub\ntry: print").replace(
        "'somebody/photos'))", "'somebody/photos'))\nexcept seps.hub.HubError as error: print('SENTENCE', error)"
    )
    with hub_server() as hub:
        hub.refuse = True
        refused = run(program, hub.address, tmp_path / "a", str(saved))
    gone = run(program, hub.address, tmp_path / "a", str(saved))
    for done in (refused, gone):
        assert done.stdout.startswith("SENTENCE") and "somebody/photos" in done.stdout, done.stderr
    missing = run(LOAD, hub.address, tmp_path / "a")
    assert "hf download somebody/photos" in missing.stderr
