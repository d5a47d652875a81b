"""Tiny encoders and scenes, made once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny import make_scenes, save_text_encoder, save_vision_encoder


@pytest.fixture(scope="session")
def encoders(tmp_path_factory) -> dict[str, str]:
    """Folders of a tiny vision and a tiny text encoder."""
    root = tmp_path_factory.mktemp("encoders")
    return {"vision": str(save_vision_encoder(root / "vit")), "text": str(save_text_encoder(root / "bert"))}


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> Path:
    """JSONL of 48 scenes."""
    return make_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="session")
def dev_scenes(tmp_path_factory) -> Path:
    """JSONL of 24 other scenes."""
    return make_scenes(tmp_path_factory.mktemp("dev"), 24, seed=1, name="dev")
