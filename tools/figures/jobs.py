"""The other jobs: training, indexing, searching, starting, and the tests on a GPU."""

from __future__ import annotations

import re

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
        cells = [f"{row['ms']:,.1f}", mib(row["peak_mib"]), times, link(raw)]
        rows.append([f"{row['batch']:,}", f"{kind}, {row['precision']}", default, *cells])
    for row in files.json("elsewhere.json")["training"]:
        told, place = f"{row['code']}: {row['what']}", f"elsewhere, {link('elsewhere.json')}"
        cells = [f"{row['ms']:,.1f}", mib(1024 * row["peak_gib"]), "", place]
        rows.append([str(row["batch"]), told, OTHER, *cells])
    head = ["batch", "what", "default call?", "ms", "memory", "x our loop", "from"]
    return table(head, rows, "The limit was not computed.")


def indexing(files: Results) -> str:
    """Photos per second, and what a worker of Ray costs."""
    rows: list[Row] = []
    alone = False
    for name, machine in _INDEXING.items():
        if not files.has(name):
            rows.append(["`seps index`, `mini` and `base`", YES, machine, NOT_RECORDED, "", "", "", "", ""])
            continue
        measured = files.json(name)["rows"]
        local = {row["model"]: row for row in measured if row["workers"] is None}
        for row in measured:
            ray = "" if row["workers"] is None else f" --engine ray --workers {row['workers']}"
            chosen = "" if row["model"] == "base" else f" --model {row['model']}"
            told = f"`seps index{chosen}{ray}`" + ("" if row.get("store", True) else ", no store")
            default = NO if ray or not row.get("store", True) else MODEL if chosen else YES
            own = local[row["model"]]
            times = [_ratio(row.get(figure), own.get(figure)) for figure in ("steady", "processor_ms")]
            waits = "" if row["device_waits"] is None else f"{row['device_waits']:.0%}"
            steady = "" if row["steady"] is None else f"{row['steady']:.1f}"
            cells = [f"{row['photos_per_second']:.1f}", steady, *times, waits]
            rows.append([told, default, machine, *cells, link(name)])
        for model, rate in files.json(name).get("encoder_alone", {}).items():
            if rate is not None:
                alone = True
                told = f"limit: the encoder of `{model}` alone, batches of 32 in the memory of the GPU"
                rows.append([told, OTHER, machine, f"{rate:,.0f}", "", "", "", "", link(name)])
    for without, call, rate in re.findall(
        r"^\$ (SEPS_OPENVINO=0 )?seps index FOLDER --store [NOPQR](.*?) *\([\d.]+ s, ([\d.]+) images",
        files.text("index-cpu.txt"),
        re.MULTILINE,
    ):
        default = NO if "--no-bank" in call or not without else MODEL if "--model" in call else YES
        told = f"`seps index{call}`" + ("" if without else ", with `seps[fast]`")
        rows.append([told, default, "two CPU cores", rate, "", "", "", "", link("index-cpu.txt")])
    after = []
    if files.has("indexing-cpu.json") and "killed" in (data := files.json("indexing-cpu.json")):
        lost = data["killed"]
        after = [
            f"A worker of {lost['workers']} killed in the middle: of {lost['rows']} rows {lost['missing']} are "
            f"missing, {lost['other_facts']} have other facts and {lost['other_bits']} other bits of tokens than in "
            "the undisturbed run; the largest difference between vectors is "
            f"{lost['largest_difference_of_vectors']:.0e} ({link('indexing-cpu.json')})."
        ]
    head = ["call", "default call?", "machine", "photos a second", "steady", "x this process"]
    head += ["processor time per photo, x this process", "the GPU waits", "from"]
    return table(
        head,
        rows,
        *after,
        "The published code has no indexing"
        + ("." if alone else ", and the limit (the encoder's arithmetic) was not computed."),
    )


def indexing_steps(files: Results) -> str:
    """Where the time of a photo goes while indexing is steady."""
    rows: list[Row] = []
    for name, machine in _INDEXING.items():
        for row in files.json(name)["rows"] if files.has(name) else []:
            if row.get("step_ms") is not None:
                steps = [f"{row['step_ms'][step]:.2f}" for step in _STEPS]
                ends = [f"{row[end]:.1f} s" for end in ("starting", "finishing")]
                rows.append([f"`{row['model']}`, {machine}, {row['photos']:,} photos", *steps, *ends, link(name)])
    head = ["ms of a thread per photo", *_STEPS.values(), "until the first batch", "after the last", "from"]
    return table(head, rows or [[NOT_RECORDED, *[""] * (len(head) - 1)]])


_INDEXING = {
    "indexing-h200.json": "one H200",
    "indexing-cpu.json": "two CPU cores, `seps[fast]`, 320 photos",
}
_STEPS = {
    "decoding": "read and decode",
    "waiting": "wait for the GPU",
    "encoding": "encode",
    "levels": "levels over the bank",
    "packing": "pack",
    "writing": "write",
}


def _ratio(value: float | None, own: float | None) -> str:
    return "" if value is None or own is None else f"{value / own:.2f}"


def searching(files: Results) -> str:
    """One query."""
    raw = "search-cpu.json"
    data = files.json(raw)
    rows: list[Row] = []
    for name, part, images, told, default in (
        ("small, float16", "search", 964, "as it comes: float16, 200 candidates", MODEL),
        ("small, int8", "search", 964, "int8", NO),
        ("large, float16, noise alone", "large", 100_000, "as it comes", MODEL),
        ("large, int8, noise alone", "large", 100_000, "int8", NO),
    ):
        one = data[name][part]
        recall = one["recall"][str(one["default_candidates"])]
        stages = [f"{one[stage]:.0f}" for stage in ("text", "nearest", "fetch", "rerank", "total")]
        rows.append([f"{images:,}", told, default, *stages, f"{recall:.2f}"])
    for name in ("large, float16, noise alone", "large, int8, noise alone"):
        exact = data[name]["exact"]
        told = f"every picture scored (`--exact`), {'int8' if 'int8' in name else 'float16'}"
        rows.append(["100,000", told, NO, "", "", "", "", f"{exact['milliseconds']:,}", "1.00"])
    head = [
        "pictures",
        "what",
        "default call?",
        "text, ms",
        "nearest",
        "fetch",
        "re-rank",
        "together",
        "recall of the ten best",
    ]
    return table(
        head,
        rows,
        f"Two CPU cores, `mini` ({link(raw)}); the rows are from several runs, with other work beside some of them. "
        "The published code has no search: it scores every picture. More: [Search, measured](search-figures.md).",
    )


def cold_start(files: Results) -> str:
    """From the shell."""
    raw = "cold-start-cpu.json"
    rows: list[Row] = []
    for name, row in files.json(raw)["rows"].items():
        default = OTHER if name == "import torch" else YES if "base" in name else MODEL
        told = (
            "limit: `import torch` alone"
            if name == "import torch"
            else f"`seps search`: {name.removeprefix('search, ')}"
        )
        rows.append([told, default, f"{row['median_wall']:.2f}", f"{row['ratio_wall']:.2f}"])
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
