"""All pairs: one table per size and machine."""

from __future__ import annotations

from typing import Any

from figures.raw import NO, OTHER, YES, Results, Row, link, mib, seconds, table

CALLS = (
    ("default, second time", "ours, as it comes: float32 by pairs of halves", YES),
    ("default, first time", "the same, first time in a process (compiles)", YES),
    ("half", 'ours, `precision="half"`', NO),
    ("half, 512 MiB", 'ours, `precision="half", memory=512 * 2**20`', NO),
    ("factored float32", 'ours, `backend="factored"`: strict float32', NO),
)


def coco(files: Results) -> str:
    """5,000 x 25,000 on one H200; multiples of plain MaxSim by torch."""
    raw, old = "defaults-h200.jsonl", "scoring-coco-h200.json"
    measured = {line["call"]: line for line in files.lines(raw) if "call" in line}
    beside = peers(files, raw)
    plain = min(line["seconds"] for told, line in beside.items() if "(torch " in told)

    def times(value: float) -> list[str]:
        return [seconds(value), f"{value / plain:.2f}"]

    rows: list[Row] = []
    for name, told, is_default in CALLS:
        if name in measured:
            line = measured[name]
            gap = f"{line['largest_below_flips']:.1e}"
            rows.append([told, is_default, *times(line["seconds"]), mib(line["peak_mib"]), gap])
    for told, line in beside.items():
        rows.append([told, OTHER, *times(line["seconds"]), mib(line["peak_mib"]), ""])
    here = {line["package"] for line in beside.values()}
    for line in files.json("elsewhere.json")["scoring"]:
        if not any(f"({package} " in line["code"] for package in here):
            rows.append([f"{line['code']}: {line['what']}, elsewhere", OTHER, *times(line["seconds"]), "", ""])
    best = files.json(old)
    line = next(row for row in best["rows"] if row["backend"] == "triton")
    work = line["tflops"] * line["seconds"]
    for told, value in (
        ("limit: its arithmetic in half precision", work / best["limits"]["half_tflops"]),
        ("limit: its arithmetic in strict float32", work / best["limits"]["float32_tflops"]),
    ):
        rows.append([told, OTHER, *times(value), "", ""])
    return table(
        ["what", "default call?", "seconds", "x plain MaxSim", "beyond inputs and output", "largest difference"],
        rows,
        f"Raw: {link(raw)}, {link('elsewhere.json')}, limits {link(old)}.",
    )


def peers(files: Results, name: str) -> dict[str, dict[str, Any]]:
    """Rows of plain MaxSim over all tokens in a file of `benchmarks.speed.defaults`; the last of each kind."""
    found = {}
    for line in files.lines(name):
        if "peer" in line and line["tokens"] > 100:
            whole = line["captions_timed"] == line["captions"]
            part = "" if whole else f", timed on {line['captions_timed']:,} captions and scaled"
            found[f"plain MaxSim ({line['peer']}), half precision{part}"] = line
    return found


def cores(files: Results) -> str:
    """All pairs on two CPU cores: plain MaxSim, the default call and forward in one run."""
    raw = "scoring-cpu.json"
    data = files.json(raw)
    rows: list[Row] = []
    for row in data["rows"]:
        plain, ours, loop = (row["ways"][name] for name in ("maxsim", "default", "forward"))
        pairs = row["images"] * row["captions"]
        rows.append(
            [
                f"{row['case']}, {row['images']:,} x {row['captions']:,}, {row['patches']} patches",
                *(f"{way['us_per_pair'] * pairs / 1e6:.2f} s" for way in (plain, ours, loop)),
                f"**{ours['of_maxsim']:.2f}**",
                f"{row['largest_difference']:.0e}",
            ]
        )
    head = ["features", "plain MaxSim", "ours, the default call", "`net.forward`", "ours x plain", "difference"]
    about = (
        f"The difference is to `net.forward`. PyTorch {data['machine']['torch']}, best of several rounds ({link(raw)})."
    )
    return table(head, rows, about)
