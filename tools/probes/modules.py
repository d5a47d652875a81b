"""The single file in each style and language: its checks, what it computes, and its text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from probes.bench import Bench
from probes.registry import Gone, probe
from probes.values import Prose

VARIANTS = ("annotated en", "annotated zh")
COMPUTE = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
made = importlib.import_module(sys.argv[2])
found = {"names": sorted(name for name in vars(made) if not name.startswith("_"))}
generator = torch.Generator().manual_seed(1)
images = torch.randn(4, 17, 32, generator=generator, requires_grad=True)
words, long = torch.randn(4, 8, 32, generator=generator), torch.randn(4, 11, 32, generator=generator)
lengths, long_lengths = torch.tensor([8, 3, 5, 1]), torch.tensor([11, 2, 7, 4])
for name, options in {"code": {}, "paper": {"use_paper_version": True}}.items():
    torch.manual_seed(0)
    net = made.CrossSparseAggrNet(embed_size=32, num_patches=16, **options)
    for mode in (True, False):
        torch.manual_seed(5)
        out = net.train(mode)(images, words, lengths, long, long_lengths)
        out = out if isinstance(out, torch.Tensor) else out[0]
        images.grad = None
        out.sum().backward()
        found[f"{name} {mode}"] = {"scores": out.tolist(), "gradient": images.grad.flatten().tolist()}
torch.manual_seed(0)
sensors = made.MultiModalSDTPS(embed_dim=16, num_patches=32).eval()
given = [torch.randn(2, 32, 16, generator=generator) for _ in range(3)]
given += [torch.randn(2, 16, generator=generator) for _ in range(3)]
out = sensors(*given)
flat = [value.flatten().tolist() for value in (out.values() if isinstance(out, dict) else out) if hasattr(value, "dim")]
found["sensors"] = flat
print(json.dumps(found))
"""


def written(bench: Bench, variant: str) -> Path:
    """The file of this style and language."""

    def make() -> Path:
        style, language = variant.split()
        path = bench.folder("modules") / f"modules_{style}_{language}.py"
        bench.seps("modules", "-o", path, "--style", style, "--language", language)
        return path

    return bench.once(f"modules {variant}", make)


def run(*words: object) -> str:
    """What a Python process prints. Raises Gone where it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Gone((done.stderr or done.stdout).strip().splitlines()[-1])
    return done.stdout


@probe("modules", each=VARIANTS)
def checks(bench: Bench, variant: str) -> Any:
    """What the file prints of itself when it is run."""
    return Prose(bench.clean(run(written(bench, variant))))


@probe("modules", each=VARIANTS)
def numbers(bench: Bench, variant: str) -> Any:
    """Scores and gradients that the file computes, and its names."""
    path = written(bench, variant)
    return json.loads(run("-c", COMPUTE, path.parent, path.stem))


@probe("modules", each=VARIANTS)
def text(bench: Bench, variant: str) -> Any:
    """The file itself."""
    return Prose(written(bench, variant).read_text(encoding="utf-8"))
