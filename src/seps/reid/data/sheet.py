"""Contact sheets: a look at a data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from seps.reid.data.reader import ReidReader
from seps.reid.data.records import ReidRecord


def contact_sheet(
    records: Sequence[ReidRecord],
    modalities: Sequence[str],
    *,
    rows: int = 6,
    columns: int = 5,
    size: tuple[int, int] = (128, 64),
) -> Image.Image:
    """One row an identity (the first `rows` by number), one cell a shot, its modalities side by side."""
    by_identity: dict[int, list[ReidRecord]] = {}
    for record in records:
        by_identity.setdefault(record.pid, []).append(record)
    height, cell = size[0] + 2, size[1] * len(modalities) + 6
    chosen = sorted(by_identity)[:rows]
    sheet = np.full((height * len(chosen), cell * columns, 3), 255, dtype=np.uint8)
    with ReidReader(modalities, size, threads=2) as reader:
        for row, pid in enumerate(chosen):
            for column, record in enumerate(by_identity[pid][:columns]):
                strip = np.concatenate(list(reader.read(record).permute(0, 2, 3, 1).numpy()), axis=1)
                top, left = row * height, column * cell
                sheet[top : top + size[0], left : left + strip.shape[1]] = strip
    return Image.fromarray(sheet)
