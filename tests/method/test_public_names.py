"""`import seps` alone: cheap, and everything public can be reached from it."""

from __future__ import annotations

import pytest

import seps


def test_every_public_name_is_there():
    for name in seps.__all__:
        assert getattr(seps, name) is not None and name in dir(seps)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = seps.nothing
