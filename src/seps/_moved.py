"""Modules of the first release under their former names: `from seps.retrieval.search import Searcher` still works.

The names are resolved on first use and warn; new code imports from the new place.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

MOVED = {
    "bundle_contents": "bundle.contents",
    "bundle_language": "bundle.language",
    "bundle_selftest": "bundle.selftest",
    "cli.argtypes": "cli.shared.argtypes",
    "cli.display": "cli.shared.progress",
    "cli.errors": "cli.shared.errors",
    "cli.outputs": "cli.shared.outputs",
    "cli.text": "cli.shared.text",
    "cli.caption": "cli.models.caption",
    "cli.compare": "cli.models.compare",
    "cli.convert": "cli.models.convert",
    "cli.eval": "cli.models.eval",
    "cli.export": "cli.models.export",
    "cli.modules": "cli.models.modules",
    "cli.train": "cli.models.train",
    "cli.demo": "cli.pictures.demo",
    "cli.explain": "cli.pictures.explain",
    "cli.index": "cli.pictures.index",
    "cli.search": "cli.pictures.search",
    "cli.serve": "cli.pictures.serve",
    "reid.settings": "settings",
    "doctor_checks": "doctor",
    "encoders.pruning": "encoders.vit.pruning",
    "encoders.vit_files": "encoders.vit.files",
    "encoders.vit_weights": "encoders.vit",
    "file_lock": "locks",
    "model_folder": "hub.folder",
    "model_card": "hub.card",
    "reid.data.scan": "reid.data.layouts",
    "reid.data.synthetic": "reid.synthetic",
    "reid.data.synthetic_canvas": "reid.synthetic.canvas",
    "reid.data.synthetic_figures": "reid.synthetic.people",
    "reid.data.synthetic_sensors": "reid.synthetic.sensors",
    "reid.data.synthetic_truth": "reid.synthetic.truth",
    "retrieval.vector_index": "retrieval.table.vector_index",
    "retrieval.ablation": "experiments.suites",
    "retrieval.cluster": "ray_cluster",
    "retrieval.compare": "experiments.compare",
    "retrieval.compare_plot": "experiments.report",
    "retrieval.compare_report": "experiments.report",
    "retrieval.compare_workers": "experiments.workers",
    "retrieval.dense_text.local_engine": "captioning.engines",
    "retrieval.dense_text.pictures": "captioning.images",
    "retrieval.dense_text.ray_engine": "captioning.engines",
    "retrieval.dense_text.report": "captioning.run",
    "retrieval.dense_text.sources": "captioning.images",
    "retrieval.dense_text.throttle": "captioning.openai_backend",
    "retrieval.dense_text.work": "captioning.engines",
    "retrieval.dense_text": "captioning",
    "retrieval.embedding": "retrieval.index.embedding",
    "retrieval.entries": "experiments.suites",
    "retrieval.evaluate": "retrieval.eval.evaluate",
    "retrieval.explain_picture": "retrieval.explain.picture",
    "retrieval.explanation": "retrieval.explain.explanation",
    "retrieval.fewer_words": "retrieval.index.codec",
    "retrieval.file_lock": "locks",
    "retrieval.gallery": "retrieval.data.gallery",
    "retrieval.index.fewer_words": "retrieval.index.codec",
    "retrieval.index.remote_lock": "locks",
    "retrieval.index.stored": "retrieval.index.codec",
    "retrieval.index.threads": "retrieval.index.embedding",
    "retrieval.index.calibrate": "retrieval.index.maintenance",
    "retrieval.index.guides": "retrieval.index.embedding",
    "retrieval.index.vectors": "retrieval.index.codec",
    "retrieval.indexing": "retrieval.index.build",
    "retrieval.maintenance": "retrieval.index.maintenance",
    "retrieval.packing": "retrieval.index.codec",
    "retrieval.pictures": "retrieval.demo",
    "retrieval.probe": "experiments.compare",
    "retrieval.protocol": "retrieval.eval.protocol",
    "retrieval.ray_indexing": "retrieval.index.ray",
    "retrieval.remote_lock": "locks",
    "retrieval.search": "retrieval.index.search",
    "retrieval.store": "retrieval.index.store",
    "retrieval.store_rows": "retrieval.index.rows",
    "retrieval.stored": "retrieval.index.codec",
    "retrieval.task": "retrieval.train.task",
    "retrieval.threads": "retrieval.index.embedding",
    "retrieval.data.open": "retrieval.data.published",
    "retrieval.data.thumbnails": "retrieval.data.images",
    "retrieval.thumbnails": "retrieval.data.images",
    "retrieval.training": "retrieval.train.run",
    "retrieval.vectors": "retrieval.index.codec",
    "scoring.engine": "scoring.blocks",
    "scoring.fused": "scoring.gpu.fused",
    "scoring.gradient": "scoring.train",
    "scoring.half_pairs": "scoring.gpu.half_pairs",
    "scoring.held_kernels": "scoring.gpu.held_kernels",
    "scoring.kernels": "scoring.gpu.kernels",
    "scoring.launches": "scoring.gpu.launches",
    "scoring.lengths": "scoring.inputs",
    "scoring.pairs": "scoring.factored",
    "scoring.plan": "scoring.blocks",
    "scoring.precision": "scoring.terms",
    "scoring.reference": "scoring.inputs",
    "scoring.state": "scoring.inputs",
    "scoring.texts": "scoring.inputs",
    "scoring.topk": "scoring.api",
    "scoring.triton": "scoring.gpu.fused",
    "scoring.workers": "scoring.blocks",
}
"""Former name to present name, both below `seps`; a package takes its modules along."""


def present_name(former: str) -> str | None:
    """Where the module `former` is now; None for one that never moved."""
    for old, new in MOVED.items():
        if former == f"seps.{old}" or former.startswith(f"seps.{old}."):
            return f"seps.{new}{former.removeprefix(f'seps.{old}')}"
    return None


class FormerNames(MetaPathFinder, Loader):
    """Imports a module by its former name, where no module of that name exists."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for former names alone."""
        if present_name(name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module that looks every name up in the present one."""
        place = present_name(spec.name) or spec.name
        present = importlib.import_module(place)
        warnings.warn(f"{spec.name} is {place} now; import it from there.", DeprecationWarning, stacklevel=6)

        class Former(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):  # with the present __path__ its modules would be loaded a second time
                    raise AttributeError(name)
                return getattr(present, name)

        return Former(spec.name, present.__doc__)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the present module has run."""
