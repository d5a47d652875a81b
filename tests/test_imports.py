"""What an import, or a command, does not load: each program runs in a process that has loaded nothing of ours.

One process is started for all of them and forks for each: first without torch, then with it, which loads for seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import seps

WITHOUT_TORCH = {
    "seps is light, also where an idea is registered": """
import seps
assert not {"torch", "lance", "PIL"} & set(sys.modules)
seps.register_decision("x")(print)
assert "torch" not in sys.modules
""",
    "options of commands": """
from seps.cli.main import parser_of
[*map(parser_of, ("eval", "index", "train", "reid"))]
import seps.retrieval.config
assert "torch" not in sys.modules
""",
    "help of light commands": """
from seps.cli.main import COMMANDS, main
for name in COMMANDS:
    if name not in ("train", "compare", "caption"):
        assert "usage" in help_of([name]).lower(), name
        assert "torch" not in sys.modules, name
""",
    "help lists the settings": """
sys.modules["torch"] = None
for words in (["train"], ["compare"], ["reid", "train"], ["reid", "eval"]):
    text = help_of(words)
    assert ("--train.epochs 10\\n" in text) == (words[-1] != "eval") and "--data." in text, words
""",
}
WITH_TORCH = {
    "seps is fast": """
import time, torch.nn
start = time.process_time()
import seps
assert time.process_time() - start < 1.0
assert "transformers" not in sys.modules
""",
    "rooms are reached without importing them first": """
import seps
assert callable(seps.metrics.cmc_map) and callable(seps.scoring.score_matrix)
assert seps.retrieval.__name__ == "seps.retrieval"
assert seps.PatchSlimming is seps.method.network.PatchSlimming
""",
    "a search loads no training": """
import seps.photos.search.searcher, seps.retrieval.pretrained
assert not {"seps.training.loop", "seps.retrieval.train.run"} & set(sys.modules)
""",
    "the library needs no jsonargparse": """
sys.modules["jsonargparse"] = None
import seps.method, seps.scoring, seps.method.losses, seps.training, seps.retrieval.config, seps.reid.config
assert seps.retrieval.config.RunConfig().train.epochs == 10
""",
    "re-identification does not load the drawing of sets": """
import seps.cli.reid, seps.reid.run, seps.reid.pretrained, seps.reid.show.pictures
assert not [name for name in sys.modules if name.startswith("seps.synthetic")]
""",
    # A machine with nothing but these two can draw sets and train on them: no picture file, no settings file.
    "drawing and the network need torch and numpy alone": """
for name in ("PIL", "yaml", "rich", "safetensors", "transformers"):
    assert name not in sys.modules
    sys.modules[name] = None
from seps.synthetic import SyntheticConfig, World, plan_shots
from seps.reid.data import IdentityBatches
from seps.reid.network.model import ReidModel
config = SyntheticConfig(6, 4, 2, 0, (32, 16), 0.4, 2, 1.0, 3.0, 90)
assert World(config).look(plan_shots(config)[0]).images[0].shape == (32, 16, 3)
""",
    "the library is found": "import seps\nassert seps.Library.__name__ == 'Library'",
}
FORKING = """
import io, json, os, sys, traceback
from contextlib import redirect_stdout
def help_of(words):
    from seps.cli.main import main
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, words
    return out.getvalue()
def outcome(program):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            exec(program, {"sys": sys, "help_of": help_of})
        except BaseException:
            os.write(writes, traceback.format_exc()[-4000:].encode())
            os._exit(1)
        os._exit(0)
    os.close(writes)
    said = open(reads, errors="replace").read()
    status = os.waitpid(child, 0)[1]
    return said or (f"ended with {status}" if status else "")
first, then = json.loads(sys.argv[1])
outcomes = {name: outcome(program) for name, program in first.items()}
import torch
outcomes |= {name: outcome(program) for name, program in then.items()}
print(json.dumps(outcomes))
"""


def outcomes(first: dict[str, str], then: dict[str, str]) -> dict[str, str]:
    """By program: the error that it ended with, or an empty text."""
    command = [sys.executable, "-c", FORKING, json.dumps([first, then])]
    environment = {"PYTHONPATH": str(Path(seps.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_what_is_not_loaded() -> None:
    planted = {"planted": "import seps.cli.main, torch\nassert 'torch' not in sys.modules"}
    found = outcomes({**WITHOUT_TORCH, **planted}, WITH_TORCH)
    assert "AssertionError" in found.pop("planted")
    assert found == dict.fromkeys([*WITHOUT_TORCH, *WITH_TORCH], "")
