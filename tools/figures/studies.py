"""The tables of the ablation."""

from __future__ import annotations

from figures.raw import Results


def ablation(files: Results) -> str:
    """The tables of `seps compare --suite ablation --report`, with the row that was run again."""
    from seps.retrieval.experiments import report
    from seps.retrieval.experiments.suites import ABLATION

    found = {}
    for name in ("ablation.jsonl", "ablation-cpu.jsonl"):
        found.update({(run["name"], run["seed"]): run for run in files.lines(name)})
    return report.markdown(list(found.values()), ABLATION)
