"""The one place where a failed command turns into a sentence and an exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from PIL import Image

from messages import mentions, one_line
from seps.cli import main as main_module
from seps.cli.main import COMMANDS, main
from seps.cli.shared.errors import warnings_as_sentences
from seps.cli.shared.text import printable, printable_lines
from seps.photos.store.rows import StoreError
from seps.photos.store.store import Store
from stores import gallery, index


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """command(function) makes `seps modules` run that function."""

    def replace(function) -> None:
        module = types.SimpleNamespace(run=function, add_options=lambda parser: None)
        monkeypatch.setitem(sys.modules, "seps.cli.models.modules", module)

    return replace


def raising(error: BaseException):
    def run(arguments: list[str]) -> int:
        raise error

    return run


def warning(file: str, category: type[Warning]):
    """A command that succeeds, after a warning from that file."""

    def run(arguments: list[str]) -> int:
        warnings.warn_explicit("Torch encodes,\x1b more slowly.", category, file, 7)
        return 0

    return run


def test_a_warning_of_ours_is_a_sentence(command, capsys: pytest.CaptureFixture[str]) -> None:
    """It came with a path of this machine, a line number and a line of the source."""
    ours = str(Path(main_module.__file__).parents[1] / "encoders" / "compiled.py")
    shown = warnings.showwarning
    command(warning(ours, UserWarning))
    assert main(["modules"]) == 0
    assert capsys.readouterr().err == "seps modules: warning: Torch encodes,\\x1b more slowly.\n"
    assert warnings.showwarning is shown
    for file, category in (("/elsewhere/package.py", UserWarning), (ours, RuntimeWarning)):
        command(warning(file, category))
        with pytest.warns(category, match="Torch encodes") as found:
            assert main(["modules"]) == 0
        assert found[0].filename == file and capsys.readouterr().err == ""


def of_ours(arguments: list[str]) -> int:
    raise ValueError("Name another --out.")


of_ours = types.FunctionType(of_ours.__code__, {"__name__": "seps.elsewhere", "__builtins__": __builtins__})


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (StoreError("The store is damaged."), "The store is damaged."),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt"),
        (PermissionError(13, "Permission denied", "a.txt"), "a.txt"),
        (OSError(28, "No space left on device"), "disk"),
        (OSError(30, "Read-only file system", b"a\xff.txt"), "a\\xff.txt"),
        (OSError(98, "Address already in use"), "--port"),
        (OSError("no such model on the hub"), "no such model on the hub"),
        (ModuleNotFoundError("No module named 'av'", name="av"), "pip install 'seps[formats]'"),
        (MemoryError(), "memory"),
    ],
)
def test_known_errors_are_one_sentence(command, capsys, error: BaseException, named: str) -> None:
    command(raising(error))
    assert main(["modules"]) == 2
    assert one_line(capsys.readouterr().err, "seps modules: ", named)


def test_a_value_error_of_ours_is_a_sentence_and_that_of_a_library_is_a_defect(command, capsys) -> None:
    command(of_ours)
    assert main(["modules"]) == 2
    assert capsys.readouterr().err == "seps modules: Name another --out.\n"
    command(lambda arguments: json.loads("{"))
    assert main(["modules"]) == main_module.EXIT_DEFECT
    err = capsys.readouterr().err
    assert "Traceback" in err and "JSONDecodeError" in err and "report" in err.splitlines()[-1]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyError("x"), AssertionError(), UnicodeError("x")])
def test_defects_show_where_and_ask_for_a_report(command, capsys, error: Exception) -> None:
    command(raising(error))
    assert main(["modules"]) == main_module.EXIT_DEFECT
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and type(error).__name__ in err.splitlines()[-1] and "report" in err


def test_debug_shows_the_traceback_of_a_sentence(command, capsys, monkeypatch) -> None:
    command(raising(StoreError("damaged")))
    for words in (["--debug", "modules"], ["modules", "--debug"]):
        assert main(words) == 2
        assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("SEPS_DEBUG", "1")
    assert main(["modules"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_command_says_what_is_kept(command, capsys, monkeypatch) -> None:
    command(raising(KeyboardInterrupt()))
    assert main(["modules"]) == 130
    assert capsys.readouterr().err == "seps modules: interrupted.\n"
    monkeypatch.setitem(
        sys.modules,
        "seps.cli.pictures.index",
        types.SimpleNamespace(run=raising(KeyboardInterrupt()), add_options=lambda parser: None),
    )
    assert main(["index"]) == 130
    assert "stored" in capsys.readouterr().err


def test_messages_cannot_steer_the_terminal(command, capsys) -> None:
    command(raising(StoreError("a\x1b]0;owned\x07b\x9b31m\u202egpj.exe\nsecond line\udcff")))
    assert main(["modules"]) == 2
    err = capsys.readouterr().err
    assert "a\\x1b]0;owned\\x07b\\x9b31m\\u202egpj.exe\nsecond line\\xff" in err
    assert main(["dan\x1bce"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    assert main(["search", "--sto\x1b"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_printable_keeps_text_and_shows_the_rest() -> None:
    for good in ("photo 1.jpg", "Größe", "照片", "عربى", "👩‍👩‍👧", "a\\b"):
        assert printable(good) == good
    for code in [*range(32), *range(127, 160), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]:
        shown = printable(f"a{chr(code)}b")
        assert shown.isascii() and shown.isprintable() and shown.startswith("a\\"), hex(code)
    assert printable("\n\r\t\x00\U000e0041") == "\\n\\r\\t\\x00\\U000e0041"
    assert printable_lines("a\n\x1bb") == "a\n\\x1bb"


def seps(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "seps.cli.main", *words], text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_a_reader_that_went_away_and_a_full_disk(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    gone = seps("modules", "-o", "-", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        ended = seps("modules", "-o", "-", stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 2 and "disk" in ended.stderr and "Exception ignored" not in ended.stderr


def test_a_mistyped_command_is_told_the_right_one(capsys) -> None:
    for typed, meant in (("serach", "search"), ("idnex", "index"), ("modlues", "modules"), ("Search", "search")):
        assert main([typed]) == 2
        err = capsys.readouterr().err
        assert mentions(err, f"{typed!r}", meant) and len(err.splitlines()) == 1
    assert main(["zzzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_no_command_shows_help_with_examples(capsys) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS) and "examples:" in shown
    for line in shown.split("examples:")[1].splitlines():
        if line.startswith("  seps "):
            assert line.split()[1] in COMMANDS


def test_every_command_has_help(capsys) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert f"seps {name}" in capsys.readouterr().out
    for part in ("synth", "train", "eval", "show"):
        with pytest.raises(SystemExit):
            main(["reid", part, "--help"])


DAMAGED = ["", "{", "[]", "null", '{"format": "x"}', '{"format": 1}', '{"format": 1, "grid": 3}', "grid", "width"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("damaged")
    index(gallery(root / "g", 1, described=0), root / "s")
    return Store.open(root / "s")


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_settings_of_a_store_are_a_sentence(store: Store, capsys, content: str) -> None:
    place, good = store.location, store.settings.to_json()
    if content in ("grid", "width"):
        content = json.dumps({**json.loads(good), content: "x"})
    store.table.newest.update_schema_metadata({"seps": content})
    for words in (["search", "dog", "--store"], ["index", "--status", "--store"], ["serve", "--store"]):
        assert main([*words, place]) == 2, words
        err = capsys.readouterr().err
        assert place in err and "damaged" in err and "Traceback" not in err and len(err.splitlines()) == 1


def test_modules_and_demo_leave_files_of_others_alone(tmp_path: Path, capsys, monkeypatch) -> None:
    mine = tmp_path / "seps_modules.py"
    mine.write_text("print('my own work')\n")
    monkeypatch.chdir(tmp_path)
    assert main(["modules"]) == 2
    assert "--force" in capsys.readouterr().err and mine.read_text() == "print('my own work')\n"
    assert main(["modules", "--force"]) == 0 and main(["modules"]) == 0  # its own file is written again
    assert "class CrossSparseAggrNet" in mine.read_text()

    def quick(*args: object, **options: object) -> object:
        side = types.SimpleNamespace(captions=1, t2i=types.SimpleNamespace(r1=1.0, r5=1.0))
        answer = types.SimpleNamespace(query="[/x] \x1b[2J", pixels_only=[("[red]a.jpg", 1.0)], with_description=[])
        return types.SimpleNamespace(
            images=1, answers=[answer], pixels_only=side, with_description=side, picture=Image.new("RGB", (4, 4))
        )

    monkeypatch.setattr("seps.retrieval.demo.run_demo", quick)
    for name in ("photo.png", "photo.jpg"):
        photo = tmp_path / name
        Image.new("RGB", (9, 9)).save(photo)
        before = photo.read_bytes()
        for _ in range(2):  # the second time it finds its own picture under the other name
            assert main(["demo", "-o", str(photo)]) == 0
            assert photo.read_bytes() == before
        made = photo.with_stem("photo-2")
        assert Image.open(made).size == (4, 4) and not photo.with_stem("photo-3").exists()
        assert main(["demo", "-o", str(photo), "--force"]) == 0 and Image.open(photo).size == (4, 4)
    shown = capsys.readouterr().out
    assert "[/x] \\x1b[2J" in shown and "\x1b" not in shown and "[red]a" in shown
    assert main(["demo"]) == main(["demo"]) == 0 and os.listdir(tmp_path / "out") == ["demo.png"]


def test_a_warning_of_several_lines_of_code_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Scoring in the readable form warned in training and again in evaluation, with the same words."""
    with warnings.catch_warnings(), warnings_as_sentences("seps train"):
        warnings.simplefilter("always")
        for text, number in (("the same", 1), ("the same", 2), ("another", 3)):
            warnings.warn_explicit(text, UserWarning, str(main_module.__file__), number)
    assert capsys.readouterr().err.splitlines() == ["seps train: warning: the same", "seps train: warning: another"]
