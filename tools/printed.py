"""Write what the pages print, or compare it: the output of commands, and the figures of result files.

    python tools/printed.py write     the pages, from the recorded outputs and the result files
    python tools/printed.py check     write nothing; exit with status 1 where a page differs
    python tools/printed.py run       run the commands, record their outputs, then write
                                      (`--only TEXT`: those that contain it; slow ones need this)
    python tools/printed.py lists     write the lists of the figures in sentences anew: look at the diff

Pages are README.md, README.zh.md, docs/*.md and docs/zh/*.md. The markers in them are HTML comments:

    <!-- printed: COMMAND | PART | PART -->        before a text block: lines of what the command printed
    <!-- figures: NAME --> ... <!-- /figures -->   a table of tools/figures: a function, or a section of tables/*.md
    <!-- figure: REFERENCE -->5.9<!-- / -->        one figure in a sentence
    <!-- fixed: REASON -->                         before a table or text block that holds no measured figure
    <!-- repeated: 12.3 4.5 -->                    figures of this page's sentences that a generated part has as well
    <!-- by hand: 3.10 0.25 -->                    those that nothing generates: versions, settings, and measurements
                                                   whose output was not kept

A part is a text: the lines that contain it (`TEXT +2`: the first of them and the two after it). `...` is a line of its
own. Without parts all lines are shown. `printed slow:` marks a command that the tests do not run again.

A reference, in `{}` in a section of tables/*.md, is `FILE; SELECT; PATH; FORMAT`. FILE is a file of docs/results or of
a study in lab, or `table:NAME`. SELECT chooses lines of a JSONL file (`name=mean, seed=0`), or the line of a text that
contains these words (`#3`: the third). PATH leads to a number: `rsum > dev/none`, or 2 for the second number of a line
of text. FORMAT is that of Python, after `mean`, `median` or `deviation` over the lines, and after `* 100` where the
unit differs; without one the number of a text stands on the page as it is.

A figure in a sentence is a number with a point, with a comma between thousands, or with %, s, ms, MB, points or
times (of "5 to 7 points" both). Each has a `figure` marker or is in one of the lists, as often as it stands there,
so that no digit changes unseen. A repeated one stands in a generated part of its page (of the English page for
docs/zh) or in a study of lab to which the page leads.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
TEMPLATES = ROOT / "tools/figures/tables"
LAB = ROOT / "lab"
RECORD = "printed.json"
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/zh").glob("*.md")),
]

_FENCE = r"(?:^ *```.*?^ *```$)"
_PRINTED = re.compile(
    r"^<!-- printed(?P<slow> slow)?: (?P<what>[^\n]*?) -->\n+```text\n(?P<text>.*?)^```$", re.M | re.S
)
_FIGURES = re.compile(r"^<!-- figures: (?P<name>[\w-]+) -->\n(?P<text>.*?)^<!-- /figures -->$", re.M | re.S)
_FIGURE = re.compile(r"<!-- figure: (?P<reference>.*?) -->(?P<text>.*?)<!-- / -->", re.S)
_FIXED = re.compile(rf"^ *<!-- fixed: [^\n]*? -->\n+(?:{_FENCE}|(?:^ *\|[^\n]*\n)+)", re.M | re.S)
_BARE = re.compile(rf"^ *```text\n(?P<block>.*?)^ *```$|{_FENCE}|(?P<table>(?:^ *\|[^\n]*\n)+)", re.M | re.S)
_SECTION = re.compile(r"^<!-- figures: ([\w-]+) -->\n", re.M)
_LISTED = re.compile(r"^<!-- (?P<kind>repeated|by hand): (?P<figures>[^>]*?)\s-->\n?", re.M)
_NO_SENTENCE = re.compile(r"^ *```.*?^ *```$|\$\$.*?\$\$|`[^`\n]*`|\]\([^)]*\)|https?://\S+|^\|[^\n]*$", re.M | re.S)
_UNIT = r"%|个百分点|秒|倍|points\b|times\b|photos a second|(?:[mu]?s|[KMG]i?B)\b"
_CLAIM = re.compile(
    rf"(?<![\w.])\d[\d,]*\.\d+(?:e-?\d+)?(?![\w.]*\d)|(?<![\w.,])\d[\d,]*(?= ?(?:{_UNIT}))"
    rf"|(?<![\w.,])\d+(?= (?:to|and|or) [\d.,]+ ?(?:{_UNIT}))|(?<![\w.,])\d{{1,3}}(?:,\d{{3}})+(?![\w.]*\d)"
)
_NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


# --- figures of result files


class Results:
    """Reads result files by their names: those of a folder, and those of the studies in lab."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder

    @cache  # noqa: B019  one per run of the program
    def read(self, name: str) -> Any:
        """The value of a JSON file, the list of a JSONL file, the lines of any other."""
        if name.startswith("table:"):
            from figures import TABLES
            from figures.raw import Results as Files

            return TABLES[name.removeprefix("table:")](Files(self.folder)).splitlines()
        path = next((path for path in (self.folder / name, *LAB.glob(f"*/{name}")) if path.exists()), None)
        if path is None:
            raise ValueError(f"There is no result file {name} in {self.folder} or lab")
        text = gzip.decompress(path.read_bytes()).decode() if name.endswith(".gz") else path.read_text("utf-8")
        if name.endswith(".json"):
            return json.loads(text)
        if name.endswith((".jsonl", ".jsonl.gz")):
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return text.splitlines()

    def figure(self, reference: str) -> str:
        """The figure of a reference. Raises ValueError where it leads to none."""
        try:
            name, select, path, form = (part.strip() for part in reference.split(";"))
            value = self.read(name)
            if isinstance(value, list) and value and isinstance(value[0], str):
                return _of_text(value, select, int(path), form)
            values = [_follow(line, path) for line in ([value] if name.endswith(".json") else _chosen(value, select))]
            return _formatted(values, form)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{{{reference}}} leads to no figure: {error}") from error


def _of_text(lines: list[str], select: str, place: int, form: str) -> str:
    """The number at a place (from 1) of the first line with these words (`#N`: the N-th line), as it stands there."""
    line = lines[int(select[1:]) - 1] if select.startswith("#") else next(line for line in lines if select in line)
    text = _NUMBER.findall(line)[place - 1]
    return text if not form else format(float(text.replace(",", "")), form)


def _chosen(lines: list[Any], select: str) -> list[Any]:
    """The lines whose values are those of `key=value, key=value`; `#N` is the N-th line."""
    if select.startswith("#"):
        return [lines[int(select[1:]) - 1]]
    wanted = [part.partition("=")[::2] for part in re.split(r", (?=[\w-]+=)", select) if part]
    found = [line for line in lines if all(str(line.get(key)) == value for key, value in wanted)]
    if not found:
        raise ValueError(f"no line has {select}")
    return found


def _follow(value: Any, path: str) -> float:
    """The number at the end of `key > key > 2`."""
    for key in path.split(" > "):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return float(value)


def _formatted(values: list[float], form: str) -> str:
    found = re.fullmatch(r"(?:(mean|deviation|median) )?(?:\* (\S+) )?(\S+)", form)
    if found is None:
        raise ValueError(f"{form!r} is no format")
    made: dict[str | None, Callable[[list[float]], float]] = {
        "mean": statistics.mean,
        "median": statistics.median,
        "deviation": statistics.stdev,
    }
    if found[1] is None and len(values) != 1:
        raise ValueError(f"{len(values)} lines fit; say mean or deviation")
    value = made[found[1]](values) if found[1] else values[0]
    return format(value * float(found[2] or 1), found[3])


def templates() -> dict[str, str]:
    """The sections of tools/figures/tables/*.md by their names."""
    made: dict[str, str] = {}
    for path in sorted(TEMPLATES.glob("*.md")):
        parts = _SECTION.split(path.read_text(encoding="utf-8"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in made:
                raise ValueError(f"{path}: there are two sections {name}.")
            made[name] = text
    return made


def tables(results: Results) -> dict[str, str]:
    """Every table by its name: those of functions, and those of templates."""
    from figures import TABLES
    from figures.raw import Results as Files

    files = Files(results.folder)
    made = {name: make(files) for name, make in TABLES.items()}
    for name, text in templates().items():
        try:
            made[name] = re.sub(r"\{([^{};]+;[^{}]*)\}", lambda found: results.figure(found[1]), text)
        except ValueError as error:
            made[name] = f"{name}: {error}"  # which no page equals
    return made


# --- what commands print


def records(results: Results) -> dict[str, list[str]]:
    """The recorded lines of each command."""
    made: dict[str, list[str]] = results.read(RECORD)
    return made


def _parts(what: str) -> tuple[str, list[str]]:
    """The command of a marker, and the parts of its output that the page shows."""
    command, *parts = (part.strip() for part in what.split(" | "))
    return command, parts


def shown(lines: list[str], parts: list[str]) -> str:
    """The lines that a page shows."""
    made: list[str] = []
    for part in parts or [""]:
        text, more = re.fullmatch(r"(.*?)(?: \+(\d+))?", part).groups()  # type: ignore[union-attr]
        places = [place for place, line in enumerate(lines) if text in line]
        if part != "..." and not places:
            raise ValueError(f"no line of the output has {text!r}")
        fitting = lines[places[0] : places[0] + int(more) + 1] if more else [lines[place] for place in places]
        fitting = ["..."] if part == "..." else fitting
        made += fitting
    return "".join(f"{line}\n" for line in made)


def commands(slow: bool) -> list[str]:
    """The commands of all pages, each once, in order."""
    found = [match for page in PAGES for match in _PRINTED.finditer(page.read_text(encoding="utf-8"))]
    return list(dict.fromkeys(_parts(match["what"])[0] for match in found if bool(match["slow"]) == slow))


def run(chosen: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Run commands one after another in a folder with the shipped photos; what each printed, made comparable."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve() / "home/me"
        shutil.copytree(ROOT / "src/seps/assets/gallery", home / "photos")
        for path in (home / "photos").iterdir():
            os.utime(path, (1_700_000_000, 1_700_000_000))
        for name in ("configs", "examples", "benchmarks", "docs"):
            (home / name).symlink_to(ROOT / name)
        for command in chosen:
            words = shlex.split(command)
            program = [sys.executable, "-m", "seps.cli.main"] if words[0] == "seps" else [sys.executable]
            environment = {**os.environ, "COLUMNS": "120", "TZ": "UTC", "XDG_DATA_HOME": str(home / ".local/share")}
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
            done = subprocess.run(
                [*program, *words[1:]],
                cwd=home,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if done.returncode:
                raise ValueError(f"{command} ended with status {done.returncode}:\n{done.stdout}")
            yield command, comparable(done.stdout, str(home))


def comparable(output: str, home: str) -> list[str]:
    """Without what differs from run to run: folders, times, progress, names made from paths."""
    if home in output:  # a column of paths becomes narrower, its head with it
        output = re.sub(rf"(?<=picture) {{{len(home) - len('/home/me')}}}", "", output)
    output = output.replace(home, "/home/me").replace(str(ROOT), "/home/me/seps")
    output = re.sub(r"^indexing: \d+ of \d+ images\n", "", output, flags=re.M)
    output = re.sub(r"\d+(\.\d+)? s\b(, \d+(\.\d+)? images a second)?", "... s", output)
    output = re.sub(r"photos-[0-9a-f]{16}", "photos-...", output)
    output = re.sub(r"\(\d+ lines\)", "(... lines)", output)
    return [line.rstrip() for line in output.splitlines()]


def alike(recorded: list[str], printed: list[str], within: float = 0.02) -> bool:
    """Whether two outputs have the same words, and numbers that differ by rounding alone (processors differ)."""
    left, right = (" ".join(" ".join(lines).split()) for lines in (recorded, printed))
    numbers = [
        (float(a.replace(",", "")), float(b.replace(",", "")))
        for a, b in zip(_NUMBER.findall(left), _NUMBER.findall(right), strict=False)
    ]
    return _NUMBER.sub("0", left) == _NUMBER.sub("0", right) and all(
        abs(a - b) <= max(0.005, within * abs(a)) for a, b in numbers
    )


# --- pages


def rendered(text: str, results: Results, made: dict[str, str]) -> str:
    """A page with what its markers stand for. Raises ValueError where a marker stands for nothing."""

    def printed(match: re.Match[str]) -> str:
        command, parts = _parts(match["what"])
        lines = records(results).get(command)
        if lines is None:
            raise ValueError(f"no output of {command!r} is recorded; python tools/printed.py run --only {command!r}")
        start = match.start("text") - match.start()
        return match[0][:start] + shown(lines, parts) + "```"

    def figures(match: re.Match[str]) -> str:
        if match["name"] not in made:
            raise ValueError(f"there is no table {match['name']!r} in tools/figures")
        return f"<!-- figures: {match['name']} -->\n{made[match['name']].strip()}\n<!-- /figures -->"

    def figure(match: re.Match[str]) -> str:
        return f"<!-- figure: {match['reference']} -->{results.figure(match['reference'])}<!-- / -->"

    return _FIGURE.sub(figure, _FIGURES.sub(figures, _PRINTED.sub(printed, text)))


def unmarked(text: str) -> list[str]:
    """Markers that cover nothing; first lines of the text blocks, and of the tables with numbers, that none covers."""
    for pattern in (_PRINTED, _FIGURES, _FIXED, _FIGURE, _LISTED):
        text = pattern.sub("", text)
    found = re.findall(r"<!-- /?(?:printed|figures?|fixed|by hand|repeated| -->)[^\n]*", text)
    for match in _BARE.finditer(text):
        table = re.sub(r"`[^`]*`|\]\([^)]*\)", "", match["table"] or "")
        if match["block"] or re.search(r"\d", table):
            found.append((match["block"] or match["table"]).splitlines()[0])
    return found


def sentences(text: str) -> str:
    """A page with spaces in place of all that is no sentence, or has a marker."""
    for pattern in (_PRINTED, _FIGURES, _FIXED, _FIGURE, _LISTED, _NO_SENTENCE):
        text = pattern.sub(lambda match: " " * len(match[0]), text)
    return text


def claims(text: str) -> Counter[str]:
    """The figures of a page's sentences that no marker covers, and how often each stands there."""
    return Counter(_CLAIM.findall(sentences(text)))


def proofs(page: Path, text: str) -> set[str]:
    """The numbers of the generated parts of a page, of the English page, and of the studies to which it leads."""
    parts = [match["text"] for pattern in (_PRINTED, _FIGURES) for match in pattern.finditer(text)]
    for study in set(re.findall(r"\]\((?:\.\./)*lab/([\w-]+)/README\.md", text)):
        parts.append((LAB / study / "README.md").read_text(encoding="utf-8"))
    english = page.parent.parent / page.name
    numbers = {number.lstrip("+-") for part in parts for number in _NUMBER.findall(part)}
    if page.parent.name == "zh" and english.exists():
        numbers |= proofs(english, english.read_text(encoding="utf-8"))
    return numbers


def unproved(page: Path, text: str) -> list[str]:
    """What is wrong with the lists of the figures in a page's sentences."""
    listed = {"repeated": Counter[str](), "by hand": Counter[str]()}
    for match in _LISTED.finditer(text):
        listed[match["kind"]].update(match["figures"].split())
    said, every = claims(text), listed["repeated"] + listed["by hand"]
    numbers = proofs(page, text)
    return [
        *(f"{figure} stands in a sentence, and in no list: python tools/printed.py lists" for figure in said - every),
        *(f"{figure} is in a list of figures, and in no sentence." for figure in every - said),
        *(f"{figure} is listed as repeated, and nothing generates it." for figure in {*listed["repeated"]} - numbers),
    ]


def listed_anew(page: Path, text: str) -> str:
    """A page whose lists, below its title, hold the figures of its sentences."""
    text = _LISTED.sub("", text)
    numbers, lists = proofs(page, text), dict[str, list[str]]()
    for figure in sorted(claims(text).elements()):
        lists.setdefault("repeated" if figure in numbers else "by hand", []).append(figure)
    made = [
        textwrap.fill(f"<!-- {kind}: {' '.join(figures)} -->", 150) + "\n" for kind, figures in sorted(lists.items())
    ]
    title, rest = text.split("\n", 1)
    return "".join([title, "\n", "\n" * bool(made), *made, "\n" if made else "", rest.lstrip("\n") if made else rest])


def page_problems(page: Path, text: str, results: Results, made: dict[str, str]) -> list[str]:
    """What is wrong with a page of this text, in sentences."""
    found = [f"{line!r} is covered by no marker, or is one that covers nothing." for line in unmarked(text)] + unproved(
        page, text
    )
    try:
        right = rendered(text, results, made)
    except ValueError as error:
        return [*found, str(error)]
    differing = (pair for pair in zip_longest(text.splitlines(), right.splitlines()) if pair[0] != pair[1])
    first = islice(differing, 3)
    return [*found, *(f"{here!r} should be {there!r}; python tools/printed.py write" for here, there in first)]


def problems(results: Results | None = None) -> list[str]:
    """What is wrong with the pages, in sentences; also with templates that no page shows."""
    results = results or Results()
    made, shown_tables, found = tables(results), set(), []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown_tables |= {match["name"] for match in _FIGURES.finditer(text)}
        found += [f"{page.relative_to(ROOT)}: {sentence}" for sentence in page_problems(page, text, results, made)]
    return found + [f"no page shows the table {name}." for name in sorted(set(made) - shown_tables)]


def main() -> None:
    """Write, check or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["write", "check", "run", "lists"])
    parser.add_argument("--only", help="run the commands that contain this text, slow ones as well")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.do == "run":
        path = RESULTS / RECORD
        kept = json.loads(path.read_text()) if path.exists() else {}
        every = [*commands(slow=False), *(commands(slow=True) if options.only else [])]
        for command, lines in run([command for command in every if (options.only or "") in command]):
            kept[command] = lines
            print(f"{command}: {len(lines)} lines", flush=True)
        known = {*commands(slow=False), *commands(slow=True)}
        kept = {command: kept[command] for command in sorted(kept) if command in known}
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.do != "check":
        results = Results()
        made = tables(results)
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            with contextlib.suppress(ValueError):  # which the check below names
                text = rendered(text, results, made)
            page.write_text(listed_anew(page, text) if options.do == "lists" else text, encoding="utf-8")
    wrong = problems()
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
