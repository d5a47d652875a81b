"""Put the projection of short queries of a run into an embedded model, and write what follows from it.

    seps train --config configs/typed.yaml --start base --out runs/typed --data.train train.jsonl --data.dev dev.jsonl
    python tools/short_queries.py base runs/typed/model

All other tensors stay as they are, to the last bit. Without a run the digests alone are written, after a change of a
model card.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import sentence_side
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from seps.files import sha256
from seps.hub.folder import CONFIG, describe_weights, read_config
from seps.retrieval.embedded import EMBEDDED, embedded_folder
from seps.retrieval.pretrained import from_pretrained

PART = "project_short."


def put(run: Path, folder: Path) -> None:
    """Write the projection of the model in `run` into the weights of the one in `folder`, in 16 bits."""
    trained = from_pretrained(run).state_dict()
    new = {name: tensor.half().contiguous() for name, tensor in trained.items() if name.startswith(PART)}
    if not new:
        raise SystemExit(f"{run} has no projection of short queries: train it with configs/typed.yaml.")
    weights = folder / read_config(folder)["weights"]["file"]
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
        names = [name for name in file.keys() if not name.startswith(PART)]  # noqa: SIM118
        tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in names}
    save_file({**tensors, **new}, weights, metadata=metadata)


def state(folder: Path) -> None:
    """Write sizes and digests of the files into `config.json`."""
    place = folder / CONFIG
    config = json.loads(place.read_text(encoding="utf-8"))
    weights = folder / config["weights"]["file"]
    with safe_open(weights, "pt") as file:
        short = any(name.startswith(PART) for name in file.keys())  # noqa: SIM118
    if short:
        config["model"]["short_queries"] = True
    config["weights"] = describe_weights(weights)
    if "files" in config:
        config["files"] = {name: sha256(folder / name) for name in config["files"]}
    place.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(EMBEDDED))
    parser.add_argument("run", type=Path, nargs="?", help="folder of the trained model; none: digests alone")
    options = parser.parse_args()
    folder = Path(str(embedded_folder(options.name)))
    if options.run is not None:
        put(options.run, folder)
    state(folder)
    sentence_side.write(options.name)


if __name__ == "__main__":
    main()
