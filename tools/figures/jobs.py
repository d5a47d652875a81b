"""The other jobs: training, indexing, searching, starting, and the tests on a GPU."""

from __future__ import annotations

from figures.raw import MODEL, NO, NOT_RECORDED, OTHER, YES, Results, Row, link, mib, table


def training(files: Results) -> str:
    """The training step on one H200."""
    raw = "training-h200.json"
    rows: list[Row] = []
    found = files.json(raw)["rows"]
    loops = {row["batch"]: row["ms"] for row in found if row["training"] == "loop"}
    for row in found:
        kind = "our loop" if row["training"] == "loop" else "ours"
        default = YES if kind == "ours" and row["precision"] == "float32" else NO
        times = f"{loops[row['batch']] / row['ms']:.1f}" if row["batch"] in loops else ""
        cells = [f"{row['ms']:,.1f}", mib(row["peak_mib"]), times]
        rows.append([f"{row['batch']:,}", f"{kind}, {row['precision']}", default, *cells])
    for row in files.json("elsewhere.json")["training"]:
        told = f"{row['code']}: {row['what']}, elsewhere"
        rows.append([str(row["batch"]), told, OTHER, f"{row['ms']:,.1f}", mib(1024 * row["peak_gib"]), ""])
    head = ["batch", "what", "default call?", "ms", "memory", "x our loop"]
    return table(head, rows, f"Raw: {link(raw)}, {link('elsewhere.json')}. The limit was not computed.")


def indexing(files: Results) -> str:
    """Photos per second of `seps index`, and of its encoder alone."""
    raw = "indexing-h200.json"
    rows: list[Row] = []
    measured = files.json(raw)
    for row in measured["rows"]:
        if row["workers"] is not None:
            continue
        chosen = "" if row["model"] == "base" else f" --model {row['model']}"
        cells = [f"{row['photos_per_second']:.1f}", f"{row['steady']:.1f}"]
        rows.append([f"`seps index{chosen}`", MODEL if chosen else YES, *cells])
    for model, rate in measured["encoder_alone"].items():
        rows.append([f"limit: the encoder of `{model}` alone, batches of 32", OTHER, f"{rate:,.0f}", ""])
    return table(["call", "default call?", "photos a second", "steady"], rows, f"One H200 ({link(raw)}).")


def peers(files: Results) -> str:
    """Other ways to find pictures by their patches."""
    raw = "peers-cpu.json"
    rows: list[Row] = []
    data = files.json(raw)
    # Times of a machine with other work say nothing of a way.
    quiet = data.get("load", float("inf")) < data["threads"]
    for row in data["rows"]:
        if "failed" in row:
            rows.append([f"{row['pictures']:,}", row["way"], *[NOT_RECORDED] * (4 if quiet else 3)])
            continue
        times = [f"{row['ms']:.1f}"] if quiet else []
        cells = [f"{row['recall']:.2f}", *times, f"{row['bytes']:,.0f}", mib(row["mib"])]
        rows.append([f"{row['pictures']:,}", row["way"], *cells])
    head = ["pictures", "way", "recall of exact", *(["ms per query"] if quiet else []), "bytes per picture"]
    about = (
        f"{data['queries']} captions, {data['patches']} patches per picture, pictures made of {data['photos']} real "
        f"photos, {data['threads']} CPU cores, PyTorch {data['torch']} ({link(raw)})."
    )
    return table([*head, "all pictures"], rows, about)


def cold_start(files: Results) -> str:
    """From the shell."""
    raw = "cold-start-cpu.json"
    rows: list[Row] = []
    for name, row in files.json(raw)["rows"].items():
        what, default = {
            "import torch": ("limit: `import torch` alone", OTHER),
            "search, mini": ("`seps search`: `mini`", MODEL),
            "search, base": ("`seps search`: `base`", YES),
            "search, base:vector": ("`seps search`: `base`, `--size vector`", "in a plain install"),
        }[name]
        rows.append([what, default, f"{row['median_wall']:.2f}", f"{row['ratio_wall']:.2f}"])
    return table(
        ["process", "default call?", "seconds", "x `import torch`"], rows, f"Two CPU cores, medians ({link(raw)})."
    )


def kernel_tests(files: Results) -> str:
    """The last run of the tests that need a GPU."""
    raw = "kernel-tests.json"
    runs = files.json(raw)["runs"]
    head = ["date", "commit", "device", "passed", "failed", "skipped"]
    if not runs:
        return table(
            head,
            [[NOT_RECORDED, "", "", "", "", ""]],
            f"`python -m benchmarks.speed.kernel_tests` records a run ({link(raw)}).",
        )
    run = runs[-1]
    cells = [
        run["date"],
        f"`{run['commit']}`",
        run["device"],
        *(str(run[name]) for name in ("passed", "failed", "skipped")),
    ]
    failed = [f"Failed: {', '.join(run['names_of_failed'])}."] if run["names_of_failed"] else []
    return table(head, [cells], f"PyTorch {run['torch']}, Triton {run['triton']} ({link(raw)}).", *failed)
