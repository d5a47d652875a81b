"""The tables of the pages: functions here, sections with references in tables/*.md; tools/printed.py writes them."""

from __future__ import annotations

from collections.abc import Callable

from figures import differences, jobs, scoring
from figures.raw import Results

TABLES: dict[str, Callable[[Results], str]] = {
    "coco": scoring.coco,
    "cores": scoring.cores,
    "peers": jobs.peers,
    "training": jobs.training,
    "indexing": jobs.indexing,
    "cold-start": jobs.cold_start,
    "kernel-tests": jobs.kernel_tests,
    **differences.TABLES,
}
