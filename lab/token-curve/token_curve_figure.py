"""Draw docs/images/token-curve.svg: rSum against the bytes that a store keeps per photo, from `benchmarks.token_curve`.

python tools/token_curve_figure.py docs/results/token-curve-dev.jsonl docs/images/token-curve.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WAYS = {
    "grid": ("grid of means", "#2467b3", "o"),
    "k-means": ("k-means", "#5aa0ea", "s"),
    "merged": ("most similar merged (ToMe)", "#8e5fb5", "^"),
    "random": ("at random", "#8c96a3", "x"),
    "stored": ("as seps index keeps them", "#1f8a4c", "D"),
    "guided": ("by the head's own score", "#d98a1f", "v"),
    "described": ("by that score with the description", "#c8392b", "P"),
}
"""By way of the benchmark: its name in the picture, colour and marker."""
PANELS = (("change", "pixels alone"), ("change_described", "pixels and description"))


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Two panels that share both axes; a bar is one standard error."""
    import matplotlib

    matplotlib.use("Agg")
    # Letters stay letters, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "seps", "font.size": 9})
    from matplotlib import pyplot

    whole = next(line for line in lines if line["way"] == "all")
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8), sharex=True, sharey=True, layout="constrained")
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        axis.axhline(0, color="#1f2328", linewidth=0.8)
        for way, (label, colour, marker) in WAYS.items():
            own = sorted((line for line in lines if line["way"] == way), key=lambda line: line["bytes"])
            if own:
                values, errors = zip(*(line[key] for line in own), strict=True)
                sizes = [line["bytes"] for line in own]
                axis.errorbar(
                    sizes,
                    values,
                    errors,
                    label=label,
                    color=colour,
                    marker=marker,
                    markersize=4,
                    linewidth=1.2,
                    elinewidth=0.6,
                )
        for line in (line for line in lines if line["way"] == "one vector"):
            value, error = line[key]
            axis.errorbar([line["bytes"]], [value], [error], color="#1f2328", marker="*", markersize=9, elinewidth=0.6)
            axis.annotate("one vector", (line["bytes"], value), (4, 8), textcoords="offset points", fontsize=8)
        axis.set_xscale("log")
        rsum = whole["rsum" if key == "change" else "rsum_described"]
        axis.set_title(f"{title} (all {whole['tokens']} patches: {rsum:.1f})", fontsize=9)
        axis.set_xlabel("bytes per photo")
    ticks = sorted({line["bytes"] for line in lines if line["way"] in ("one vector", "grid", "all")})
    labels = [f"{size / 1000:.1f}k" if size < 10_000 else f"{size / 1000:.0f}k" for size in ticks]
    axes[0].set_xticks(ticks, labels, fontsize=8)
    axes[0].minorticks_off()
    axes[0].set_ylabel("rSum, difference from all patches")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Read the lines, write the picture."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    draw([json.loads(line) for line in text.splitlines()], Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
