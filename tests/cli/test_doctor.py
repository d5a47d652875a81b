"""`seps doctor`: finds what is missing and what is broken, and never breaks itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seps
import seps.scoring
from seps import doctor, extras
from seps.cli import doctor as command
from seps.cli.main import main
from seps.doctor import CheckResult, examine, failed
from seps.retrieval import pretrained
from seps.retrieval.embedded import embedded_folder


@pytest.fixture
def shadow(tmp_path, monkeypatch):
    """shadow("lance", "raise ...") puts a module of that name before the real one, here and for the doctor."""
    place = tmp_path / "shadows"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))

    def write(name: str, source: str) -> None:
        (place / f"{name}.py").write_text(source)

    return write


def remedies(results: list[CheckResult]) -> list[str]:
    return [result.remedy for result in results if result.remedy]


def absent(name: str) -> str:
    return f"raise ModuleNotFoundError({name!r}, name={name!r})"


def test_what_is_here_works_and_json_says_so(capsys):
    names = ["core", "scoring: factored", "scoring: triton"]
    results = examine(names)
    assert [(result.check, result.status) for result in results] == [(name, "ok") for name in names]
    assert not failed(results) and remedies(results) == []


def test_a_missing_package_is_told_with_the_command_that_gets_it(shadow, monkeypatch):
    for name in ("transformers", "matplotlib"):
        shadow(name, absent(name))
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    results = examine(["encoders", "plots", "scoring: factored"])
    assert [result.status for result in results] == ["missing", "missing", "ok"]
    assert not failed(results) and remedies(results) == ["pip install 'seps[encoders]'", "pip install 'seps[plots]'"]


def test_a_missing_core_package_is_no_core_that_works(shadow, monkeypatch):
    for name in ("rich", "fastapi"):
        shadow(name, absent(name))
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    results = examine(["core", "serve"])
    assert len(failed(results)) == 2 and [result.status for result in results] == ["missing"] * 2
    for remedy, package in zip(remedies(results), ("rich", "fastapi"), strict=True):
        assert remedy.startswith((f"pip install '{package}", f"pip install {package}"))


def test_installed_but_not_importable_is_broken(shadow, monkeypatch):
    shadow("lance", absent("lance"))
    monkeypatch.setattr(doctor, "installed_version", lambda name: "14.0.2")
    results = examine(["lance"])
    assert failed(results) == ["lance"] and results[0].status == "broken"
    assert remedies(results) == ["pip install --force-reinstall --no-deps pylance==14.0.2"]


def test_a_broken_torch_leaves_a_report(shadow):
    shadow("torch", "raise OSError('libcudart.so: cannot open shared object file')")
    results = examine(["torch", "method", "scoring: factored", "plots"])
    assert [result.status for result in results][:3] == ["broken"] * 3
    assert "libcudart.so" in results[0].detail and failed(results)
    assert "pip install --force-reinstall --no-deps torch" in remedies(results) and len(set(remedies(results))) <= 2


def test_a_crash_a_hang_and_an_exit_are_findings_and_the_rest_goes_on(shadow):
    shadow("lance", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    shadow("matplotlib", "import time; time.sleep(60)")
    shadow("onnxscript", "import os; os._exit(3)")
    shadow("fastapi", "raise SystemExit(0)")
    results = doctor.run_checks(["lance", "export", "serve"])
    assert "signal 11" in results[0][1] and "status 3" in results[1][1]
    assert results[2][0] == "broken" and "SystemExit" in results[2][1]
    assert "hangs" in doctor.run_checks(["plots"], patience=3)[0][1]


def test_a_backend_with_wrong_scores_is_broken(monkeypatch):
    real = seps.scoring.score_matrix
    monkeypatch.setattr(seps.scoring, "score_matrix", lambda *args, **options: real(*args, **options) + 1e-3)
    status, detail, _ = doctor.try_out("scoring: factored")
    assert status == "broken" and "off by 0.001" in detail

    def fails(*args, **options):
        raise RuntimeError("PTX was compiled for another GPU")

    monkeypatch.setattr(seps.scoring, "score_matrix", fails)
    assert "another GPU" in doctor.try_out("scoring: factored")[1]


def test_kernels_are_tried_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "scoring", lambda *asked: f"scored with {asked}")
    assert "scored with ('triton', 'cuda', 'half', 0.005)" in doctor.try_out("scoring: triton")[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in doctor.try_out("scoring: triton")[1]


def test_a_damaged_model_is_found(tmp_path, monkeypatch):
    model = shutil.copytree(embedded_folder(), tmp_path / "mini")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr(pretrained, "embedded_folder", lambda *name: model)
    status, detail, _ = doctor.try_out("patches")
    assert status == "broken" and "cannot be read" in detail


def test_a_damaged_model_ends_in_exit_status_1_and_a_remedy(monkeypatch, capsys):
    for name in ("store", "patches", "search"):  # also for an extra of which no package is known
        finding = doctor.with_remedy(name, ("broken", "cut", ""))
        assert finding.remedy == f"pip install --force-reinstall --no-deps seps=={seps.__version__}"
    monkeypatch.setattr(command, "examine", lambda: [finding])
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "broken" in shown and finding.remedy in shown
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_report_needs_no_rich(monkeypatch, capsys):
    results = [CheckResult("torch", "ok", "fine"), CheckResult("store", "missing", "[no]", "store", "get")]
    monkeypatch.setattr(command, "examine", lambda: results)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "store                missing  [no]" in shown and "  get" in shown


def test_the_check_of_formats_imports_every_package_of_that_extra():
    assert set(doctor.CHECKS["formats"][1].args) == set(extras.EXTRAS["formats"])


def test_every_package_of_an_extra_is_answered_by_that_extra():
    table = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for extra, modules in extras.EXTRAS.items():
        line = re.search(rf"^{extra} = \[(.*)\]$", table, re.MULTILINE)
        assert line is not None, extra
        modules_of = {package: module for module, package in extras.DISTRIBUTIONS.items()}
        packages = re.findall(r'"([A-Za-z0-9-]+)', line[1])
        named = {modules_of.get(name, name.replace("-", "_")) for name in packages}
        asked = named - {"seps"}  # an extra that has another one
        others = {module for other, found in extras.EXTRAS.items() if other != extra for module in found}
        assert set(modules) == asked - others and modules  # a package of two extras is answered by one of them
        for module in modules:
            assert f"'seps[{extra}]'" in extras.missing_package(f"{module}.inner")
    assert "pip install pillow" in extras.missing_package("PIL")


def test_importing_everything_without_a_package_names_the_command(shadow):
    shadow("PIL", absent("PIL"))
    source = os.pathsep.join([str(Path(seps.__file__).parents[1]), sys.path[0]])
    done = subprocess.run(
        [sys.executable, "-c", "from seps import *"], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError") and "pip install pillow" in last
