"""Modules that moved are still found under the names of the first release."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from seps._moved import MOVED, present_name


@pytest.mark.parametrize("former", [*MOVED, "retrieval.dense_text.config"])
def test_a_former_name_gives_the_same_objects(former: str) -> None:
    sys.modules.pop(f"seps.{former}", None)
    with pytest.warns(DeprecationWarning, match="now; import it from there"):
        module = importlib.import_module(f"seps.{former}")
    present = importlib.import_module(present_name(f"seps.{former}") or "")
    names = [name for name in vars(present) if not name.startswith("_")]
    assert names and all(getattr(module, name) is getattr(present, name) for name in names)


def test_imports_by_name_and_names_that_never_were() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from seps.retrieval.search import Searcher\n"
        "from seps.retrieval.dense_text.config import CaptionConfig\n"
        "from seps.hub import hub_folder\n"
        "from seps.retrieval.explain import shares\n"
        "import seps.retrieval.index.search as new\n"
        "assert Searcher is new.Searcher\n"
        "try:\n    import seps.retrieval.nonsense\nexcept ModuleNotFoundError:\n    print('right')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "right"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("encoders.vit", "Block ViT ViTConfig"),
        ("encoders.vit_weights", "FAMILIES VIT_FILE build_vit describe_vit focus_encoder from_transformers load_vit"),
        ("encoders.vit_weights", "our_names read_focus_weights save_vit"),
        ("encoders.vit_files", "fit_positions openai_vit timm_vit vit_from_file"),
        ("encoders.pruning", "Merging PruneConfig keep_by_attention tokens_per_block"),
        ("encoders.freezing", "freeze parameters_by_depth unfreeze"),
        ("encoders.saved", "has_text_files has_vision_files save_text_files save_vision_files"),
        ("bundle", "GENERATED LANGUAGES MODULES STYLES BundleError single_file"),
        ("bundle_language", "LANGUAGES Translation in_english texts translated"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_was_split_or_moved_has_its_former_names(module: str, names: str) -> None:
    found = importlib.import_module(f"seps.{module}")
    assert [name for name in names.split() if not hasattr(found, name)] == []
