"""What is installed, what of it works, what is missing, and how to get it.

The checks (`seps.doctor_checks`) run in a process of their own: a package that crashes or hangs on import becomes a
result like any other. This module needs the standard library alone.
"""

from __future__ import annotations

import importlib.metadata as metadata
import multiprocessing
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from seps import __version__
from seps.doctor_checks import CHECKS, run_all

PATIENCE = 180.0
"""Seconds after which a check counts as hanging."""
_REINSTALL = "pip install --force-reinstall --no-deps"
_DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "lance": "pylance"}
# Name, [extras of it], version; and behind a semicolon the extra of seps that asks for it.
_REQUIREMENT = re.compile(
    r"""\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;(?:.*extra\s*==\s*['"]([^'"]+)['"])?.*)?$"""
)


@dataclass(frozen=True)
class Package:
    """A package that seps asks for: always (`extra` is empty) or in one of its extras."""

    name: str
    wanted: str
    extra: str
    version: str | None


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `remedy` is a command to run."""

    check: str
    status: Literal["ok", "missing", "broken"]
    detail: str
    extra: str = ""
    remedy: str | None = None


@dataclass(frozen=True)
class Report:
    """Everything that was found out."""

    version: str
    python: str
    platform: str
    packages: tuple[Package, ...]
    findings: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """The core works, and nothing that is installed is broken."""
        return all(result.status == "ok" or (result.status == "missing" and result.extra) for result in self.findings)

    def remedies(self) -> list[str]:
        """The commands that get what is missing or broken, each once."""
        return list(dict.fromkeys(result.remedy for result in self.findings if result.remedy))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "ok": self.ok, "remedies": self.remedies()}


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, None where there is none or its records are damaged."""
    try:
        return metadata.version(name) or None
    except Exception:  # damaged records surface as many types
        return None


def read_requirements(lines: Sequence[str]) -> tuple[Package, ...]:
    """Packages by extra from requirement lines, like `ray[data]>=2.40; extra == "dist"`."""
    matches = [match for match in map(_REQUIREMENT.match, lines) if match and match[1].lower() != "seps"]
    return tuple(Package(m[1].lower(), m[2], m[3] or "", installed_version(m[1])) for m in matches)


def run_checks(names: Sequence[str], patience: float = PATIENCE) -> list[dict[str, str]]:
    """One result for each name, from processes that may crash or hang; the checks after that run in a new one."""
    context = multiprocessing.get_context("spawn")
    results: list[dict[str, str]] = []
    while len(results) < len(names):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_all, args=(names[len(results) :], sender))
        process.start()
        sender.close()
        ending = f"hangs: no answer within {patience:.0f} s"
        try:
            while len(results) < len(names) and receiver.poll(patience):
                results.append(receiver.recv())
        except EOFError:
            process.join()
            code = process.exitcode or 0
            ending = f"crashed the process (signal {-code})" if code < 0 else f"ended the process (status {code})"
        process.kill()
        process.join()
        if len(results) < len(names):
            results.append({"check": names[len(results)], "status": "broken", "detail": ending})
    return results


def _with_remedy(found: Mapping[str, str], packages: Sequence[Package]) -> CheckResult:
    """The result of a check with the command that helps; "missing" becomes "broken" for what is installed."""
    name, detail, module = found["check"], found["detail"], found.get("module", "")
    extra, _ = CHECKS[name]
    if found["status"] == "ok":
        return CheckResult(name, "ok", detail, extra)
    if found["status"] == "missing":
        distribution = _DISTRIBUTIONS.get(module, module)
        version = installed_version(distribution) if distribution else None
        if version is not None:
            detail = f"{distribution} {version} is installed, but {module} cannot be imported"
            return CheckResult(name, "broken", detail, extra, f"{_REINSTALL} {distribution}=={version}")
        asked = [f"'{p.name}{p.wanted}'" for p in packages if p.name == distribution and not p.extra]
        wanted = f"'seps[{extra}]'" if extra else (asked or [distribution or "seps"])[0]
        return CheckResult(name, "missing", detail, extra, f"pip install {wanted}")
    suspects = [package.name for package in packages if package.version and package.extra == extra and extra]
    if name in ("torch", "GPU"):
        suspects = ["torch"]
    return CheckResult(name, "broken", detail, extra, f"{_REINSTALL} {' '.join(suspects) or f'seps=={__version__}'}")


def examine(names: Sequence[str] | None = None, patience: float = PATIENCE) -> Report:
    """Run all checks (or those named) and report; what they meet is in the report and never raised."""
    try:
        packages = read_requirements(metadata.requires("seps") or [])
    except Exception:  # run from its source without being installed, or damaged records
        packages = ()
    results = [_with_remedy(found, packages) for found in run_checks(list(names or CHECKS), patience)]
    # Where torch itself is broken, everything that fails with the same words has the same remedy.
    for torch in [result for result in results if result.check == "torch" and result.status == "broken"]:
        results = [replace(r, remedy=torch.remedy) if r.detail == torch.detail else r for r in results]
    return Report(__version__, platform.python_version(), platform.platform(), packages, tuple(results))
