"""Every option of every command, given nonsense: one sentence that names it, a status that is not 0, no traceback.

The options are found in the parsers, so a new one is tested (or must be classified below) without being named here.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messages import naming
from seps.cli.main import COMMANDS, main, parser_of
from seps.cli.shared import argtypes
from seps.retrieval.config import RunConfig
from stores import gallery, index, model_folder

# Smallest arguments that each command accepts; {...} are places that `places` makes.
BASE = {
    "find": "dog {gallery} --store {new} --model {model}",
    "index": "{gallery} --store {new} --model {model}",
    "search": "dog --store {store} --model {model}",
    "explain": "{photo} dog --model {model}",
    "duplicates": "--store {store}",
    "serve": "--store {store} --model {model}",
    "mcp": "--store {store} --model {model}",
    "train": "--out {new} --data.train {data}",
    "eval": "--data {data} --model {model}",
    "caption": "{gallery} --url http://127.0.0.1:9 --model none --out {new}.jsonl",
    "compare": "--config {config} --data {data} --dev {data} --out {new}",
    "convert": "{checkpoint} -o {new}",
    "export": "{model} -o {new}",
    "demo": "",
    "reid synth": "{new}",
    "reid train": "--out {new}",
    "reid eval": "{run}",
    "reid report": "--config {config} --out {new}",
    "reid show": "{run} --out {new}",
    "reid threshold": "{run} --out {new}",
    "reid export": "{run} --out {new}",
    "reid features": "{run} {gallery} --out {new}.npz",
    "doctor": "",
    "completion": "bash",
    "modules": "",
}
# Where 0 means something: off, without a limit, a free port, the first seed.
ZERO = {
    ("caption", "--max-side"),
    ("caption", "--temperature"),
    ("caption", "--seed"),
    ("caption", "--bad-retries"),
    ("caption", "--retries"),
    ("caption", "--backoff"),
    ("caption", "--gpus"),
    ("compare", "--seeds"),
    ("find", "--min-size"),
    ("find", "--min-confidence"),
    ("index", "--gpus"),
    ("search", "--min-size"),
    ("search", "--min-confidence"),
    ("duplicates", "--within"),
    ("serve", "--port"),
    ("reid report", "--seeds"),
    ("reid synth", "--seed"),
    ("reid synth", "--blindness"),
    ("reid features", "--camera"),
}
# What each option that takes a path expects.
PATHS = {
    ("find", "folder"): "in folder",
    ("find", "--store"): "out folder",
    ("find", "--image"): "in file",
    ("find", "--minus-image"): "in file",
    ("search", "--minus-image"): "in file",
    ("find", "--model"): "in folder",
    ("find", "--html"): "out file",
    ("find", "--copy-to"): "out folder",
    ("index", "folder"): "in folder",
    ("index", "--store"): "out folder",
    ("index", "--dense"): "in file",
    ("index", "--model"): "in folder",
    ("search", "--store"): "in folder",
    ("search", "--image"): "in file",
    ("search", "--model"): "in folder",
    ("explain", "image"): "in file",
    ("explain", "--out"): "out file",
    ("explain", "--model"): "in folder",
    ("explain", "--store"): "in folder",
    ("duplicates", "--store"): "in folder",
    ("duplicates", "--html"): "out file",
    ("duplicates", "--sheet"): "out file",
    ("serve", "--store"): "in folder",
    ("serve", "--model"): "in folder",
    ("mcp", "--store"): "in folder",
    ("mcp", "--model"): "in folder",
    ("eval", "--data"): "in file",
    ("eval", "--images"): "in folder",
    ("eval", "--dense"): "in file",
    ("eval", "--json"): "out file",
    ("eval", "--model"): "in folder",
    ("caption", "images"): "in anything",
    ("caption", "--out"): "out file",
    ("caption", "--report"): "out file",
    ("caption", "--images-root"): "in folder",
    ("caption", "--api-key-file"): "in file",
    ("compare", "--config"): "in file",
    ("compare", "--data"): "in file",
    ("compare", "--dev"): "in file",
    ("compare", "--out"): "out folder",
    ("compare", "--scratch"): "out folder",
    ("convert", "checkpoint"): "in file",
    ("convert", "--out"): "out folder",
    ("export", "model"): "in folder",
    ("export", "--out"): "out folder",
    ("export", "--store"): "in folder",
    ("demo", "--model"): "in folder",
    ("demo", "--out"): "out file",
    ("reid synth", "out"): "out folder",
    ("reid train", "--config"): "in file",
    ("reid train", "--out"): "out folder",
    ("reid eval", "run"): "in folder",
    ("reid report", "--config"): "in file",
    ("reid report", "--out"): "out folder",
    ("reid report", "--figures"): "in file",
    ("reid show", "run"): "in folder",
    ("reid show", "--out"): "out folder",
    ("reid threshold", "run"): "in folder",
    ("reid threshold", "--out"): "out folder",
    ("reid export", "run"): "in folder",
    ("reid export", "--out"): "out folder",
    ("reid export", "--threshold"): "in folder",
    ("reid features", "run"): "in folder",
    ("reid features", "folder"): "in folder",
    ("reid features", "--out"): "out file",
    ("modules", "--out"): "out file",
    ("train", "--config"): "in file",
    ("train", "--out"): "out folder",
    ("train", "--data.train"): "in file",
    ("train", "--data.dev"): "in file",
    ("train", "--data.dense"): "in file",
    **{
        (command, "--plugin"): "in file"
        for command in (
            *("train", "eval", "compare", "find", "index", "search", "explain", "serve", "mcp", "export"),
            *(f"reid {name}" for name in ("train", "eval", "report", "show", "threshold", "export", "features")),
        )
    },
}
# Options with free text; everything else is a number, a device, a choice, a flag or a path.
TEXT = {
    "search": {"query", "--folder", "--since", "--until", "--near"},
    "explain": {"caption", "--dense", "--guide"},
    "find": {"query", "--since", "--until", "--exclude", "--near"},
    "index": {"--ray-address", "--forget-descriptions", "--exclude", "--remove-root"},
    "serve": {"--host", "--token", "--allow-host", "--root-path"},
    "caption": {"--model", "--url", "--api-key-env", "--dtype", "--extra", "--prompt", "--ray-address"},
    "train": {"--explain"},
    "compare": {"--against", "--only", "--explain"},
    "convert": {"--vision", "--text"},
    "demo": {"queries"},
    "reid train": {"overrides", "demo", "--explain"},
    "reid eval": {"overrides"},
    "reid show": {"overrides"},
    "reid threshold": {"overrides"},
    "reid features": {"overrides"},
}
MINE = {(command, name) for command, names in TEXT.items() for name in names}


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name in COMMANDS:
        parser = parser_of(name)
        parts = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not parts:
            yield name, parser
        for part in parts:
            yield from ((f"{name} {key}", inner) for key, inner in part.choices.items())


def options() -> list[tuple[str, argparse.Action]]:
    skipped = (argparse._HelpAction, argparse._StoreTrueAction, argparse.BooleanOptionalAction)
    return [(name, a) for name, parser in parsers() for a in parser._actions if not isinstance(a, skipped)]


def name_of(action: argparse.Action) -> str:
    long = [name for name in action.option_strings if name.startswith("--")]
    return (long or action.option_strings or [action.dest])[0]


def is_number(action: argparse.Action) -> bool:
    """By what its type makes of a number, whatever the type is called."""
    if action.type in (int, float):
        return True
    try:
        return isinstance(action.type("0.5"), float) or isinstance(action.type("1"), int)  # type: ignore[operator]
    except (argparse.ArgumentTypeError, ValueError, TypeError):
        try:
            return isinstance(action.type("1"), int) and action.dest not in ("since", "until")  # type: ignore[operator]
        except (argparse.ArgumentTypeError, ValueError, TypeError):
            return False


OPTIONS = options()


def test_every_option_of_every_command_has_a_help_text_with_its_default() -> None:
    """A help text is read alone in a terminal: an option that takes a value names the default that is not nothing."""
    bare, without_default = [], []
    for command, parser in parsers():
        for action in parser._actions:
            text = action.help or ""
            if len(text.split()) < 2 or text[-1] == ".":
                bare.append((command, name_of(action)))
            given = action.default not in (None, False, True, "", "{}", []) and action.default != argparse.SUPPRESS
            if given and "default" not in text and not isinstance(action, argparse._HelpAction):
                without_default.append((command, name_of(action)))
    assert bare == [] and without_default == []


def test_every_command_has_a_description() -> None:
    assert [name for name, parser in parsers() if not parser.description and " " not in name] == []


NUMBERS = [(command, name_of(a)) for command, a in OPTIONS if a.choices is None and is_number(a)]
DEVICES = [(command, name_of(a)) for command, a in OPTIONS if a.dest == "device"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("places")
    pictures = gallery(root / "gallery", 3, described=1)
    index(pictures, root / "store")
    (root / "checkpoint.pth").write_bytes(b"nothing")
    (root / "file.jsonl").write_text("x")
    (root / "picture.png").write_text("x")
    (root / "run").mkdir()
    (root / "tiny.yaml").write_text("train: {epochs: 1}\n")
    return {
        "gallery": str(pictures),
        "photo": str(pictures / "p00.jpg"),
        "data": str(pictures / "data.jsonl"),
        "store": str(root / "store"),
        "model": model_folder(),
        "checkpoint": str(root / "checkpoint.pth"),
        "config": str(root / "tiny.yaml"),
        "run": str(root / "run"),
        "new": str(root / "new"),
        "root": str(root),
    }


class Fails:
    """Run a command that must fail with one line which names `what`."""

    def __init__(self, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        self.places, self.capsys = places, capsys

    def __call__(self, command: str, option: str, value: str, *what: str, positional: bool = False) -> None:
        base = BASE[command].format(**self.places).split()
        if (command, option) == ("search", "--image"):
            base = base[1:]  # instead of the sentence
        words = [*command.split(), *base, option, value]
        if positional:  # in the place of the first argument
            words = [*command.split(), value, *base[1:]]
        if (command, option) == ("find", "folder"):  # which follows the sentence
            words = ["find", base[0], value, *base[2:]]
        self.capsys.readouterr()
        status = main(words)
        told = self.capsys.readouterr().err
        assert status == 2, (words, told)
        assert "Traceback" not in told and "Errno" not in told, told
        assert len(told.strip().splitlines()) == 1, told
        assert any(part in told for part in what), (what, told)


@pytest.fixture
def fails(places: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fails:
    monkeypatch.chdir(places["root"])
    return Fails(places, capsys)


def test_every_option_is_a_number_a_device_a_choice_a_path_or_text() -> None:
    sorted_out = {*NUMBERS, *DEVICES, *PATHS, *MINE}
    left = {(c, name_of(a)) for c, a in OPTIONS if a.choices is None} - sorted_out
    assert not left, f"Classify {sorted(left)} in this file: PATHS or TEXT."
    assert len(NUMBERS) > 30 and len(DEVICES) >= 8
    assert {(c, name_of(a)) for c, a in OPTIONS if a.type in (int, float) and a.choices is None} == set()


@pytest.mark.parametrize(("command", "option"), NUMBERS, ids=lambda part: part)
def test_numbers_have_bounds(fails: Fails, command: str, option: str) -> None:
    wrong = ["x", "", "-1", "-0.5", "nan", "inf"]
    if (command, option) not in ZERO:
        wrong.append("0")
    for value in wrong:
        fails(command, option, value, option)


@pytest.mark.parametrize(("command", "option"), DEVICES, ids=lambda part: part)
@pytest.mark.parametrize("value", ["foo", "", "cuda:99", "cpu:x", "cuda:-1"])
def test_devices_are_checked_before_any_work(fails: Fails, command: str, option: str, value: str) -> None:
    fails(command, option, value, "--device")


BAD_PATHS = {
    "in file": ("missing", "folder"),
    "in folder": ("missing", "file"),
    "in anything": ("missing",),
    "out file": ("folder", "below a file"),
    "out folder": ("file", "below a file"),
}


@pytest.mark.parametrize(
    ("command", "option", "how"),
    [(*key, how) for key, kind in PATHS.items() for how in BAD_PATHS[kind]],
    ids=lambda part: str(part),
)
def test_bad_paths_are_named(fails: Fails, places: dict[str, str], command: str, option: str, how: str) -> None:
    kind, root = PATHS[command, option], Path(places["root"])
    ending = ".png" if (command, option) in (("explain", "--out"), ("demo", "--out")) else ".jsonl"
    file = root / ("picture.png" if ending == ".png" else "file.jsonl")
    value = {"missing": root / f"missing{ending}", "folder": root / "run", "file": file}.get(how)
    if value is None:
        value = file / f"inside{ending}"
    if kind == "out file" and how == "folder" and ending == ".png":
        value = root / "run.png"
        value.mkdir(exist_ok=True)
    fails(command, option, str(value), str(value), positional=not option.startswith("-"))


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, kind


SETTINGS = [name for name, kind in leaves(RunConfig) if {int, float} & {kind, *typing.get_args(kind)}]
# Settings of which -1 is a sensible value: -1 freezes all blocks.
MINUS_ONE = {"freeze_vision", "freeze_text"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_training_have_bounds(
    fails: Fails, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    import seps.retrieval.train.run as training

    def accepted(*args: Any, **options: Any) -> Any:
        raise AssertionError(f"{setting} was accepted")

    monkeypatch.setattr(training, "train_model", accepted)
    bad = ["x"] if setting in MINUS_ONE else ["x", "-1"]
    for value in bad:
        fails("train", f"--{setting}", value, setting, setting.rpartition(".")[2])


def test_suites_that_are_written_twice_agree() -> None:
    from seps.cli.models import compare as compare_command
    from seps.retrieval.experiments.suites import SUITES

    assert list(compare_command.SUITE_NAMES) == list(SUITES)


def test_a_mistyped_option_is_told_the_right_one(fails: Fails) -> None:
    for name, parser in parsers():
        action = next((a for a in parser._actions if name_of(a).startswith("--") and len(name_of(a)) > 5), None)
        assert action is not None, name
        right = name_of(action)
        fails(name, right[:3] + right[4] + right[3] + right[5:], "1", right)
    fails("train", "--trian.epochs", "1", "train.epochs")
    # Before what is missing: --sotre is why --store is missing.
    assert main(["search", "dog", "--sotre", "s"]) == 2
    assert "--store" in fails.capsys.readouterr().err


def test_a_value_that_begins_with_a_dash_is_told_how_to_write_it(fails: Fails) -> None:
    fails("search", "--image", "-cat.jpg", "--option=-cat.jpg")
    fails("index", "", "-photos", "./-photos", positional=True)
    assert main(["index", "photos", "--store"]) == 2
    assert "expected" in fails.capsys.readouterr().err


def test_abbreviations_and_values_still_work() -> None:
    parser = parser_of("search")
    assert parser.parse_args(["a dog", "--sto", "s", "--cand=7"]).candidates == 7
    assert parser.parse_args(["--store", "s", "--", "--odd words"]).query == "--odd words"
    caption = parser_of("caption")
    assert caption.parse_args(["x", "--extra", '{"a": -1}', "--top-p", "1"]).top_p == 1.0


def test_device_type_knows_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [argtypes.device(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]
    with pytest.raises(argparse.ArgumentTypeError, match=naming("cuda:0", "cuda:1")):
        argtypes.device("cuda:2")
    assert argtypes.device_or_auto("auto") == "auto"
    with pytest.raises(argparse.ArgumentTypeError):
        argtypes.device("auto")


def test_an_output_is_never_the_file_that_is_read(fails: Fails, places: dict[str, str]) -> None:
    photo, data = Path(places["photo"]), Path(places["data"])
    before = photo.read_bytes(), data.read_bytes()
    fails("explain", "--out", str(photo), str(photo))
    fails("eval", "--json", str(data), str(data))
    fails("eval", "--json", str(photo), str(photo))
    fails("caption", "--report", str(photo), str(photo))
    assert (photo.read_bytes(), data.read_bytes()) == before
