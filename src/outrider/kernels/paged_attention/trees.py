"""Layouts of trees on the lines of a table: also for a graph that was captured for chains.

A captured graph reads fixed buffers, and its shapes depend on the number of rows alone. A tree of
as many rows fits: it has at most twice as many tiles as rows (those of the keys that all branches
share, and those of each branch), and the slots of the branches stand in a table of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from outrider.kernels.paged_attention.layout import ALL, Layout, Tile, branches
from outrider.kernels.paged_attention.splits import (
    full_splits,
    num_splits,
    num_splits_on_device,
    split_start,
)

LINE, TAILS = 0, 1
"""Which table a tile reads: its request's line, or `Layout.tails`."""


def tree_layout(
    parents: Sequence[int],
    lens: Sequence[int],
    lines: Tensor,
    table: Tensor,
    tile: Tile,
    group: int,
    max_len: int,
) -> Layout:
    """Lay out rows whose drafts may branch, without asking the device.

    Row j of a request has its slot at place `prefix + j` of the request's line, whatever its depth.

    parents: the row that each row follows, -1 for a request's first; rows beyond are padding
    lens: [N] how many positions each row attends to
    lines, table, max_len: as in `Layout.of_lines`
    """
    per_tile, n = tile.rows // group, len(lens)
    tiles: list[tuple[int, ...]] = []
    places: list[int] = []
    tails: list[Tensor] = []  # positions in the line, by branch
    owners: list[int] = []  # the row whose line it is, and how many positions
    counts: list[int] = []

    def add(rows: Sequence[int], index: int, first: int, last: int, which: int) -> None:
        for i in range(0, len(rows), per_tile):
            some = rows[i : i + per_tile]
            tiles.append((len(places), len(some), index, first, last, which))
            places.extend(some)

    roots = [row for row in range(n) if row >= len(parents) or parents[row] < 0]
    for first, end in pairwise([*roots, n]):
        found = branches([-1, *(parents[row] - first for row in range(first + 1, end))])
        if len(found) == 1:
            add(range(first, end), first, 0, ALL, LINE)
            continue
        prefix = lens[first] - 1
        trunk = full_splits(prefix, tile.split)
        start = split_start(trunk, tile.split)
        if trunk:
            add(range(first, end), first, 0, trunk, LINE)
        for nodes, path in found:
            add([first + node for node in nodes], sum(counts) - start, trunk, ALL, TAILS)
            tails.append(torch.cat([torch.arange(start, prefix), prefix + torch.tensor(path)]))
            owners.append(first)
            counts.append(len(tails[-1]))
    on_device = torch.tensor(tiles).to(lines.device, non_blocking=True)
    # in a tile of a line, `index` is the row whose line it is
    row = on_device[:, 2].clamp(0, n - 1)
    in_line = lines.long()[row] * table.stride(0)
    on_device[:, 2] = torch.where(on_device[:, 5] == LINE, in_line, on_device[:, 2])
    lens_on_device = torch.tensor(lens, dtype=torch.int32).to(lines.device, non_blocking=True)
    splits = num_splits_on_device(lens_on_device, tile.split)
    return Layout(
        tile=tile,
        tiles=on_device,
        rows=torch.tensor(places, dtype=torch.int32).to(lines.device, non_blocking=True),
        lens=lens_on_device,
        slots=table,
        parts=(splits.cumsum(0) - splits).to(torch.int32),
        num_parts=n * num_splits(max_len, tile.split),
        max_splits=num_splits(max_len, tile.split),
        tails=_gather(table, lines, owners, counts, tails),
    )


def _gather(
    table: Tensor,
    lines: Tensor,
    owners: Sequence[int],
    counts: Sequence[int],
    positions: list[Tensor],
) -> Tensor:
    """Return the slots at these positions of the owners' lines, one after the other."""
    if not positions:
        return table.new_empty(0)
    owner = torch.repeat_interleave(torch.tensor(owners), torch.tensor(counts)).to(lines.device)
    return table[lines.long()[owner], torch.cat(positions).to(lines.device)]


def tail_slots(rows: int, max_len: int, tile: Tile) -> int:
    """Return how many slots the branches of so many rows may have in `Layout.tails`, at most."""
    last = num_splits(max_len, tile.split)
    longest = split_start(last, tile.split) - split_start(last - 1, tile.split)
    return rows * (longest + rows)


def for_graph(layout: Layout, tails: Tensor) -> Layout:
    """Return a layout with room for any tree of as many rows, to be captured in a graph.

    tails: [tail_slots(...)] may be shared by all graphs that do not run at the same time
    """
    n = len(layout.lens)
    tiles = torch.zeros(2 * n, layout.tiles.shape[1], dtype=torch.int64, device=tails.device)
    rows = torch.zeros(2 * n, dtype=torch.int32, device=tails.device)
    made = replace(layout, tiles=tiles, rows=rows, tails=tails)
    made.copy_(layout)
    return made
