"""What it takes: weights, caches and workspace of both models, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isqrt
from typing import Any

from outrider.checkpoint import BYTES
from outrider.doctor.finding import Finding, size
from outrider.doctor.model import Model
from outrider.doctor.pair import Plan
from outrider.serving.logits import max_rows, row_bytes

__all__ = ["Budget", "Room", "Row", "budget", "check_memory"]

CHUNK = 4096
"""Tokens of a prompt that are read at once: SGLang's --chunked-prefill-size on many GPUs."""

SPARE = 0.1
"""The share of a device that CUDA graphs, the allocator and the host itself are left."""


@dataclass(frozen=True)
class Room:
    """Where it must fit. total: bytes; what: of which device, in words"""

    total: int
    what: str
    is_gpu: bool


@dataclass(frozen=True)
class Row:
    """A line of the table. bytes: None if it is not known; how: the arithmetic"""

    what: str
    bytes: int | None
    how: str


@dataclass(frozen=True)
class Budget:
    """The table, for each device, and what the caches of one token take."""

    rows: tuple[Row, ...]
    room: Room
    tokens: int
    token_bytes: int | None
    target_weights: int | None

    @property
    def total(self) -> int:
        """The sum of what is known."""
        return sum(row.bytes or 0 for row in self.rows)

    @property
    def complete(self) -> bool:
        """Whether all of it is known."""
        return all(row.bytes is not None for row in self.rows)

    @property
    def fitting(self) -> int | None:
        """How many tokens the caches can hold beside the rest, with some room to spare."""
        if not self.token_bytes or not self.complete:
            return None
        rest = self.total - self.tokens * self.token_bytes
        return max(0, int((self.room.total * (1 - SPARE) - rest) // self.token_bytes))

    @property
    def static_fraction(self) -> float | None:
        """The share of the device for the target and both caches, so that all fit."""
        if self.fitting is None or self.target_weights is None or not self.token_bytes:
            return None
        taken = self.target_weights + self.fitting * self.token_bytes
        return taken / self.room.total

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "total": self.total,
            "complete": self.complete,
            "available": self.room.total,
            "device": self.room.what,
            "token_bytes": self.token_bytes,
            "fitting_tokens": self.fitting,
            "mem_fraction_static": self.static_fraction,
        }


def kv_bytes(model: Model, plan: Plan) -> tuple[int | None, str]:
    """Return what the cache of one token takes on each device, and the arithmetic.

    Heads are shared out, but each device has one at least. Layers that see a window only are
    counted in full: that is how they are cached.
    """
    layers, heads, dim = model.layers, model.kv_heads, model.head_dim
    if model.config.get("kv_lora_rank"):
        return None, "latent attention (MLA): not known"
    if not (layers and heads and dim):
        return None, "config.json does not say"
    own = -(-heads // plan.tp)
    each = BYTES[plan.computes_in(model)]
    how = f"2 x {layers} layers x {own} heads x {dim} x {each} bytes"
    return 2 * layers * own * dim * each, how


def budget(target: Model, draft: Model | None, plan: Plan, room: Room) -> Budget:
    """Return what each device must hold."""
    tokens = plan.requests * plan.length(target)
    models = [("target", target)] + ([("draft", draft)] if draft is not None else [])
    rows = [_weights(name, model, plan) for name, model in models]
    if draft is not None and plan.draft_bits:
        copied = draft.bytes_of_copy(plan.draft_bits, plan.loads_as(draft)) / plan.tp
        how = "beside the weights, which read prompts"
        taken = int(copied) if draft.tensors is not None else None
        rows.append(Row(f"weights, draft in {plan.draft_bits} bits", taken, how))
    cells = [kv_bytes(model, plan) for _, model in models]
    for (name, _), (cell, how) in zip(models, cells, strict=True):
        taken = None if cell is None else cell * tokens
        rows.append(Row(f"KV cache, {name}", taken, f"{how} x {tokens:,} tokens"))
    rows += _workspace(models, plan, room)
    known = [cell for cell, _ in cells if cell is not None]
    return Budget(
        tuple(rows),
        room,
        tokens,
        token_bytes=sum(known) if len(known) == len(cells) else None,
        target_weights=rows[0].bytes,
    )


def _weights(name: str, model: Model, plan: Plan) -> Row:
    total, dtype = model.bytes_loaded(plan.loads_as(model)), plan.loads_as(model)
    how = f"{len(model.loaded)} tensors, {dtype or 'packed as saved'}"
    how += f", a share of {plan.tp}" if plan.tp > 1 else ""
    if total is None:
        return Row(f"weights, {name}", None, "no weights here")
    return Row(f"weights, {name}", -(-total // plan.tp), how)


def _workspace(models: list[tuple[str, Model]], plan: Plan, room: Room) -> Iterator[Row]:
    """Yield what a pass needs beside: estimates, of what is largest."""
    target = models[0][1]
    wide, each = target.vocabulary, BYTES[plan.computes_in(target)]
    if wide is None:
        yield Row("workspace, logits", None, "config.json does not say")
    else:
        rows = max(plan.requests, min(plan.requests * (plan.drafts + 1), max_rows(wide, each)))
        rows += plan.requests if len(models) > 1 else 0
        # as the model computes them, as float32, as probabilities, and rows of one sampling kind
        how = f"{rows} rows x {wide:,} x ({each} + 4 + 4 + 4) bytes, without penalties"
        yield Row("workspace, logits", rows * row_bytes(wide, each), how)
    yield _attention(target, plan, room)
    hidden, between = target.hidden, target.intermediate
    if hidden is None or between is None:
        yield Row("workspace, prompts", None, "config.json does not say")
        return
    chunk = min(CHUNK, plan.requests * plan.length(target))
    share = -(-between // plan.tp)
    how = f"{chunk:,} tokens x (2 x {hidden:,} + 3 x {share:,}) x {each} bytes"
    yield Row("workspace, prompts", chunk * (2 * hidden + 3 * share) * each, how)


def _attention(target: Model, plan: Plan, room: Room) -> Row:
    """Return what attention needs: sums of splits on a GPU, one layer's gathered cache on a CPU."""
    name, cell = "workspace, attention", kv_bytes(target, plan)[0]
    if cell is None or not target.layers or not target.heads or not target.head_dim:
        return Row(name, None, "not known")
    length = plan.length(target)
    if not room.is_gpu:
        tokens = plan.requests * length
        return Row(name, cell // target.layers * tokens, f"one layer of {tokens:,} tokens")
    splits, rows = _splits(length), plan.requests * (plan.drafts + 1)
    heads, dim = -(-target.heads // plan.tp), target.head_dim
    how = f"{rows} rows x {splits} splits x {heads} heads x {dim + 2} x 4 bytes"
    return Row(name, rows * splits * heads * (dim + 2) * 4, how)


def _splits(length: int) -> int:
    """Return into how many splits our kernel cuts so many keys, without importing torch.

    Eight of 256, eight of 512, and so on: see `kernels/paged_attention/splits.py`.
    """
    units = (length - 1) // 256
    block = (isqrt(units + 1) - 1) // 2
    return 8 * block + (units - 4 * block * (block + 1)) // (block + 1) + 1


def check_memory(
    found: Budget, plan: Plan, target: Model, drafts_in_sglang: bool
) -> Iterator[Finding]:
    """Say whether it fits, and how many requests would.

    drafts_in_sglang: whether SGLang is the host, and there is a draft model
    """
    room, each = found.room, plan.length(target)
    where = f"{size(room.total)} of {room.what}"
    least = "" if found.complete else "at least "
    what = f"{least}{size(found.total)} for {plan.requests} requests of {each:,} tokens, {where}"
    if not found.complete:
        missing = ", ".join(row.what for row in found.rows if row.bytes is None)
        yield Finding("memory", "note", what, f"not known: {missing}", "see the table")
        return
    fitting = found.fitting or 0
    can = fitting // each
    why = f"beside weights and workspace there is room for {fitting:,} tokens in the caches"
    if can < 1:
        yield Finding(
            "memory",
            "problem",
            what,
            "not one request of that length fits",
            "more devices (--tp), a shorter --context-length, or smaller models",
        )
        return
    why += f": {can:,} requests of this length, a tenth of the device left for graphs and the host"
    if can < plan.requests:
        fix = f"at most --requests {can}, a shorter --context-length, or more devices (--tp)"
        yield Finding("memory", "warning", what, why, fix)
    else:
        yield Finding("memory", "ok", what, why)
    if drafts_in_sglang and found.static_fraction is not None:
        fraction = int(found.static_fraction * 100) / 100
        yield Finding(
            "memory",
            "note",
            "SGLang sizes its cache by --mem-fraction-static before the draft model is loaded",
            "the draft's cache is part of that, its weights are not: without the flag, on a GPU "
            "8 GiB are left for them, for graphs and for logits",
            f"if that is not enough, serve with --mem-fraction-static {fraction:.2f} or less",
        )
