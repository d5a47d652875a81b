"""All pairs: one table per size and machine."""

from __future__ import annotations

import re
from typing import Any

from figures.raw import NO, NOT_RECORDED, OTHER, YES, Results, Row, link, mib, seconds, table

CALLS = (
    ("default, second time", "ours, as it comes: float32 by pairs of halves", YES),
    ("default, first time", "the same, first time in a process (compiles)", YES),
    ("half", 'ours, `precision="half"`', NO),
    ("half, 1,536 MiB", 'ours, `precision="half", memory=1536 * 2**20`', NO),
    ("half, 512 MiB", 'ours, `precision="half", memory=512 * 2**20`', NO),
    ("float32, 1,536 MiB", "ours, `memory=1536 * 2**20`", NO),
    ("factored float32", 'ours, `backend="factored"`: strict float32', NO),
)


def coco(files: Results) -> str:
    """5,000 x 25,000 on one H200."""
    raw, old = "defaults-h200.jsonl", "scoring-coco-h200.json"
    measured = {line["call"]: line for line in files.lines(raw) if "call" in line}
    default = measured["default, second time"]["seconds"]
    rows: list[Row] = []
    for name, told, is_default in CALLS:
        if name not in measured:
            continue
        line = measured[name]
        gap = f"{line['largest_below_flips']:.1e}"
        rows.append(
            [told, is_default, seconds(line["seconds"]), mib(line["peak_mib"]), gap, *_times(default, line), link(raw)]
        )
    beside = peers(files, raw)
    for told, line in beside.items():
        cells = [seconds(line["seconds"]), mib(line["peak_mib"]), "", *_times(default, line)]
        rows.append([told, OTHER, *cells, f"the same run, {link(raw)}"])
    here = {line["package"] for line in beside.values()}
    for line in files.json("elsewhere.json")["scoring"]:
        if any(f"({package} " in line["code"] for package in here):
            continue
        told = f"{line['code']}: {line['what']}"
        rows.append(
            [
                told,
                OTHER,
                seconds(line["seconds"]),
                "",
                "",
                *_times(default, line),
                f"elsewhere, {link('elsewhere.json')}",
            ]
        )
    best = files.json(old)
    line = next(row for row in best["rows"] if row["backend"] == "triton")
    work = line["tflops"] * line["seconds"]
    bounds = {
        "limit: its arithmetic in half precision": work / best["limits"]["half_tflops"],
        "limit: its arithmetic in strict float32": work / best["limits"]["float32_tflops"],
        "limit: bandwidth, half precision": line["share_of_bandwidth_limit"] * line["seconds"],
    }
    for told, value in bounds.items():
        rows.append([told, OTHER, seconds(value), "", "", *_times(default, {"seconds": value}), link(old)])
    full, half = (measured[f"{kind} against factored float32, all pairs"] for kind in ("float32", "half"))
    exact = (
        f"Of all {full['pairs_compared']:,} pairs {full['flips']:,} keep another patch in the default call than in "
        f"strict float32, and none differs by more than {full['largest_below_flips']:.1e}; in half precision "
        f"{half['flips']:,} pairs ({half['flips'] / half['pairs_compared']:.0e}) differ by more than 1e-3."
    )
    return table(
        ["what", "default call?", "seconds", "beyond inputs and output", "largest difference", "x default", "from"],
        rows,
        exact,
        *_about(beside),
    )


def peers(files: Results, name: str) -> dict[str, dict[str, Any]]:
    """Rows of plain MaxSim in a file of `benchmarks.speed.defaults`, by what is told of them; the last of each kind."""
    found = {}
    for line in files.lines(name):
        if "peer" in line:
            whole = line["captions_timed"] == line["captions"]
            part = "" if whole else f", timed on {line['captions_timed']:,} captions and scaled"
            found[f"plain MaxSim ({line['peer']}): half precision, {line['tokens']} tokens per image{part}"] = line
    return found


def _about(beside: dict[str, dict[str, Any]]) -> list[str]:
    """What plain MaxSim is, where the same run has rows of it."""
    if not beside:
        return []
    worst = max(line["largest_difference"] for line in beside.values())
    return [
        "Plain MaxSim has one direction, no selection and no merging, and its tokens are normalised and rounded to "
        f"half precision before the clock starts; its scores differ from float32 by at most {worst:.1e}."
    ]


def _times(default: float, line: dict[str, Any]) -> list[str]:
    return [f"{line['seconds'] / default:.2f}"]


_KERNELS = ("norms_kernel", "held_norms_kernel", "align_kernel", "slot_align_kernel", "select_kernel")
"""As profiles name them; for a shape either the kernel that keeps an operand in shared memory, or the other."""


def kernels(files: Results) -> str:
    """Where the time of scoring goes, 512 x 25,000."""
    name, found = "defaults-profile-h200.txt", {}
    for part in re.split(r"\n(?=(?:float32|half), \d+ x \d+: )", files.text(name)):
        head = re.match(r"(float32|half), \d+ x \d+: ([\d.]+) ms, busy ([\d.]+) ms", part)
        if head:
            own = dict.fromkeys(_KERNELS, 0.0)
            for time, kernel in re.findall(r"^ *([\d.]+) ms +[\d.]+% +\d+ x +(\S+)", part, re.MULTILINE):
                if kernel in own:
                    own[kernel] += float(time)
            found[head[1]] = {"all": float(head[2]), "busy": float(head[3]), **own}
    rows = []
    for told, of in (
        ("norms", lambda one: one["norms_kernel"] + one["held_norms_kernel"]),
        ("alignment", lambda one: one["align_kernel"] + one["slot_align_kernel"]),
        ("selection", lambda one: one["select_kernel"]),
        ("matrix products and the rest", lambda one: one["busy"] - sum(one[k] for k in one if k.endswith("kernel"))),
        ("the GPU waits", lambda one: one["all"] - one["busy"]),
        ("together", lambda one: one["all"]),
    ):
        rows.append([told, *(f"{of(found[kind]):.0f}" for kind in ("float32", "half"))])
    return table(["512 x 25,000, ms", "float32", "half"], rows, f"Each alone and under the profiler ({link(name)}).")


def flickr(files: Results) -> str:
    """1,000 x 5,000 on one H200."""
    raw, recorded = "scoring-f30k-h200.json", "defaults-f30k-h200.jsonl"
    data = files.json(raw)
    shapes = {"vit224": "ViT-224", "swin224": "Swin-224", "vit384": "ViT-384"}
    rows: list[Row] = []
    if files.has(recorded):
        for line in files.lines(recorded):
            told = {
                "default, second time": ("ViT-224: ours, as it comes", YES),
                "half": ('ViT-224: ours, `precision="half"`', NO),
            }
            if line.get("call") in told:
                gap = f"{line['largest_below_flips']:.1e}"
                rows.append(
                    [*told[line["call"]], seconds(line["seconds"]), "", mib(line["peak_mib"]), gap, link(recorded)]
                )
        for told, line in peers(files, recorded).items():
            rows.append([told, OTHER, seconds(line["seconds"]), "", mib(line["peak_mib"]), "", link(recorded)])
    else:
        rows.append(["ours, as it comes", YES, NOT_RECORDED, "", "", "", ""])
    for shape, told in shapes.items():
        own = [row for row in data["rows"] if row["shape"] == shape]
        for row in own:
            if "seconds" in row:
                call = f'{told}: ours, `backend="{row["backend"]}", precision="{row["precision"]}"`'
                share = f"{row['share_of_arithmetic_limit']:.0%}"
                cells = [seconds(row["seconds"]), f"{row['times_reference']:,.0f}", mib(row["peak_mib"])]
                rows.append([call, NO, *cells, f"{row['largest_difference']:.1e}", share])
    absent = "was" if files.has(recorded) and peers(files, recorded) else "and plain MaxSim were"
    return table(
        [
            "what",
            "default call?",
            "seconds",
            "x our loop",
            "beyond inputs and output",
            "largest difference",
            "of the arithmetic limit",
        ],
        rows,
        f"The others with `memory=1536 * 2**20`, PyTorch {data['machine']['torch']} ({link(raw)}). "
        f"The published code {absent} not measured at this size.",
    )


def cores(files: Results) -> str:
    """All pairs on two CPU cores: plain MaxSim, the default call and forward in one run."""
    raw = "scoring-cpu.json"
    data = files.json(raw)
    rows: list[Row] = []
    for row in data["rows"]:
        plain, ours, faster, loop = (row["ways"][name] for name in ("maxsim", "default", "maxsim by oneDNN", "forward"))
        seconds = [way["us_per_pair"] * row["images"] * row["captions"] / 1e6 for way in (plain, ours)]
        rows.append(
            [
                f"{row['case']}, {row['images']:,} x {row['captions']:,}, {row['patches']} patches",
                f"{seconds[0]:.2f} s",
                f"**{seconds[1]:.2f} s**",
                f"**{ours['of_maxsim']:.2f}**",
                f"{faster['of_maxsim']:.2f}",
                f"{loop['of_maxsim']:.1f}",
                f"{ours['us_per_pair']:.1f}",
                f"{row['largest_difference']:.0e}, {row['flips']} of {row['compared']:,}",
            ]
        )
    return table(
        [
            "features",
            "plain MaxSim",
            "ours, the default call",
            "x plain MaxSim",
            "plain MaxSim by oneDNN",
            "`net.forward`",
            "our us per pair",
            "difference to forward, flips",
        ],
        rows,
        f"Columns 4 to 6 are multiples of the time of plain MaxSim. Threads: {data['machine']['threads']}. PyTorch "
        f"{data['machine']['torch']}. The best of several rounds in which each ran once ({link(raw)}).",
    )


def real(files: Results) -> str:
    """Real photos on two CPU cores."""
    raw = "real-cpu.json"
    data = files.json(raw)
    rows: list[Row] = []
    for described in (False, True):
        own = [row for row in data if row.get("description") is described]
        loop = next(row for row in own if row["backend"] == "reference")["us_per_pair"]
        for row in own:
            what = "with descriptions" if described else "pixels alone"
            default = row["backend"] == "auto" and row["precision"] == "float32"
            told = "our loop" if row["backend"] == "reference" else "ours" + ("" if default else ', `precision="half"`')
            gap = "" if row["largest_difference"] is None else f"{row['largest_difference']:.1e}"
            rows.append(
                [
                    f"{what}: {told}",
                    YES if default else NO,
                    f"{row['us_per_pair']:.0f} us",
                    f"{loop / row['us_per_pair']:.1f}",
                    gap,
                ]
            )
    steps = {row["training"]: row["milliseconds"] for row in data if "training" in row}
    for name, told in (("loop", "our loop"), ("scorer", "ours")):
        ratio = f"{steps['loop'] / steps[name]:.1f}"
        rows.append(
            [
                f"training step of the head, batch 32: {told}",
                YES if name == "scorer" else NO,
                f"{steps[name]:.0f} ms",
                ratio,
                "",
            ]
        )
    return table(
        ["what", "default call?", "per pair, or per step", "x our loop", "largest difference"], rows, link(raw)
    )
