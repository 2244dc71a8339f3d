"""Which query rows share which keys, as the Triton kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.kernels import launch_options
from outrider.kernels.paged_attention.splits import (
    full_splits,
    num_splits,
    num_splits_on_device,
    split_start,
)

FIELDS = ("place", "count", "index", "first", "last", "table")
"""What a tile is made of: its rows are `rows[place : place + count]`, the slot of its position p
is `slots[index + p]` (table 0) or `tails[index + p]` (table 1), and it sees the splits
[first, last)."""

ALL = 1 << 30


@dataclass(frozen=True)
class Past:
    """Rows that share one sequence of keys, each attending to a prefix of it.

    rows:   the query rows, in the packed order of the pass
    lens:   how many positions each of them attends to
    slots:  [max(lens)] the cache slot of each position
    prefix: how many of them the other branches of the same request have too
    """

    rows: Sequence[int]
    lens: Sequence[int]
    slots: Tensor
    prefix: int = 0


@dataclass(frozen=True)
class Tile:
    """The shape of a tile's products, and how it is launched.

    One server has one tile: rows compare bit for bit only if they were computed by one shape.

    rows:   query rows times heads of a group, at least 16: a matrix instruction's
    keys:   keys of one product
    split:  keys of one of the first splits; later ones are longer, see `splits`
    """

    rows: int = 16
    keys: int = 32
    split: int = 256

    @staticmethod
    def fit(group: int) -> Tile:
        """Return the tile of a model: it holds eight rows of a group, of at most 64 in all."""
        return Tile(rows=16 if group <= 2 else 32 if group <= 4 else 64)

    def for_prefill(self, arch: str, dim: int, same_bits: bool) -> Tile:
        """Return the tile of prefill: as many rows as registers hold beside two sums.

        same_bits: whether a prefilled row must equal a decoded one. On AMD it does anyway.
        """
        if same_bits and not arch.startswith("gfx"):
            return self
        return replace(self, rows=64 if dim <= 128 else 32)

    def options(
        self, arch: str, dim: int, folds: bool = False, softcap: bool = False
    ) -> dict[str, Any]:
        """Return the launch options for a processor: "gfx942", "sm_90", ...

        folds: whether the kernel also keeps the sum of the splits so far, as prefill does
        """
        width = max(64, 1 << (dim - 1).bit_length())
        options = launch_options(4)
        if not arch.startswith("gfx"):
            # the same for decode and prefill: there warps decide the order of a row's sums
            many = width > 128 or self.rows > 16
            return {**options, "num_warps": 8 if many else 4, "num_stages": 2}
        # one shape of matrix instruction for all tiles, or rows of two tiles could differ
        options |= {"num_stages": 1, "matrix_instr_nonkdim": 16}
        if arch == "gfx942":
            options["kpack"] = 2  # 128-bit reads of local memory; later processors need no telling
        kind = "prefill" if folds else "small" if self.rows == 16 else "large"
        return {**options, "waves_per_eu": max(1, _WAVES[kind][min(width, 256)] - softcap)}


_WAVES = {
    "small": {64: 7, 128: 2, 256: 3},
    "large": {64: 4, 128: 3, 256: 2},
    "prefill": {64: 4, 128: 2, 256: 1},
}
"""Waves of a SIMD that the compiler should make room for, by the width of a row: the most that need
no scratch on gfx942. Found by compiling, held by the static gates."""


@dataclass(frozen=True)
class Layout:
    """Tiles of query rows over a paged cache, on the device.

    tiles:     [T, 6] int64, see FIELDS; a tile of no rows is skipped
    rows:      [P] int32 the query row at each place
    lens:      [N] int32 how many positions each row attends to; 0 for padding
    slots:     flat int32 table; with page > 1 its entries are pages
    parts:     [N] int32 where each row's partial results start
    num_parts: partial results of all rows, or more
    max_splits: splits of the longest row, or more
    tails:     flat int32 table of a tree's branches, see `trees`; None: there are none
    """

    tile: Tile
    tiles: Tensor
    rows: Tensor
    lens: Tensor
    slots: Tensor
    parts: Tensor
    num_parts: int
    max_splits: int
    page: int = 1
    tails: Tensor | None = None

    @staticmethod
    def of(
        requests: Sequence[Sequence[Past]],
        tile: Tile,
        group: int,
        device: torch.device | str = "cpu",
    ) -> Layout:
        """Lay out the rows of each request: one past for a chain, one for each branch of a tree.

        Branches share the tiles of the full splits below their prefix. From there on each branch
        has tiles of its own, its keys in the order of its path: the order of plain decoding.
        """
        per_tile = tile.rows // group
        tiles: list[tuple[int, ...]] = []
        places: list[int] = []
        tables: list[Tensor] = []
        lens: dict[int, int] = {}
        index = 0

        def add(rows: Sequence[int], first: int, last: int) -> None:
            for i in range(0, len(rows), per_tile):
                some = rows[i : i + per_tile]
                tiles.append((len(places), len(some), index, first, last, 0))
                places.extend(some)

        for pasts in requests:
            trunk = 0
            if len(pasts) > 1:
                trunk = full_splits(min(past.prefix for past in pasts), tile.split)
            if trunk:
                add([row for past in pasts for row in past.rows], 0, trunk)
            for past in pasts:
                add(past.rows, trunk, ALL)
                tables.append(past.slots)
                index += len(past.slots)
                lens.update(zip(past.rows, past.lens, strict=True))
        in_order = torch.tensor([lens[row] for row in sorted(lens)], dtype=torch.int32)
        splits = num_splits_on_device(in_order, tile.split)
        return Layout(
            tile=tile,
            tiles=torch.tensor(tiles, device=device),
            rows=torch.tensor(places, dtype=torch.int32, device=device),
            lens=in_order.to(device),
            slots=torch.cat(tables).to(torch.int32).to(device),
            parts=(splits.cumsum(0) - splits).to(torch.int32).to(device),
            num_parts=int(splits.sum()),
            max_splits=int(splits.max()),
        )

    @staticmethod
    def of_lines(
        lines: Tensor, lens: Tensor, table: Tensor, tile: Tile, group: int, max_len: int
    ) -> Layout:
        """Lay out rows that stand beside the other rows of their line, without asking the device.

        Shapes depend on the number of rows alone, so a graph can be captured for each number: a
        step with fewer rows is padded with rows of length 0.

        lines: [N] the line of `table` that holds each row's slots; lens: [N]
        table: [R, L] int32 the slot of each position of each line
        max_len: no row is longer; it decides how much memory there is for partial results
        """
        n, per_tile = len(lines), tile.rows // group
        i = torch.arange(n, device=lines.device)
        changes = lines.diff(prepend=lines[:1] - 1) != 0
        place = i - torch.where(changes, i, 0).cummax(0).values
        tile_of = (place % per_tile == 0).cumsum(0) - 1
        tiles = torch.zeros(n, len(FIELDS), dtype=torch.int64, device=lines.device)
        tiles[:, 0].scatter_reduce_(0, tile_of, i, "amin", include_self=False)
        tiles[:, 1].scatter_add_(0, tile_of, (lens > 0).long())
        tiles[:, 2].scatter_(0, tile_of, lines.long() * table.stride(0))
        tiles[:, 4] = ALL
        splits = num_splits_on_device(lens, tile.split)
        max_splits = num_splits(max_len, tile.split)
        return Layout(
            tile=tile,
            tiles=tiles,
            rows=i.to(torch.int32),
            lens=lens.to(torch.int32),
            slots=table,
            parts=(splits.cumsum(0) - splits).to(torch.int32),
            num_parts=n * max_splits,
            max_splits=max_splits,
        )

    @staticmethod
    def of_runs(
        lines: Tensor,
        prefixes: Sequence[int],
        counts: Sequence[int],
        table: Tensor,
        tile: Tile,
        group: int,
    ) -> Layout:
        """Lay out runs of new rows, one for each line, after what is cached: for prefill.

        lines, table: as in `of_lines`; prefixes, counts: cached and new positions of each line
        """
        per_tile, device = tile.rows // group, lines.device
        tiles, lens, row = [], [], 0
        for run, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
            for i in range(0, count, per_tile):
                tiles.append((row + i, min(per_tile, count - i), run, 0, ALL, 0))
            lens.append(torch.arange(prefix + 1, prefix + count + 1, dtype=torch.int32))
            row += count
        on_device = torch.tensor(tiles).to(device)
        on_device[:, 2] = lines.long()[on_device[:, 2]] * table.stride(0)
        longest = max(p + c for p, c in zip(prefixes, counts, strict=True))
        return Layout(
            tile=tile,
            tiles=on_device,
            rows=torch.arange(row, dtype=torch.int32, device=device),
            lens=torch.cat(lens).to(device),
            slots=table,
            parts=torch.empty(0, dtype=torch.int32, device=device),  # prefill has none
            num_parts=0,
            max_splits=num_splits(longest, tile.split),
        )

    def copy_(self, other: Layout) -> None:
        """Take over another layout of as many rows, in place: for a captured graph."""
        pairs = [(self.tiles, other.tiles), (self.rows, other.rows), (self.lens, other.lens)]
        pairs.append((self.parts, other.parts))
        if self.tails is not None and other.tails is not None:
            pairs.append((self.tails, other.tails))
        for mine, new in pairs:
            mine[: len(new)].copy_(new)
        self.tiles[len(other.tiles) :].zero_()  # tiles of no rows

    def tokens_read(self) -> int:
        """Return how many keys are read for each kv head; as many values are.

        A tile reads its splits once, up to its longest row, whatever the number of its rows.
        """
        total, size = 0, self.tile.split
        for place, count, _, first, last, _ in self.tiles.tolist():
            if count:
                reach = int(self.lens[self.rows[place : place + count].long()].max())
                total += max(0, min(reach, split_start(last, size)) - split_start(first, size))
        return total


def branches(parents: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut a tree into branches: for each, the nodes it computes, and the path to its last node.

    Every node belongs to one branch: the first that passes through it. So a tree costs as many
    branches as it has leaves. parents: the parent of each node, before it; -1 for a root
    """
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([node] if parent < 0 else [*paths[parent], node])
    leaves = sorted(set(range(len(parents))) - set(parents))
    found, done = [], set[int]()
    for leaf in leaves:
        own = [node for node in paths[leaf] if node not in done]
        done.update(own)
        found.append((own, paths[leaf]))
    return found


def tree_pasts(parents: Sequence[int], cached: Tensor, own: Tensor, first: int = 0) -> list[Past]:
    """Return the pasts of one request's rows, one for each branch of the tree that they form.

    parents: the parent of each row, before it; -1 for one that follows what is cached
    cached, own: slots of what is cached, and of each row
    first: the number of the first row in the pass
    """
    prefix = len(cached)
    return [
        Past(
            rows=[first + node for node in nodes],
            # a branch computes the end of its path
            lens=range(prefix + len(path) - len(nodes) + 1, prefix + len(path) + 1),
            slots=torch.cat([cached, own[path]]),
            prefix=prefix,
        )
        for nodes, path in branches(parents)
    ]
