"""`seps compare`: train and measure a list of baselines over several seeds, and print one table."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> int:
    """Train what is not finished yet; results go to OUT/results.jsonl as they come, the table to OUT/table.md."""
    from seps.retrieval.compare import BASELINES

    parser = argparse.ArgumentParser("seps compare", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML of the recipe all entries share (as for seps train)")
    parser.add_argument("--data", required=True, help="JSONL of the training images")
    parser.add_argument("--dev", required=True, nargs="+", help="JSONL files to measure on")
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=list(BASELINES), default=list(BASELINES), help="entries to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", help="cpu, cuda, ...; default: a GPU if there is one")
    parser.add_argument("--keep-runs", action="store_true", help="keep the checkpoints")
    options = parser.parse_args(arguments)

    import torch

    from seps.cli.train import read_config
    from seps.retrieval.compare import finished, markdown, run_one, summarise
    from seps.retrieval.data.images import decode_all
    from seps.retrieval.training import read_data

    base = read_config(options.config, {"data.train": options.data, "data.dev": options.dev})
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results_path = out / "results.jsonl"
    done = {(result["name"], result["seed"]) for result in finished(results_path)}
    wanted = [(name, seed) for seed in options.seeds for name in options.only if (name, seed) not in done]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if wanted:
        data = read_data(base, say)
        size = base.data.size_to_decode(base.model.image_size or (224, 224))
        pixels = (decode_all(data[0], size), [decode_all(part, size) for part in data[1]])
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        for number, (name, seed) in enumerate(wanted, 1):
            result = run_one(name, base, seed, out / "runs", data, pixels, device=device, log=lambda _: None)
            with results_path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            figures = ", ".join(f"{key} {value:.1f}" for key, value in result["rsum"].items())
            say(f"[{number}/{len(wanted)}] {name} seed {seed}: {figures} ({result['seconds']:.0f} s)")
            if not options.keep_runs:
                shutil.rmtree(out / "runs" / f"{name}-{seed}", ignore_errors=True)
    table = markdown(summarise(finished(results_path)))
    (out / "table.md").write_text(table)
    print(table)
    return 0
