"""Write down what the software computes on fixed inputs, so that a refactoring can be shown to keep every number.

    python tools/identity.py record before.json     # on the tree before the change
    python tools/identity.py compare before.json    # on the tree after it: exit status 1 and the first differences

Only public names and command lines are used, so that files may move between the two calls. Numbers are compared bit by
bit, which holds on one machine with one set of installed packages.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

import seps  # noqa: E402
from seps.cli.main import main as run_command  # noqa: E402
from seps.scoring import score_matrix, score_with_gradient  # noqa: E402

TIMES = re.compile(r"\d+(\.\d+)? (s|ms|images a second|photos a second)\b|\d+(\.\d+)? images/s")
VOLATILE = (
    "seconds",
    "time",
    "decoding",
    "encoding",
    "own",
    "per_second",
    "speed",
    "elapsed",
    "peak",
    "memory",
    "rate",
    "disk_bytes",
    "ms",
)


def digest(*tensors: torch.Tensor) -> str:
    """sha256 of the bytes, shapes and dtypes of some tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        value = tensor.detach().cpu().contiguous()
        total.update(f"{tuple(value.shape)} {value.dtype}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return total.hexdigest()[:16]


def networks() -> Iterator[tuple[str, seps.PatchSlimming]]:
    """One small network per preset and per decision, weights by seed."""
    sizes = {"embed_size": 32, "num_patches": 16, "num_prefix_tokens": 1}
    presets: dict[str, Any] = {
        "paper": seps.SlimmingConfig.paper(**sizes),
        "open-source": seps.SlimmingConfig.open_source(**sizes),
        "default": seps.SlimmingConfig.default(**sizes),
        "binary": seps.SlimmingConfig.default(decision="binary", **sizes),
        "gumbel": seps.SlimmingConfig.paper(decision="gumbel", **sizes),
        "no-description": seps.SlimmingConfig.open_source(dense="none", **sizes),
    }
    for name, config in presets.items():
        torch.manual_seed(0)
        yield name, seps.PatchSlimming(config).eval()


def record_scores() -> dict[str, str]:
    """Scores of every backend, both top-k directions, the published pairing, and gradients."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(7, 17, 32, generator=generator)
    words = torch.randn(9, 8, 32, generator=generator)
    dense = torch.randn(7, 11, 32, generator=generator)
    paired = torch.randn(9, 11, 32, generator=generator)
    lengths = [8, 3, 5, 8, 1, 2, 7, 4, 6]
    described = torch.tensor([11, 5, 9, 1, 11, 3, 7])
    found: dict[str, str] = {}
    for name, net in networks():
        uses = net.config.dense != "none"
        own = {"dense": dense, "dense_lengths": described} if uses else {}
        with torch.no_grad():
            forward = net(images, words, lengths, **({"dense": dense, "dense_lengths": described} if uses else {}))
        found[f"{name}/forward"] = digest(forward if isinstance(forward, torch.Tensor) else forward[0])
        for backend in ("reference", "factored"):
            found[f"{name}/{backend}"] = digest(score_matrix(net, images, words, lengths, backend=backend, **own))
            found[f"{name}/{backend}/many"] = digest(
                score_matrix(net, images.repeat(3, 1, 1), words.repeat(20, 1, 1), lengths * 20, backend=backend)
            )
        found[f"{name}/bfloat16"] = digest(score_matrix(net, images, words, lengths, precision="bfloat16", **own))
        for query in ("text", "image"):
            best = score_matrix(net, images, words, lengths, topk=3, query=query, **own)
            found[f"{name}/topk-{query}"] = digest(best.scores, best.indices)
        if uses:
            found[f"{name}/published"] = digest(score_matrix(net, images, words, lengths, paired_dense=paired))
        inputs = images.clone().requires_grad_()
        gradient_own = {"dense": dense, "dense_lengths": described} if uses else {}
        scored = score_with_gradient(net, inputs, words, lengths, want_masks=True, **gradient_own)
        net.zero_grad(set_to_none=True)
        (
            scored.similarity * torch.linspace(-1, 1, scored.similarity.numel()).view_as(scored.similarity)
        ).sum().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        found[f"{name}/gradient"] = digest(scored.similarity, *scored.masks, inputs.grad, *gradients)
    return found


def record_sensors() -> dict[str, str]:
    """The module of the three sensors, and the compatible network."""
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randn(4, 32, 16, generator=generator) for _ in range(3)]
    means = [torch.randn(4, 16, generator=generator) for _ in range(3)]
    torch.manual_seed(0)
    module = seps.MultiModalSDTPS(embed_dim=16, num_patches=32).eval()
    with torch.no_grad():
        out = module(*tokens, *means)
    found: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for key in sorted(value):
                collect(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(out)
    return {"sensors": digest(*found)}


def command(scratch: Path, *words: str) -> dict[str, Any]:
    """Exit status and output of `seps WORDS`, without places and times."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = run_command(list(words))
        except SystemExit as end:
            status = int(end.code or 0) if not isinstance(end.code, str) else 1
    return {"status": status, "out": clean(out.getvalue(), scratch), "err": clean(err.getvalue(), scratch)}


def clean(text: str, scratch: Path) -> Any:
    """Text without the scratch folder and times; JSON as values without times."""
    with contextlib.suppress(ValueError):
        return without_times(json.loads(text.replace(str(scratch), "SCRATCH")))
    text = text.replace(str(scratch), "SCRATCH").replace(str(ROOT), "ROOT")
    return re.sub(r"[ \t]+", " ", TIMES.sub("TIME", text))


def without_times(value: Any) -> Any:
    """A JSON value without the entries that no two runs share."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in k for word in VOLATILE)}
        return {k: without_times(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def record_commands(scratch: Path) -> dict[str, Any]:
    """Every command on the shipped photos and on tiny models: outputs, losses, metrics, rows of the store."""
    from tiny import make_scenes, save_text_encoder, save_vision_encoder

    gallery = scratch / "gallery"
    shutil.copytree(ROOT / "src/seps/assets/gallery", gallery)
    for path in sorted(gallery.iterdir()):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    data, store, slim = str(gallery / "gallery.jsonl"), str(scratch / "store"), str(scratch / "slim")
    first = sorted(gallery.glob("*.jpg"))[0]
    found: dict[str, Any] = {}

    def take(name: str, *words: str) -> None:
        found[name] = command(scratch, *words)

    take("index", "index", str(gallery), "--store", store)
    take("index again", "index", str(gallery), "--store", store, "--json")
    take("index slim", "index", str(gallery), "--store", slim, "--patches", "20", "--words", "8", "--precision", "int8")
    take("status", "index", "--store", store, "--status", "--json")
    take("verify", "index", "--store", store, "--verify")
    found["store"], found["store slim"] = rows(store), rows(slim)
    for place in (store, slim):
        for number, query in enumerate(("a cup of coffee", "two dogs playing in a field", "the sea")):
            take(f"search {Path(place).name} {number}", "search", query, "--store", place, "--json", "-k", "7")
    take("search exact", "search", "a red flower", "--store", store, "--exact", "--json")
    take("search image", "search", "--image", str(first), "--store", store, "--json")
    take("search table", "search", "a cat", "--store", store, "-k", "3")
    picture = str(scratch / "why.png")
    take("explain", "explain", str(first), "a smiling astronaut", "-o", picture, "--json")
    found["explain picture"] = hashlib.sha256(Path(picture).read_bytes()).hexdigest()[:16]
    for protocol in ("none", "image", "published"):
        take(f"eval {protocol}", "eval", "--data", data, "--protocol", protocol, "--json", "-")
    take("eval table", "eval", "--data", data, "--words", "8")
    take("modules", "modules", "-o", str(scratch / "seps_modules.py"))
    scenes = make_scenes(scratch / "scenes", 40)
    dev = make_scenes(scratch / "dev", 12, seed=7, name="dev")
    vision, text = save_vision_encoder(scratch / "vision"), save_text_encoder(scratch / "text")
    settings = ["--model.vision", str(vision), "--model.text", str(text), "--model.image_size", "[32, 32]"]
    settings += ["--model.embed_size", "16", "--data.train", str(scenes), "--data.dev", f"[{dev}]"]
    settings += ["--train.batch_size", "8", "--train.epochs", "10", "--train.eval_every", "5", "--train.prefetch", "0"]
    for preset in ("default", "paper", "open_source"):
        out = scratch / f"run-{preset}"
        take(f"train {preset}", "train", "--out", str(out), "--model.preset", preset, *settings)
        found[f"losses {preset}"] = log_lines(out / "metrics.jsonl")
        take(f"eval {preset}", "eval", "--model", str(out / "model"), "--data", str(dev), "--json", "-")
    shots = str(scratch / "shots")
    take("reid synth", "reid", "synth", shots, "--identities", "12", "--images", "4", "--height", "64", "--width", "32")
    run, small = str(scratch / "reid"), ["data.identities=4", "data.images=2", "data.pad=2", "model.image_size=[64,32]"]
    recipe = ["--config", str(ROOT / "configs/reid/synthetic.yaml"), "--out", run, f"data.root={shots}", *small]
    take("reid train", "reid", "train", *recipe, "train.epochs=6", "train.eval_every=3", "--device", "cpu")
    found["losses reid"] = log_lines(scratch / "reid" / "metrics.jsonl")
    take("reid eval", "reid", "eval", run, "--missing", "--rerank", "--json", "--device", "cpu")
    rows_of = ["--only", "mean", "default", "--seeds", "0", "--dev", str(dev), "--data", str(scenes)]
    recipe_file = scratch / "recipe.yaml"
    recipe_file.write_text(
        f"model: {{vision: {vision}, text: {text}, image_size: [32, 32], embed_size: 16}}\n"
        "train: {batch_size: 8, epochs: 2, prefetch: 0}\n"
    )
    take("compare", "compare", "--config", str(recipe_file), "--out", str(scratch / "compared"), *rows_of)
    found["compare lines"] = log_lines(scratch / "compared" / "results.jsonl")
    take("help", "--help")
    return found


def log_lines(path: Path) -> list[Any]:
    """The lines of a run's log without times."""
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


def rows(store: str) -> dict[str, str]:
    """A digest of every column of a store, its rows in the order of their ids."""
    import lance

    table = lance.dataset(str(next(Path(store).glob("*.lance")))).to_table().sort_by("id")
    found = {"rows": str(len(table))}
    for column in table.column_names:
        values = json.dumps(table[column].to_pylist(), default=lambda value: value.hex())
        found[column] = hashlib.sha256(values.encode()).hexdigest()[:16]
    return found


def record(scratch: Path) -> dict[str, Any]:
    """Everything."""
    torch.set_num_threads(1)
    return {"scores": record_scores(), "sensors": record_sensors(), "commands": record_commands(scratch)}


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Where two records differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if key not in before or key not in after:
                yield f"{place}/{key}: only {'after' if key in after else 'before'}"
            else:
                yield from differences(before[key], after[key], f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif before != after:
        yield f"{place}: {str(before)[:300]!r} before, {str(after)[:300]!r} after"


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        now = json.loads(json.dumps(record(Path(folder))))
    if options.action == "record":
        options.file.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
        print(f"Written: {options.file}")
        return 0
    found = list(differences(json.loads(options.file.read_text()), now))
    print("\n".join(found) or "The same, bit by bit.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
