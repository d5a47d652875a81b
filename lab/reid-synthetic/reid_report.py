"""Tables and curves of `benchmarks.reid_synthetic`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from seps.reid.synthetic.truth import KINDS


def name_of(case: list[str]) -> str:
    """["RGB", "TI"] -> "RT"."""
    return "".join(sensor[0] for sensor in case)


def figures(runs: list[dict[str, Any]], variant: str, pattern: int, key: str = "mAP") -> dict[tuple[str, str], Any]:
    """(case, handling) -> that figure of every seed."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["variant"] == variant:
            for row in run["rows"]:
                if row["pattern"] == pattern:
                    found.setdefault((name_of(row["present"]), row["missing"]), []).append(row[key])
    return found


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation; `sign` "+" for differences."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.1f} ± {deviation:.1f}"


def widest(variant: str) -> int:
    """The features a variant is judged by: all it has."""
    return 1 if variant == "concat" else 3


def report(results: dict[str, Any], order: list[str]) -> str:
    """The tables in Markdown; `order` of the variants."""
    text = ["# Synthetic re-identification: concatenation against SDTPS", "", f"Recipe: `{results['recipe']}`"]
    for dropout in sorted({run["dropout"] for run in results["runs"]}):
        runs = [run for run in results["runs"] if run["dropout"] == dropout]
        variants = [name for name in order if any(run["variant"] == name for run in runs)]
        tables = {variant: figures(runs, variant, widest(variant)) for variant in variants}
        cases = list(dict.fromkeys(case for case, _ in tables[variants[0]]))
        counts = ", ".join(f"{v} {sum(run['variant'] == v for run in runs)}" for v in variants)
        text += ["", f"## Modality dropout {dropout:g}", "", f"Seeds: {counts}.", ""]
        for part in (
            case_table(tables, variants, cases),
            pattern_table(runs, variants, cases[0]),
            stability(runs, variants),
            kept_table(runs, variants),
            verdict(tables, variants, cases),
        ):
            text += [*part, ""]
    return "\n".join(text).rstrip() + "\n"


def case_table(tables: dict[str, Any], variants: list[str], cases: list[str]) -> list[str]:
    """Every set of sensors with both handlings."""
    text = ["mAP on the test set, mean ± standard deviation over the seeds; features: all a variant has.", ""]
    text += ["| sensors | missing ones | " + " | ".join(variants) + " |", "|---|---|" + "---:|" * len(variants)]
    for case in cases:
        for handling in ("zero", "leave-out"):
            if (case, handling) in tables[variants[0]]:
                cells = " | ".join(spread(tables[variant][case, handling]) for variant in variants)
                text.append(f"| {case} | {'-' if case == cases[0] else handling} | {cells} |")
    return text


def pattern_table(runs: list[dict[str, Any]], variants: list[str], full: str) -> list[str]:
    """All sensors: held-out training identities, then the test set by each branch, R1, and what it costs."""
    lines = ["| variant | dev mAP | original mAP | SDTPS mAP | both mAP | R1 | parameters (M) | GFLOPs | s a run |"]
    lines.append("|---|" + "---:|" * 8)
    for variant in variants:
        cells = [spread([run["dev_mAP"] for run in runs if run["variant"] == variant])]
        for pattern in (1, 2, 3):
            values = figures(runs, variant, pattern).get((full, "leave-out"))
            cells.append(spread(values) if values else "-")
        first = spread(figures(runs, variant, widest(variant), "r1")[full, "leave-out"])
        own = [run for run in runs if run["variant"] == variant]
        price = own[0]["cost"]
        seconds = statistics.mean(run["seconds"] for run in own)
        cells += [first, f"{price['parameters_m']:.2f}", f"{price['gflops']:.3f}", f"{seconds:.0f}"]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return lines


def stability(runs: list[dict[str, Any]], variants: list[str]) -> list[str]:
    """How calmly each variant trained."""
    lines = ["| variant | final loss | median gradient norm | largest | steps clipped | largest loss after step 50 |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for variant in variants:
        own = [run["stability"] for run in runs if run["variant"] == variant]
        final, middle = (statistics.mean(run[name] for run in own) for name in ("final_loss", "median_norm"))
        largest, worst = (max(run[name] for run in own) for name in ("largest_norm", "worst_loss"))
        # Runs of earlier versions did not count them.
        counted = [run["clipped"] for run in own if "clipped" in run]
        clipped = f"{statistics.mean(counted):.0%}" if counted else "-"
        lines.append(f"| {variant} | {final:.3f} | {middle:.2f} | {largest:.1f} | {clipped} | {worst:.2f} |")
    return lines


def kept_table(runs: list[dict[str, Any]], variants: list[str]) -> list[str]:
    """Which part of the figure, of clutter, background and blinded regions was kept, mean of the seeds."""
    # With everything kept there is nothing to tell.
    told = [run for run in runs if run["kept"] and run["variant"] != "keep-all"]
    if not told:
        return []
    head = ["kept of all", *KINDS]
    lines = [
        "Part of each kind of pixels that was kept (test set, all sensors), in shots where the sensor is blind in",
        "part and where it is not. Chance keeps of every kind what is kept of all.",
        "",
        "| variant | sensor | blinded | " + " | ".join(head) + " |",
        "|---|---|---|" + "---:|" * len(head),
    ]
    sensors = list(dict.fromkeys(row["sensor"] for row in told[0]["kept"]))
    for blinded in (False, True):
        for sensor in sensors:
            areas = [r["area"] for r in told[0]["kept"] if r["sensor"] == sensor and r["blinded"] == blinded][:1]
            for area in areas:
                cells = " | ".join(f"{area[kind]:.0%}" for kind in KINDS)
                lines.append(f"| *area of the picture* | {sensor} | {'yes' if blinded else 'no'} | | {cells} |")
    for variant in variants:
        own = [run for run in told if run["variant"] == variant]
        for blinded in (False, True):
            for sensor in sensors:
                cells = kept_cells(own, blinded, "score", [sensor])
                if cells:
                    lines.append(f"| {variant} | {sensor} | {'yes' if blinded else 'no'} | {cells} |")
    lines += ["", "The same, mean of the sensors, if one source of the score decided alone (as many patches kept):", ""]
    lines += ["| variant | blinded | decides | " + " | ".join(head) + " |", "|---|---|---|" + "---:|" * len(head)]
    for variant in variants:
        own = [run for run in told if run["variant"] == variant]
        for blinded in (False, True):
            for by in ("score", "own vector", "others' vectors", "others by position", "predictor"):
                cells = kept_cells(own, blinded, by, sensors)
                if cells:
                    lines.append(f"| {variant} | {'yes' if blinded else 'no'} | {by} | {cells} |")
    return lines


def kept_cells(runs: list[dict[str, Any]], blinded: bool, by: str, sensors: list[str]) -> str:
    """Cells of `kept_table`: means over runs and sensors, empty where there is nothing."""
    rows = [row for run in runs for row in run["kept"]
            if row["blinded"] == blinded and row["by"] == by and row["sensor"] in sensors]  # fmt: skip
    if not rows:
        return ""
    parts = [[row["kept"][kind] for row in rows if kind in row["kept"]] for kind in KINDS]
    cells = [statistics.mean(row["rate"] for row in rows), *(statistics.mean(part) if part else None for part in parts)]
    return " | ".join("-" if cell is None else f"{cell:.0%}" for cell in cells)


def verdict(tables: dict[str, Any], variants: list[str], cases: list[str]) -> list[str]:
    """What was asked, answered by the figures."""
    if "concat" not in variants:
        return []
    mean = {v: {key: statistics.mean(values) for key, values in tables[v].items()} for v in variants}
    lines = ["Against concatenation (its own figures in each case with the same handling):", ""]
    for variant in variants:
        if variant == "concat":
            continue
        pairs = zip(tables[variant][cases[0], "leave-out"], tables["concat"][cases[0], "leave-out"], strict=False)
        gain = spread([ours - theirs for ours, theirs in pairs], "+")
        better = {
            handling: sum(mean[variant][case, handling] > mean["concat"][case, handling] for case in cases[1:])
            for handling in ("zero", "leave-out")
        }
        ours = sum(mean[variant][case, "leave-out"] > mean[variant][case, "zero"] for case in cases[1:])
        published = sum(mean[variant][case, "leave-out"] > mean["concat"][case, "zero"] for case in cases[1:])
        lines.append(
            f"- {variant}: {gain} mAP with all sensors (asked: +3); better in {better['leave-out']} of "
            f"{len(cases) - 1} missing cases with leave-out, {better['zero']} with zero images (asked: 5); leave-out "
            f"above zero images in {ours} of {len(cases) - 1}; above the published way (concatenation, zero images) "
            f"in {published}."
        )
    return lines


def curves(results: dict[str, Any], order: list[str], folder: Path) -> bool:
    """curves.png, curves-0.3.png ...: loss and gradient norm by step, mean of the seeds; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    for dropout in sorted({run["dropout"] for run in results["runs"]}):
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
        for variant in order:
            own = [run for run in results["runs"] if run["variant"] == variant and run["dropout"] == dropout]
            for axis, key in zip(axes, ("loss", "grad_norm"), strict=True):
                if own:
                    means = [
                        statistics.mean(values) for values in zip(*(run["curves"][key] for run in own), strict=True)
                    ]
                    steps = [own[0]["steps"] * (i + 1) / len(means) for i in range(len(means))]
                    axis.plot(steps, means, label=variant)
        for axis, title in zip(axes, ("training loss", "gradient norm before clipping"), strict=True):
            axis.set(xlabel="step", title=f"{title}, modality dropout {dropout:g}")
            axis.legend()
        axes[1].set_yscale("log")
        figure.tight_layout()
        figure.savefig(folder / (f"curves-{dropout:g}.png" if dropout else "curves.png"), dpi=130)
        pyplot.close(figure)
    return True
