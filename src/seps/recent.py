"""A bounded memory for what was asked for last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class Recent(Generic[Kept]):
    """A bounded memory, for any number of threads: what was not asked for longest is forgotten first."""

    def __init__(self, most: int) -> None:
        self.most = most
        """The largest sum of the sizes; the newest value is kept even where it is larger by itself."""
        self._kept: OrderedDict[Hashable, tuple[int, Kept]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: Hashable, value: Kept, size: int = 1) -> None:
        """Keep a value of this size."""
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = (size, value)
            while len(self._kept) > 1 and sum(size for size, _ in self._kept.values()) > self.most:
                self._kept.popitem(last=False)

    def get(self, key: Hashable) -> Kept | None:
        """A kept value; None where there is none."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][1]
