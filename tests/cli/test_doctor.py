"""`seps doctor`: finds what is missing and what is broken, and never breaks itself."""

from __future__ import annotations

import importlib.metadata as metadata
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
from seps.doctor import CheckResult, Package, Report, examine, read_requirements
from seps.retrieval.demo import gallery_file
from seps.retrieval.pretrained import embedded_folder


@pytest.fixture
def shadow(tmp_path, monkeypatch):
    """shadow("lance", "raise ...") puts a module of that name before the real one, here and for the doctor."""
    place = tmp_path / "shadows"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))

    def write(name: str, source: str) -> None:
        (place / f"{name}.py").write_text(source)

    return write


def absent(name: str) -> str:
    return f"raise ModuleNotFoundError({name!r}, name={name!r})"


def test_what_is_here_works_and_json_says_so(capsys):
    names = ["core", "scoring: reference", "scoring: factored", "scoring: triton", "embedded model"]
    report = examine(names)
    assert [(finding.check, finding.status) for finding in report.findings] == [(name, "ok") for name in names]
    assert report.ok and report.version == seps.__version__ and report.remedies() == []
    assert json.loads(json.dumps(report.as_dict()))["findings"][0]["status"] == "ok"


def test_a_missing_package_is_told_with_the_command_that_gets_it(shadow, monkeypatch):
    for name in ("transformers", "matplotlib"):
        shadow(name, absent(name))
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    report = examine(["encoders", "plots", "embedded model"])
    assert [finding.status for finding in report.findings] == ["missing", "missing", "ok"]
    assert report.ok and report.remedies() == ["pip install 'seps[encoders]'", "pip install 'seps[plots]'"]


def test_a_missing_core_package_is_no_core_that_works(shadow, monkeypatch):
    for name in ("rich", "lance", "fastapi"):
        shadow(name, absent(name))
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    report = examine(["core", "store", "serve"])
    assert not report.ok and [finding.status for finding in report.findings] == ["missing"] * 3
    for remedy, package in zip(report.remedies(), ("rich", "pylance", "fastapi"), strict=True):
        assert remedy.startswith((f"pip install '{package}", f"pip install {package}"))


def test_installed_but_not_importable_is_broken(shadow, monkeypatch):
    shadow("lance", absent("lance"))
    monkeypatch.setattr(doctor, "installed_version", lambda name: "14.0.2")
    report = examine(["store"])
    assert not report.ok and report.findings[0].status == "broken"
    assert report.remedies() == ["pip install --force-reinstall --no-deps pylance==14.0.2"]


def test_a_broken_torch_leaves_a_report(shadow):
    shadow("torch", "raise OSError('libcudart.so: cannot open shared object file')")
    report = examine(["torch", "core", "scoring: factored", "plots"])
    assert [finding.status for finding in report.findings][:3] == ["broken"] * 3
    assert "libcudart.so" in report.findings[0].detail and not report.ok
    assert "pip install --force-reinstall --no-deps torch" in report.remedies() and len(report.remedies()) <= 2


def test_a_crash_a_hang_and_an_exit_are_findings_and_the_rest_goes_on(shadow):
    shadow("lance", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    shadow("matplotlib", "import time; time.sleep(60)")
    shadow("onnxscript", "import os; os._exit(3)")
    shadow("fastapi", "raise SystemExit(0)")
    results = doctor.run_checks(["store", "export", "serve"])
    assert "signal 11" in results[0][1] and "status 3" in results[1][1]
    assert results[2][0] == "broken" and "SystemExit" in results[2][1]
    assert "hangs" in doctor.run_checks(["plots"], patience=3)[0][1]


def test_a_backend_with_wrong_scores_is_broken(monkeypatch):
    real = seps.scoring.score_matrix
    for backend in ("reference", "factored"):
        monkeypatch.setattr(seps.scoring, "score_matrix", lambda *args, **options: real(*args, **options) + 1e-3)
        status, detail, _ = doctor.try_out(f"scoring: {backend}")
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
    assert "there is none" in doctor.try_out("scoring: triton")[1]


def test_a_damaged_model_and_gallery_are_found(tmp_path):
    model = shutil.copytree(embedded_folder(), tmp_path / "mini")
    assert "sha256 as stated" in doctor.model_intact(model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="cannot be read"):
        doctor.model_intact(model)
    (model / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not the configuration"):
        doctor.model_intact(model)
    gallery = shutil.copytree(gallery_file().parent, tmp_path / "gallery")
    photo = next(gallery.glob("*.jpg"))
    photo.write_bytes(photo.read_bytes()[:2000])
    with pytest.raises(ValueError, match=photo.stem):
        doctor.gallery_intact(gallery / "gallery.jsonl")


def test_a_damaged_model_ends_in_exit_status_1_and_a_remedy(monkeypatch, capsys):
    for name in ("store", "embedded model"):  # also for an extra of which no package is known
        finding = doctor.with_remedy(name, ("broken", "cut", ""), ())
        assert finding.remedy == f"pip install --force-reinstall --no-deps seps=={seps.__version__}"
    report = Report("1", "3", "x", (Package("rich", ">=13", "", "15"), Package("ray", "", "dist", None)), (finding,))
    monkeypatch.setattr(command, "examine", lambda: report)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "broken" in shown and finding.remedy in shown and "rich 15" in shown
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_report_needs_no_rich(monkeypatch, capsys):
    report = Report(
        "1", "3", "x", (), (CheckResult("torch", "ok", "fine"), CheckResult("store", "missing", "[no]", "store", "get"))
    )
    monkeypatch.setattr(command, "examine", lambda: report)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "store                missing  [no]" in shown and "  get" in shown


def test_requirements_are_read_by_extra():
    lines = ["torch>=2.4", 'ray[data]>=2.40; extra == "dist"', "seps[store]; extra == 'serve'", "???"]
    found = read_requirements([*lines, 'triton>=3.0; platform_system == "Linux" and extra == "kernels"'])
    assert [(p.name, p.wanted, p.extra) for p in found] == [
        ("torch", ">=2.4", ""),
        ("ray", ">=2.40", "dist"),
        ("triton", ">=3.0", "kernels"),
    ]
    assert found[0].version is not None


def test_the_check_of_formats_imports_every_package_of_that_extra():
    asked = doctor.read_requirements(metadata.requires("seps") or [])
    wanted = {package.name.replace("-", "_") for package in asked if package.extra == "formats"}
    assert set(doctor.CHECKS["formats"][1].args) == wanted


def test_every_package_of_an_extra_is_answered_by_that_extra():
    table = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for extra, modules in extras.EXTRAS.items():
        line = re.search(rf"^{extra} = \[(.*)\]$", table, re.MULTILINE)
        assert line is not None, extra
        asked = {name.replace("-", "_") for name in re.findall(r'"([A-Za-z0-9-]+)', line[1])}
        assert set(modules) == asked
        for module in modules:
            assert f"'seps[{extra}]'" in extras.missing_package(f"{module}.inner")
    assert "pip install pylance" in extras.missing_package("lance")


def test_importing_everything_without_a_package_names_the_command(shadow):
    shadow("pyarrow", absent("pyarrow"))
    source = os.pathsep.join([str(Path(seps.__file__).parents[1]), sys.path[0]])
    done = subprocess.run(
        [sys.executable, "-c", "from seps import *"], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError") and "pip install pyarrow" in last
