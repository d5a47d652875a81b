"""The four single files in an environment with torch alone: they import and test themselves; a broken one fails."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from single_files import PART_FILES, VARIANTS, execute, text_of

SCRIPT = """
import importlib, json, runpy, sys

allowed = {*json.loads(sys.argv[1]), *sys.argv[2:], *sys.stdlib_module_names}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, ".")
done = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
        runpy.run_path(name + ".py", run_name="__main__")
    except ModuleNotFoundError as error:
        done[name] = error.name
    except SystemExit as end:
        done[name] = end.code
foreign = {name.partition(".")[0] for name in sys.modules} - allowed - {"__main__"}
print(json.dumps([done, sorted(foreign & {"numpy", "seps", "yaml", "safetensors", "PIL"})]))
"""


def torch_and_its_needs() -> list[str]:
    """The import names of torch and of every package that it requires."""
    found, open_ends = set(), ["torch"]
    while open_ends:
        name = re.sub(r"[-_.]+", "-", open_ends.pop()).lower()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        found.add(name)
        open_ends += [re.match(r"[\w.-]+", need).group() for need in needs if "extra ==" not in need]  # type: ignore[union-attr]
    owners = importlib.metadata.packages_distributions()
    return [name for name, of in owners.items() if found & {re.sub(r"[-_.]+", "-", one).lower() for one in of}]


@pytest.mark.slow
def test_the_files_import_and_pass_with_torch_alone(tmp_path: Path) -> None:
    files = {f"seps_{variant.replace('-', '_')}": text_of(variant) for variant in [*VARIANTS, *PART_FILES]}
    plain = files["seps_slim_zh"]
    planted = {
        "with_numpy": plain.replace("import math\n", "import math\nimport numpy\n", 1),
        "with_seps": plain.replace("import math\n", "import math\nfrom seps import method as own\n", 1),
        "broken": plain.replace("[[0.4722238,", "[[0.4722538,"),
    }
    for name, text in {**files, **planted}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    needs = torch_and_its_needs()
    assert "torch" in needs and "numpy" not in needs and "seps" not in needs
    command = [sys.executable, "-I", "-c", SCRIPT, json.dumps(needs), *files, *planted]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    status, foreign = json.loads(done.stdout.splitlines()[-1])
    assert status == {**dict.fromkeys(files, 0), "with_numpy": "numpy", "with_seps": "seps", "broken": 1}
    assert foreign == []
    assert "FAILED  code network: AssertionError: similarity" in done.stdout and "5 of 6 checks passed." in done.stdout
    for count, times in (
        (12, 2),
        (6, 2 + 1 + 4),
        (4, 4),
        (1, 4),
    ):  # both styles and languages; slim's six, the sensors'
        assert done.stdout.count(f"{count} of {count} checks passed.") >= times - 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_number_fails_in_every_file(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(variant)
    assert text.count("F.leaky_relu(rows, 0.1)") == 1
    name = "seps_modules_broken"
    monkeypatch.setitem(sys.modules, name, None)  # taken out again afterwards
    told: list[str] = []
    assert execute(text.replace("F.leaky_relu(rows, 0.1)", "F.leaky_relu(rows, 0.2)"), name).self_test(told.append) == 1
    assert [line.split(":")[0] for line in told if line.startswith("FAILED")] == ["FAILED  code network"]
