"""ONNX files of models, run by onnxruntime on fixed inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probes.bench import Bench
from probes.fixtures import trained
from probes.registry import probe

MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "open source": {"model__preset": "open_source"},
    "no description": {"model__slimming": {"dense": "none"}},
}


def outputs(folder: Path) -> dict[str, Any]:
    """What every ONNX file of a folder computes from inputs by seed."""
    import numpy as np
    import onnxruntime

    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.onnx")):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        random, given = np.random.default_rng(3), {}
        for entry in session.get_inputs():
            shape = [size if isinstance(size, int) else 3 for size in entry.shape]
            if "int" in entry.type:
                value = np.minimum(random.integers(1, 3, shape), 3).astype(np.int64 if "64" in entry.type else np.int32)
            elif "bool" in entry.type:
                value = np.ones(shape, bool)
            else:
                value = random.random(shape, np.float32)
            given[entry.name] = value
        made = session.run(None, given)
        found[path.name] = {"inputs": sorted(given), "outputs": list(made)}
    return found


@probe("exported", each=MODELS)
def model(bench: Bench, name: str) -> dict[str, Any]:
    """`seps export` of a tiny trained model."""
    out = bench.scratch / f"onnx {name}"
    bench.seps("export", trained(bench, name, **MODELS[name]) / "model", "-o", out)
    return {"files": sorted(path.name for path in out.rglob("*.onnx")), "outputs": outputs(out)}
