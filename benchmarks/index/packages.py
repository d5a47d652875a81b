"""Import this before `seps.photos.indexing` on a machine where the packages of the store may be missing."""

from __future__ import annotations

import importlib.util
import sys
from unittest import mock

STORES = all(importlib.util.find_spec(name) is not None for name in ("lance", "pyarrow"))
"""Whether a store can be written here."""
if not STORES:
    sys.modules["pyarrow"] = mock.MagicMock()  # it describes the columns of a store, and none is written
