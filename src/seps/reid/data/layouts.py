"""The published folder layouts and one for own data.

RGBNT201  {train_171,test}/{RGB,NI,TI}/PPPPPP_camC_*.jpg, query = gallery = test
RGBNT100  rgbir/{bounding_box_train,query,bounding_box_test}/PPPP_cC_*.jpg, three modalities in one image
MSVR310   {bounding_box_train,query3,bounding_box_test}/ID/{vis,ni,th}/PPPP_sSSS_vV_*.jpg, same-scene rule
WMVeID863 {train,query,test}/ID/{vis,ni,th}/ the camera as vC in the name (also called MSVWild863)
Market1501-MM  {train,query,gallery}/{RGB,NI,TI}/PPPP_cC*.jpg, identity -1 is junk
generic   {train,query,gallery}/{MODALITY}/NAME.jpg (or train and test: query = gallery = test),
          identity, camera and scene from a regular expression with named groups or from a CSV
Listings are sorted and labels follow the sorted identities, so nothing depends on the file system's order.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from seps.reid.data.reader import fault_of
from seps.reid.data.records import Excludes, Problem, ReidDataError, ReidDataset, ReidRecord, ReidReport, Source

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
Tags = tuple[int, int, int]
"""(pid, camid, sceneid)"""
NameParser = Callable[[str], "Tags | None"]
"""From a name without suffix to its tags, or None when it has none."""
OnProblem = Literal["skip", "refuse"]
Splits: TypeAlias = dict[str, list[ReidRecord]]
TRIPLE = ("RGB", "NI", "TI")
RGBNT201_PATTERN = r"(?P<pid>\d{6})_cam(?P<camid>\d+)"
RGBNT100_PATTERN = r"(?P<pid>-?\d+)_c(?P<camid>\d+)"
MSVR310_PATTERN = r"(?P<pid>\d{4})_s(?P<sceneid>\d{3})_v(?P<camid>\d+)"
WMVEID863_PATTERN = r"(?:.*?_)?v(?P<camid>\d+)(?:.*?_?s(?P<sceneid>\d{3}))?"
MARKET_PATTERN = r"(?P<pid>-?\d+)_c(?P<camid>\d)"
UNTOLD = "the name tells no identity and camera in this layout"
GENERIC_PATTERN = r"(?P<pid>-?\d+)_c(?P<camid>\d+)(?:_s(?P<sceneid>\d+))?(?:_|$)"


@dataclass
class ProblemLog:
    """The problems that a scan meets, and how many shots are marked as junk."""

    root: Path
    problems: list[Problem] = field(default_factory=list)
    junk: int = 0

    def add(self, kind: str, split: str, path: Path, detail: str) -> None:
        """Note one problem, with the path relative to the data set's root where possible."""
        shown = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        self.problems.append(Problem(kind, split, shown.as_posix(), detail))


@dataclass(frozen=True)
class Layout:
    """A scan from a root to (modalities, splits), and the evaluation rule that comes with the data set."""

    scan: Callable[[Path, ProblemLog], tuple[tuple[str, ...], Splits]]
    excludes: Excludes = "camera"


def load(
    layout: str,
    root: str | Path,
    *,
    on_problem: OnProblem = "refuse",
    verify_files: bool = False,
    modalities: Sequence[str] | None = None,
    pattern: str | None = None,
    labels: str | Path | None = None,
    threads: int = 4,
) -> ReidDataset:
    """Read a data set of one of `LAYOUTS` (any case) from `root`; `dataset.report` says what was found.

    `on_problem`: "refuse" raises when anything is wrong, "skip" leaves the shots concerned out and reports
    them. `verify_files` decodes every image (slow, thorough). `modalities`, `pattern` (a regular expression
    with the named groups pid, camid and, by choice, sceneid) and `labels` (a CSV, relative to the root, with
    the columns name, pid, camid and, by choice, sceneid and split) concern the generic layout alone.

    Raises ReidDataError: unknown layout, missing folder, no shots in a split, or problems when refusing.
    """
    key = layout.lower()
    if key not in LAYOUTS and key != "generic":
        raise ReidDataError(f"unknown layout {layout!r}; choose one of {', '.join([*LAYOUTS, 'generic'])}")
    if on_problem not in ("skip", "refuse"):
        raise ReidDataError(f"on_problem must be 'skip' or 'refuse', not {on_problem!r}")
    if key != "generic" and not (modalities is None and pattern is None and labels is None):
        raise ReidDataError(f"modalities, pattern and labels belong to the generic layout, not to {layout!r}")
    folder = require_folder(Path(root), f"the root of a data set in layout {key}")
    chosen = generic_layout(modalities, pattern, labels) if key == "generic" else LAYOUTS[key]
    log = ProblemLog(folder)
    names, splits = chosen.scan(folder, log)
    if verify_files:
        splits = _verify_splits(splits, log, threads)
    report = _report(key, log, splits)
    if on_problem == "refuse" and report.problems:
        raise ReidDataError(
            f"{report.summary()}\nFix these files, or skip their shots: --data.on_problem skip, in Python "
            "on_problem='skip'."
        )
    for split, records in splits.items():
        if not records:
            raise ReidDataError(f"split {split} has no usable shot.\n{report.summary()}")
    return ReidDataset(
        name=key,
        modalities=names,
        train=tuple(splits["train"]),
        query=tuple(splits["query"]),
        gallery=tuple(splits["gallery"]),
        excludes=chosen.excludes,
        report=report,
    )


def _verify_splits(splits: Splits, log: ProblemLog, threads: int) -> Splits:
    """Decode every file; keep the records that decode and report the others. A list in two splits is read once."""
    done: dict[int, list[ReidRecord]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for split, records in splits.items():
            if id(records) not in done:
                done[id(records)] = readable_shots(records, split, log, pool)
    return {split: done[id(records)] for split, records in splits.items()}


def readable_shots(records: Sequence[ReidRecord], split: str, log: ProblemLog, pool: Executor) -> list[ReidRecord]:
    """The records whose files all decode, in their order; the others are added to the log."""
    sound = []
    for record, fault in zip(records, pool.map(fault_of, records), strict=True):
        if fault is None:
            sound.append(record)
        else:
            log.add(fault[0], split, fault[1], fault[2])
    return sound


def _report(layout: str, log: ProblemLog, splits: Splits) -> ReidReport:
    train = {record.pid for record in splits["train"]}
    test = {record.pid for split in ("query", "gallery") for record in splits[split]}
    return ReidReport(
        layout=layout,
        root=str(log.root),
        shots={split: len(records) for split, records in splits.items()},
        junk=log.junk,
        problems=tuple(log.problems),
        shared_identities=len(train & test),
    )


def require_folder(folder: Path, expected: str) -> Path:
    """The folder itself, or ReidDataError saying what was `expected` there."""
    if not folder.is_dir():
        raise ReidDataError(f"no folder {folder}: expected {expected}; check the root and the layout's name")
    return folder


def list_folder(folder: Path) -> list[Path]:
    """What lies in the folder, sorted. Raises ReidDataError where it cannot be read to its end."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ReidDataError(f"the folder {folder} cannot be read: {error.strerror or error}") from error


def list_images(folder: Path, split: str, log: ProblemLog) -> dict[str, Path]:
    """Name without suffix -> file, sorted; hidden and other files left out, double names reported."""
    found: dict[str, Path] = {}
    for path in list_folder(folder):
        if path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith(".") or not path.is_file():
            continue
        if path.stem in found:
            log.add("duplicate_name", split, path, f"{found[path.stem].name} has the same name")
            continue
        found[path.stem] = path
    return found


def join_modalities(
    folders: dict[str, Path], split: str, parse: NameParser, log: ProblemLog, untold: str = UNTOLD
) -> Iterator[ReidRecord]:
    """Records of the names present in every modality's folder, in sorted order; the others are reported.

    `untold` is what is said of a name from which `parse` takes nothing.
    """
    listings = {
        modality: list_images(folder, split, log) if folder.is_dir() else {} for modality, folder in folders.items()
    }
    for name in sorted(set().union(*listings.values())):
        paths = {modality: listing[name] for modality, listing in listings.items() if name in listing}
        path = next(iter(paths.values()))
        absent = [modality for modality in folders if modality not in paths]
        if absent:
            log.add("missing_modality", split, path, f"no {' and no '.join(absent)} image")
            continue
        sources = {modality: Source(paths[modality]) for modality in folders}
        yield from tag(sources, path, split, parse, log, untold)


def tag(
    sources: dict[str, Source], path: Path, split: str, parse: NameParser, log: ProblemLog, untold: str = UNTOLD
) -> Iterator[ReidRecord]:
    """One record, or none where the name tells no identity or marks junk (identity -1)."""
    tags = parse(path.stem)
    if tags is None:
        log.add("unparsable_name", split, path, untold)
    elif tags[0] == -1:
        log.junk += 1
    else:
        yield ReidRecord(sources, *tags)


def by_pattern(expression: re.Pattern[str]) -> NameParser:
    """Tags from the start of a name by named groups; the scene is -1 where there is no such group."""

    def parse(name: str) -> Tags | None:
        match = expression.match(name)
        if match is None:
            return None
        groups = match.groupdict()
        try:
            return int(groups["pid"]), int(groups["camid"]), int(groups.get("sceneid") or -1)
        except (TypeError, ValueError):
            return None

    return parse


def scan_rgbnt201(root: Path, log: ProblemLog) -> tuple[tuple[str, ...], Splits]:
    """RGBNT201: a folder per modality; the test shots are query and gallery."""
    parse = by_pattern(re.compile(RGBNT201_PATTERN))
    splits: Splits = {}
    for split, name in (("train", "train_171"), ("test", "test")):
        folder = require_folder(root / name, f"RGBNT201's {name}/{{RGB,NI,TI}}")
        folders = {m: require_folder(folder / m, f"RGBNT201's {name}/{m}") for m in TRIPLE}
        splits[split] = list(join_modalities(folders, split, parse, log))
    return TRIPLE, {"train": splits["train"], "query": splits["test"], "gallery": splits["test"]}


def scan_rgbnt100(root: Path, log: ProblemLog) -> tuple[tuple[str, ...], Splits]:
    """RGBNT100: RGB, NI and TI are the left, middle and right third of one image."""
    parse = by_pattern(re.compile(RGBNT100_PATTERN))
    base = root / "rgbir" if (root / "rgbir").is_dir() else root
    thirds = [(i / 3, 0.0, (i + 1) / 3, 1.0) for i in range(3)]
    splits: Splits = {}
    for split, name in _BOUNDING_BOXES.items():
        folder = require_folder(base / name, f"RGBNT100's rgbir/{name}")
        records = splits[split] = []
        for path in list_images(folder, split, log).values():
            sources = {m: Source(path, box) for m, box in zip(TRIPLE, thirds, strict=True)}
            records += tag(sources, path, split, parse, log)
    return TRIPLE, splits


def scan_msvr310(root: Path, log: ProblemLog) -> tuple[tuple[str, ...], Splits]:
    """MSVR310: a folder per identity, in it vis, ni and th, here named RGB, NI and TI."""
    parse = by_pattern(re.compile(MSVR310_PATTERN))
    splits: Splits = {}
    for split, name in {**_BOUNDING_BOXES, "query": "query3"}.items():
        folder = require_folder(root / name, f"MSVR310's {name}/ID/{{vis,ni,th}}")
        records = splits[split] = []
        for vehicle in (path for path in list_folder(folder) if path.is_dir()):
            folders = {m: vehicle / sub for m, sub in zip(TRIPLE, ("vis", "ni", "th"), strict=True)}
            records += join_modalities(folders, split, parse, log)
    return TRIPLE, splits


def scan_wmveid863(root: Path, log: ProblemLog) -> tuple[tuple[str, ...], Splits]:
    """WMVeID863 (MSVWild863): a folder per identity, in it vis, ni and th; the gallery is called test."""
    expression = re.compile(WMVEID863_PATTERN)
    splits: Splits = {}
    for split, name in (("train", "train"), ("query", "query"), ("gallery", "test")):
        folder = require_folder(root / name, f"WMVeID863's {name}/ID/{{vis,ni,th}}")
        records = splits[split] = []
        for vehicle in (path for path in list_folder(folder) if path.is_dir()):
            folders = {m: vehicle / sub for m, sub in zip(TRIPLE, ("vis", "ni", "th"), strict=True)}
            records += join_modalities(folders, split, by_folder(expression, vehicle.name), log)
    return TRIPLE, splits


def by_folder(expression: re.Pattern[str], folder: str) -> NameParser:
    """Tags with the folder's name as the identity, camera and scene from the name by named groups."""

    def parse(name: str) -> Tags | None:
        match = expression.match(name)
        if match is None or not folder.isdecimal():
            return None
        return int(folder), int(match["camid"]), int(match["sceneid"] or -1)

    return parse


def scan_market1501_mm(root: Path, log: ProblemLog) -> tuple[tuple[str, ...], Splits]:
    """Market1501-MM: Market-1501 with near infrared and thermal pictures made from it; a folder per modality."""
    parse = by_pattern(re.compile(MARKET_PATTERN))
    splits: Splits = {}
    for split in ("train", "query", "gallery"):
        folders = {m: require_folder(root / split / m, f"Market1501-MM's {split}/{m}") for m in TRIPLE}
        splits[split] = list(join_modalities(folders, split, parse, log))
    return TRIPLE, splits


_BOUNDING_BOXES = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
NAMES = {
    "rgbnt201": RGBNT201_PATTERN,
    "rgbnt100": RGBNT100_PATTERN,
    "msvr310": MSVR310_PATTERN,
    "market1501-mm": MARKET_PATTERN,
}
"""How names tell identity and camera in each published layout."""
LAYOUTS: dict[str, Layout] = {
    "rgbnt201": Layout(scan_rgbnt201),
    "rgbnt100": Layout(scan_rgbnt100),
    "msvr310": Layout(scan_msvr310, excludes="scene"),
    "wmveid863": Layout(scan_wmveid863),
    "msvwild863": Layout(scan_wmveid863),
    "market1501-mm": Layout(scan_market1501_mm),
}


def generic_layout(modalities: Sequence[str] | None, pattern: str | None, labels: str | Path | None) -> Layout:
    """Own data; see `load`. Modalities are discovered under train/ when not given, RGB, NI and TI first."""
    if pattern is not None and labels is not None:
        raise ReidDataError("give a pattern or a CSV of labels, not both")

    def scan(root: Path, log: ProblemLog) -> tuple[tuple[str, ...], Splits]:
        expected = "the generic layout's train/{MODALITY}/NAME.jpg"
        names = tuple(modalities) if modalities else discover(require_folder(root / "train", expected))
        source = "" if modalities else " (every folder of train/ is a sensor, unless --data.modalities names them)"
        together = (root / "test").is_dir() and not (root / "query").is_dir()
        splits: Splits = {}
        rows, found = read_table(root / labels) if labels else [], set[int]()
        wanted = ("train", "test") if together else ("train", "query", "gallery")
        untold = f"no row of {labels} with this name and split" if labels else UNTOLD
        for split in wanted:
            require_folder(root / split, f"the generic layout's {split}/{{{','.join(names)}}}")
            folders = {m: require_folder(root / split / m, f"{split} of the sensor {m}{source}") for m in names}
            parse = by_table(root / labels, rows, split, found) if labels else by_pattern(compile_pattern(pattern))
            splits[split] = list(join_modalities(folders, split, parse, log, untold))
        incomplete = {Path(problem.path).stem for problem in log.problems}
        for row in rows:
            if row.split not in ("", *wanted):
                missing = f"line {row.line}: there is no split {row.split!r}, only {', '.join(wanted)}"
                log.add("missing_file", row.split, root / str(labels), missing)
            elif row.line not in found and row.stem not in incomplete:
                missing = f"line {row.line}: no image {row.stem} in split {row.split or ' or '.join(wanted)}"
                log.add("missing_file", row.split or "all", root / str(labels), missing)
        if together:
            splits = {"train": splits["train"], "query": splits["test"], "gallery": splits["test"]}
        return names, splits

    return Layout(scan)


def discover(train: Path) -> tuple[str, ...]:
    """Names of the modality folders: RGB, NI, TI first in this order, the others sorted after them."""
    found = {path.name for path in list_folder(train) if path.is_dir() and not path.name.startswith(".")}
    names = (*(m for m in TRIPLE if m in found), *sorted(found - set(TRIPLE)))
    if len(names) < 2:
        raise ReidDataError(f"{train} has {len(names)} modality folders {list(names)}; two or more are needed")
    return names


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """The expression, checked for the groups pid and camid; None is `GENERIC_PATTERN` (0001_c1_s1_001)."""
    try:
        expression = re.compile(GENERIC_PATTERN if pattern is None else pattern)
    except re.error as error:
        raise ReidDataError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    lacking = {"pid", "camid"} - set(expression.groupindex)
    if lacking:
        raise ReidDataError(f"the pattern {pattern!r} lacks the named groups {sorted(lacking)}, (?P<pid>...)")
    return expression


@dataclass(frozen=True)
class LabelRow:
    """A line of the CSV of labels; `split` is empty where it holds for all."""

    line: int
    split: str
    stem: str
    tags: Tags


def read_table(path: Path) -> list[LabelRow]:
    """The CSV with name, pid, camid (sceneid and split by choice); names without or with a suffix.

    Raises ReidDataError for a file that cannot be read, a missing column or a label that is no whole number.
    """
    if not path.is_file():
        raise ReidDataError(f"no file {path}: the CSV of labels (name,pid,camid,sceneid) is looked for there")
    rows = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            lacking = {"name", "pid", "camid"} - set(reader.fieldnames or ())
            if lacking:
                raise ReidDataError(f"{path} lacks the columns {sorted(lacking)}")
            for row in reader:
                rows.append(_label_row(path, reader.line_num, row))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ReidDataError(f"the CSV of labels {path} cannot be read as UTF-8 text ({error})") from error
    return rows


def _label_row(path: Path, line: int, row: dict[str, str | None]) -> LabelRow:
    name = row["name"] or ""
    suffix = Path(name).suffix
    stem = name.removesuffix(suffix) if suffix.lower() in IMAGE_SUFFIXES else name
    try:
        tags = int(row["pid"] or ""), int(row["camid"] or ""), int(row.get("sceneid") or -1)
    except ValueError as error:
        raise ReidDataError(f"{path}, line {line}: pid, camid and sceneid must be whole numbers ({error})") from error
    return LabelRow(line, row.get("split") or "", stem, tags)


def by_table(path: Path, rows: Sequence[LabelRow], split: str, found: set[int]) -> NameParser:
    """Tags by name for one split; the lines that were asked for go into `found`."""
    table: dict[str, Tags] = {}
    lines: dict[str, list[int]] = {}
    for row in rows:
        if row.split in ("", split):
            if table.setdefault(row.stem, row.tags) != row.tags:
                raise ReidDataError(f"{path}, line {row.line}: {row.stem} occurs twice with other labels")
            lines.setdefault(row.stem, []).append(row.line)

    def parse(name: str) -> Tags | None:
        found.update(lines.get(name, ()))
        return table.get(name)

    return parse
