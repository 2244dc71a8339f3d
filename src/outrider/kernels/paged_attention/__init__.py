"""Attention of a few query rows per request over a paged cache: decode and verify in one.

Rows of a chain share their request's keys and form tiles. A row of a tree has a past of its own
(the cached prefix, then the drafts on its path) and forms a tile alone, its keys gathered in path
order: that makes it the row that plain decoding would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.paged_attention.reference import SPLIT, Tiles, paged_attention

__all__ = ["SPLIT", "Past", "Tiles", "paged_attention", "tile_rows"]


@dataclass(frozen=True)
class Past:
    """Rows that share one sequence of keys, each attending to a prefix of it.

    rows:  the query rows, in the packed order of the pass
    lens:  how many positions each of them attends to
    slots: [max(lens)] the cache slot of each position
    """

    rows: Sequence[int]
    lens: Sequence[int]
    slots: Tensor


def tile_rows(
    pasts: Sequence[Past], places: int | None = None, device: torch.device | None = None
) -> Tiles:
    """Lay rows out in tiles. `places` fixes the rows of a tile; None takes the largest past's.

    Row results are comparable bit for bit only between tiles with equally many places.
    """
    size = places or max(len(past.rows) for past in pasts)
    cuts = [(past, i) for past in pasts for i in range(0, len(past.rows), size)]
    longest = max(max(past.lens) for past in pasts)
    slots = torch.zeros(len(cuts), -(-longest // SPLIT) * SPLIT, dtype=torch.int64)
    rows, lens = [], []
    where: dict[int, tuple[int, int]] = {}
    for tile, (past, start) in enumerate(cuts):
        chosen = list(past.rows[start : start + size])
        reach = list(past.lens[start : start + size])
        where.update({row: (tile, place) for place, row in enumerate(chosen)})
        rows.append(chosen + chosen[:1] * (size - len(chosen)))
        lens.append(reach + reach[:1] * (size - len(reach)))
        slots[tile, : len(past.slots)] = past.slots
    found = [where[row] for row in sorted(where)]
    return Tiles(
        rows=torch.tensor(rows, device=device),
        lens=torch.tensor(lens, device=device),
        slots=slots.to(device),
        out_tiles=torch.tensor([tile for tile, _ in found], device=device),
        out_places=torch.tensor([place for _, place in found], device=device),
    )
