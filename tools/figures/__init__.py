"""The tables of the pages: functions here, sections with references in tables/*.md; tools/printed.py writes them."""

from __future__ import annotations

from collections.abc import Callable

from figures import differences, jobs, scoring, studies
from figures.raw import Results

TABLES: dict[str, Callable[[Results], str]] = {
    "coco": scoring.coco,
    "kernels": scoring.kernels,
    "flickr": scoring.flickr,
    "cores": scoring.cores,
    "real": scoring.real,
    "training": jobs.training,
    "indexing": jobs.indexing,
    "indexing-steps": jobs.indexing_steps,
    "searching": jobs.searching,
    "cold-start": jobs.cold_start,
    "kernel-tests": jobs.kernel_tests,
    "ablation": studies.ablation,
    **differences.TABLES,
}
