"""Train several seeds of one or more sets and set the figures beside those of the papers; resumable.

    FOLDER/NAME/seed-0/            a run of `seps reid train`, with seed.json when it is finished
    FOLDER/report.{json,md,png}    the figures of all finished seeds

Figures are means over the seeds, with their standard deviation.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from seps import settings
from seps.files import read_json, write_json
from seps.method.config import ConfigError
from seps.parsing import as_object, is_number
from seps.reid.config import ReidConfig
from seps.reid.evaluate import Case, default_cases, evaluate
from seps.reid.network.model import ReidModel, missing_cases
from seps.reid.run import load_trained, train_reid
from seps.reid.task import load_dataset, make_reader
from seps.training.tracking import Progress

Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Set -> paper -> sensors joined by " + " -> figure -> percent."""
ALL = "RGB + NI + TI"
PUBLISHED: Figures = {
    "rgbnt201": {
        "DeMo (arXiv 2412.10650)": {ALL: {"mAP": 79.0, "r1": 82.3}},
        "SDTPS inside DeMo": {ALL: {"mAP": 76.0, "r1": 80.1}},
        "Signal": {ALL: {"mAP": 80.3}},
    },
    "rgbnt100": {"DeMo (arXiv 2412.10650)": {ALL: {"mAP": 86.2, "r1": 97.6}}, "Signal": {ALL: {"mAP": 86.3}}},
    "msvr310": {"DeMo (arXiv 2412.10650)": {ALL: {"mAP": 49.2, "r1": 59.8}}, "Signal": {ALL: {"mAP": 53.2}}},
}
SHOWN = ("mAP", "r1", "r5", "r10")
_SEED = "seed.json"


@dataclass(frozen=True)
class Plan:
    """One set: a name for its folder and the settings, whose seed is replaced by each of the seeds."""

    name: str
    config: ReidConfig


@dataclass(frozen=True)
class Row:
    """One figure of one set by some sensors: ours over the seeds, and what a paper says, if one does."""

    set: str
    sensors: str
    figure: str
    values: tuple[float, ...]
    paper: str = ""
    published: float | None = None

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.published is None else self.mean - self.published

    def cells(self) -> list[str]:
        """The row of a table."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.1f}"
        published = "-" if self.published is None else f"{self.published:.1f}"
        difference = "-" if self.difference is None else f"{self.difference:+.1f}"
        return [
            self.set,
            self.sensors,
            self.figure,
            self.paper or "-",
            published,
            f"{self.mean:.1f}{spread}",
            difference,
        ]


HEAD = ["set", "sensors", "figure", "paper", "published", "ours", "difference"]


def run_seeds(
    plans: Sequence[Plan],
    seeds: Sequence[int],
    folder: Path,
    *,
    missing: bool,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    log: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Train and measure every seed of every plan that is not finished yet; all finished seeds, in order.

    Each seed of a set is a run that a second call continues. A call that was interrupted returns what is finished.
    Raises ConfigError where a folder holds a seed of other settings.
    """
    finished: list[dict[str, Any]] = []
    for seed in seeds:
        for plan in plans:
            config = replace(plan.config, train=replace(plan.config.train, seed=seed))
            place = folder / plan.name / f"seed-{seed}"
            stated = read_json(place / _SEED)
            if "rows" not in stated or (missing and not stated["missing"]):
                if log is not None:
                    log(f"{plan.name}, seed {seed}: training" if "rows" not in stated else f"{plan.name}: measuring")
                stated = _one_seed(plan.name, config, place, stated, missing, device, progress, log)
                if "rows" not in stated:
                    return finished
            if stated["settings"] != _digest(config):
                raise ConfigError(f"{place} holds a seed of other settings: choose another folder for this report.")
            finished.append(stated)
    return finished


def _one_seed(
    name: str,
    config: ReidConfig,
    place: Path,
    stated: Mapping[str, Any],
    missing: bool,
    device: torch.device | str,
    progress: Progress | None,
    log: Callable[[str], None] | None,
) -> dict[str, Any]:
    """Train one seed to its end and measure it; what is known so far, without "rows" where it was interrupted."""
    dataset = load_dataset(config.data)
    place.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {
        "set": name,
        "layout": config.data.layout.lower(),
        "seed": config.train.seed,
        "settings": _digest(config),
        "device": _device_name(device),
        "seconds": 0.0,
        **stated,
    }
    if known["settings"] != _digest(config):
        raise ConfigError(f"{place} holds a seed of other settings: choose another folder for this report.")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    try:
        result = train_reid(config, dataset, place, device=device, progress=progress, log=log)
    finally:
        known["seconds"] = round(known["seconds"] + time.monotonic() - started, 1)
        write_json(place / _SEED, known)
    if result.interrupted:
        return known
    trained = load_trained(place, "best", device)
    with make_reader(config, dataset) as reader:
        cases = _cases(trained.model) if missing else default_cases(trained.model)
        results = evaluate(trained.model, dataset, reader, cases, batch_size=config.train.batch_size)
    known |= {
        "peak_mib": _peak_mib(device),
        "missing": missing,
        "steps": result.total_steps,
        "config": config.to_json(),
        "rows": [found.row() for found in results],
    }
    write_json(place / _SEED, known)
    return known


def _cases(model: ReidModel) -> list[Case]:
    """Every set of sensors, the absent ones handled as the model does."""
    return [Case(present, model.config.missing, model.patterns[-1]) for present in missing_cases(model.modalities)]


def _digest(config: ReidConfig) -> str:
    """A short hash of what decides the outcome; where the files lie does not."""
    values = config.to_json()
    values["data"] = {
        key: value for key, value in values["data"].items() if key not in ("root", "threads", "cache_mib")
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _device_name(device: torch.device | str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU"


def _peak_mib(device: torch.device | str) -> float | None:
    """Largest memory so far: of the GPU, or of this process, all its seeds together."""
    if torch.device(device).type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def rows_of(finished: Sequence[Mapping[str, Any]], published: Figures = PUBLISHED) -> list[Row]:
    """The table: per set, sensors and figure ours over the seeds, a row per paper that states the figure."""
    values: dict[tuple[str, str, str, str], list[float]] = {}
    for seed in finished:
        for row in seed["rows"]:
            for figure in SHOWN:
                if figure in row:
                    key = (seed["set"], seed["layout"], " + ".join(row["present"]), figure)
                    values.setdefault(key, []).append(row[figure])
    rows = []
    for (name, layout, sensors, figure), found in values.items():
        papers = {
            paper: figures[sensors][figure]
            for paper, figures in published.get(layout, {}).items()
            if figure in figures.get(sensors, {})
        }
        rows += [Row(name, sensors, figure, tuple(found), paper, value) for paper, value in papers.items()] or [
            Row(name, sensors, figure, tuple(found))
        ]
    return rows


def read_figures(path: Path) -> Figures:
    """Figures of further papers: JSON, set -> paper -> "RGB + NI + TI" -> "mAP" or "r1" -> percent."""
    values = read_json(path)
    good = bool(values) and all(
        is_number(percent)
        for papers in values.values()
        for sensors in as_object(papers).values() or [None]
        for figures in as_object(sensors).values() or [None]
        for percent in as_object(figures).values() or [None]
    )
    if not good:
        raise ConfigError(f'{path} must hold {{"rgbnt201": {{"a paper": {{"{ALL}": {{"mAP": 79.0}}}}}}}} in JSON.')
    return values


def joined(*sources: Figures) -> Figures:
    """Figures of several sources; a later one wins."""
    found: dict[str, dict[str, Mapping[str, Mapping[str, float]]]] = {}
    for source in sources:
        for name, papers in source.items():
            found.setdefault(name.lower(), {}).update(papers)
    return found


def markdown(finished: Sequence[Mapping[str, Any]], rows: Sequence[Row], plans: Sequence[Plan]) -> str:
    """The report: the table, what the seeds took, and the settings of each set."""
    lines = ["# Re-identification, several seeds", "", _row(HEAD), _row(["---"] * len(HEAD))]
    lines += [_row(row.cells()) for row in rows]
    lines += ["", "Percent; mean and standard deviation over the seeds. Peak memory is that of the whole process.", ""]
    lines += [_row(["set", "seed", "steps", "seconds", "peak MiB", "device"]), _row(["---"] * 6)]
    lines += [
        _row([str(seed[key]) for key in ("set", "seed", "steps", "seconds", "peak_mib", "device")]) for seed in finished
    ]
    for plan in plans:
        lines += [
            "",
            f"## Settings of {plan.name}",
            "",
            "```yaml",
            settings.to_yaml(plan.config, changed=True).rstrip(),
            "```",
        ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def picture(rows: Sequence[Row], figure: str = "mAP") -> Image.Image:
    """A bar per set and sensors: ours with a line of one deviation each way, and a mark where a paper stands."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.figure == figure:
            groups.setdefault((row.set, row.sensors), []).append(row)
    left, width, step, top = 220, 520, 30, 40
    sheet = Image.new("RGB", (left + width + 90, top + step * len(groups) + 30), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((left, 12), f"{figure} in percent: ours (bar, deviation), papers (marks)", fill="black")
    for percent in range(0, 101, 20):
        x = left + width * percent / 100
        pen.line([(x, top - 6), (x, sheet.height - 22)], fill=(215, 215, 215))
        pen.text((x - 6, sheet.height - 18), str(percent), fill="black")
    for number, ((name, sensors), own) in enumerate(groups.items()):
        y, row = top + step * number, own[0]
        end = left + width * row.mean / 100
        pen.text((8, y + 5), f"{name}  {sensors}"[:34], fill="black")
        pen.rectangle([left, y + 4, end, y + 18], fill=(0, 114, 178))
        if row.deviation is not None:
            span = width * row.deviation / 100
            pen.line([(end - span, y + 11), (end + span, y + 11)], fill="black", width=2)
        for paper in own:
            if paper.published is not None:
                x = left + width * paper.published / 100
                pen.line([(x, y), (x, y + 22)], fill=(213, 94, 0), width=3)
        pen.text((left + width + 8, y + 5), f"{row.mean:.1f}", fill="black")
    return sheet
