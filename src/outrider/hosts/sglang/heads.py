"""Heads in SGLang: what they know of a token is in the target's slot for it.

Every pass of the target, be it prefill, decode or verify, tells the heads the hidden states of its
rows (`tell`). A head reduces a row's states to one vector x, and keeps it in the row's slot, beside
its own keys and values. So a request's states are found by the host's table, wherever they come
from: a prefix in the radix cache, a chunk, the first life of a request that was retracted. A tree's
slots are put in order in that table, and its states with them. Nothing leaves the device.

The pair of the token at position p (see `eagle3`) needs x of position p - 1, and its keys and
values are in the slot of p. The first token is no pair: attention begins at position 1. When the
head drafts, its own states stand in the slots of the tokens that the target has yet to read. The
pass that verifies the drafts writes over them.

Heads are modules of our own, not SGLang's: they read both published formats, they are the same in
all versions and hosts, and they need no collective calls. With tensor parallelism rank 0 has the
heads, because it has the whole of the target's states, and it alone drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.core import Ints, Outcome, Unsupported
from outrider.drafters import ModelDrafter
from outrider.drafters.heads import (
    DFlashHead,
    Head,
    HeadConfig,
    head_layers,
    head_shape,
    kind_of,
    load_head,
    read_config,
)
from outrider.drafters.heads.layers import causal
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.profile import MODEL, Profile, load_profile
from outrider.hosts.sglang.ranks import Ranks
from outrider.hosts.sglang.rows import to_device
from outrider.hosts.sglang.sequences import DraftSequence, SlotSequences
from outrider.kernels import arch, use_triton
from outrider.kernels.paged_attention import Layout, Tile, paged_attention
from outrider.kernels.prefill_attention import prefill_attention

logger = logging.getLogger(__name__)

FEW_ROWS = 32
"""Sequences with at most so many new rows are read side by side; one with more is a prompt."""


def folder_of(name: str) -> Path:
    """Return the directory of a head: this path, or what the Hugging Face hub has by this name."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise Unsupported(f"the head {name}: {error}", fix="name a directory") from None


@lru_cache(maxsize=16)
def draft_kind(path: str | None) -> str | None:
    """Return what --speculative-draft-model-path names: None, "model", or a kind of head."""
    if path is None:
        return None
    from transformers.utils import cached_file

    try:
        config = cached_file(path, "config.json")
    except OSError as error:
        raise Unsupported(f"the draft model {path}: {error}", fix="check the path") from None
    return kind_of(read_config(Path(str(config)).parent))


def head_paths(profile: Profile, server_args: Any) -> dict[str, str]:
    """Return the paths of the server's heads by the names that requests call them by."""
    path = server_args.speculative_draft_model_path
    kind = draft_kind(path)
    own = {} if kind is None or kind == MODEL else {kind: str(path)}
    others = profile.head_paths()
    if own.keys() & others:
        raise Unsupported(
            f"two heads of the name {kind!r}, by --speculative-draft-model-path and the profile",
            fix="give the profile's another name",
        )
    return own | others


def layers_to_capture(paths: Sequence[str], num_layers: int) -> list[int]:
    """Return the layers whose states these heads read, as Transformers counts them, in order."""
    read = {path: head_layers(read_config(folder_of(path)), num_layers) for path in paths}
    found = sorted({layer for layers in read.values() for layer in layers})
    if found != [num_layers] and not all(0 < i < num_layers for i in found):
        said = "; ".join(f"{path} reads layers {list(layers)}" for path, layers in read.items())
        raise Unsupported(
            f"these heads together: {said}",
            fix=f"SGLang gives the states of layers 1 to {num_layers - 1}, or those of the last",
        )
    return found


def capture_states(runner: Any) -> None:
    """Let the target's passes return the states that the heads read. Before graphs are made.

    runner: the target's
    """
    paths = head_paths(load_profile(), host().arguments(runner.server_args))
    if not paths:
        return
    model, name = runner.model, type(runner.model).__name__
    try:
        layers = layers_to_capture([*paths.values()], _num_layers(runner))
        if layers != [_num_layers(runner)]:
            if not hasattr(model, "set_eagle3_layers_to_capture"):
                raise Unsupported(
                    f"a head with {name}", fix="SGLang gives no hidden states of this model"
                )
            model.set_eagle3_layers_to_capture([i - 1 for i in layers])  # it counts outputs
    except Unsupported as error:
        raise SystemExit(f"outrider: {error}") from error
    host().return_states(runner)


def head_cell_bytes(path: str, itemsize: int) -> int:
    """Return what a token takes in the buffers of a head: x, a key and a value."""
    return _cell(head_shape(read_config(folder_of(path)), path)) * itemsize


def _cell(config: HeadConfig) -> int:
    return config.hidden_size + 2 * config.num_kv_heads * config.head_dim


def load_heads(paths: dict[str, str], runner: Any, ranks: Ranks) -> dict[str, SglangHead | None]:
    """Return the heads by name; None on ranks other than 0, which drafts. All ranks must call."""
    if not paths:
        return {}
    model, num_layers = runner.model, _num_layers(runner)
    embedding, lm_head = (
        ranks.whole(module.weight)[: runner.model_config.vocab_size]
        for module in (model.get_input_embeddings(), model.lm_head)
    )
    captured = layers_to_capture([*paths.values()], num_layers)
    heads: dict[str, SglangHead | None] = dict.fromkeys(paths)
    for name, path in paths.items() if ranks.leads else ():
        head = load_head(folder_of(path), embedding, num_layers, lm_head=lm_head)
        assert not isinstance(head, DFlashHead), "refused when the arguments were checked"
        heads[name] = made = SglangHead(head, runner, captured)
        logger.info(
            "head %s (%s, %s): %.2f GiB of weights of its own, %.2f GiB of states and "
            "cache", name, head.name, path, made.weight_bytes / 2**30, made.pool_bytes / 2**30,
        )  # fmt: skip
    return heads


def _num_layers(runner: Any) -> int:
    return int(runner.model_config.num_hidden_layers)


class SglangHead(SlotSequences):
    """Runs a head over rows in the target's slots.

    captured: the layers whose states a pass of the target tells, as Transformers counts them
    weight_bytes, pool_bytes: what it takes on the device
    """

    max_unread = FEW_ROWS
    max_catch_up = 2048

    def __init__(self, head: Head, runner: Any, captured: Sequence[int]) -> None:
        super().__init__()
        self.head, config = head, head.config
        self.vocab_size, self.max_length = config.vocab_size, int(runner.model_config.context_len)
        self._table: Tensor = runner.req_to_token_pool.req_to_token
        self._num_captured = len(captured)
        self._columns = [captured.index(i) for i in head.hidden_layers]
        num_slots = runner.token_to_kv_pool_allocator.size + runner.page_size
        shared = ("embed_tokens.weight", "lm_head.weight")[: 1 + (head.name != "eagle3")]
        weights = [w for name, w in head.state_dict().items() if name not in shared]
        device = self._table.device
        dtype = next(w.dtype for w in weights if w.is_floating_point())
        self._x = torch.zeros(num_slots, config.hidden_size, dtype=dtype, device=device)
        shape = 2, num_slots, config.num_kv_heads, config.head_dim
        self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self.pool_bytes = _cell(config) * num_slots * dtype.itemsize
        self.weight_bytes = sum(w.nbytes for w in weights)
        self._fault: str | None = None

    @torch.inference_mode()
    def tell(self, slots: Tensor, states: Tensor) -> None:
        """Keep the target's states of some rows.

        slots: [N] of the rows
        states: [N, captured * H]
        """
        try:
            each = states.unflatten(-1, (self._num_captured, -1))[:, self._columns]
            self._x[slots] = self.head.reduce(each)
        except Exception as error:  # the target's step goes on; drafting learns of it when it asks
            self._fault = f"the target's states were not read: {error!r}"

    @torch.inference_mode()
    def prefill(self, batch: Any) -> None:
        """Read the tokens of the host's prefill batch, whose states were told."""
        prefixes, counts = getattr(batch, host().prefix_lens), getattr(batch, host().extend_lens)
        owners = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(owners)) - starts[owners] + np.asarray(prefixes)[owners]
        rows = np.flatnonzero(positions > 0)
        if len(rows):
            row, owner = to_device(np.stack([rows, owners[rows]]), self._table.device)
            lines = batch.req_pool_indices[owner]
            self._read(batch.input_ids[row], lines, positions[rows], owners[rows])
        self.note_prefill(batch, is_read=True)

    @torch.inference_mode()
    def extend(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> Tensor:
        """Read tokens. Return the logits after the last one of each sequence, [B, V]."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise RuntimeError(fault)
        states, slots, owners = self._append(segments)
        ends = to_device(
            np.searchsorted(owners, np.arange(len(segments)), "right") - 1, slots.device
        )
        last = states[ends]
        self._x[slots[ends]] = last  # drafting goes on from them; the target has none for these
        return self.head.logits(last)

    @torch.inference_mode()
    def catch_up(self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]) -> None:
        """Read tokens."""
        self._append(segments)

    def run(self, batch: Any) -> Tensor:
        """Read the rows of the host's decode batch, for nothing but the time it takes."""
        positions = batch.seq_lens_cpu.numpy() - 1
        owners = np.arange(len(positions))
        states, _ = self._read(batch.input_ids, batch.req_pool_indices, positions, owners)
        return self.head.logits(states)

    def _append(
        self, segments: Sequence[tuple[DraftSequence, Sequence[int]]]
    ) -> tuple[Tensor, Tensor, Ints]:
        """Read tokens. Return their rows' states and slots, and which sequence each belongs to."""
        tokens: list[int] = []
        lines: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        for owner, (sequence, new) in enumerate(segments):
            first = max(1, sequence.length)  # the first token is no pair
            new = new[first - sequence.length :]
            tokens += new
            positions += range(first, first + len(new))
            lines += [sequence.req_pool_idx] * len(new)
            owners += [owner] * len(new)
        token, line = to_device(np.array([tokens, lines]), self._table.device)
        states, slots = self._read(token, line, np.array(positions), np.array(owners))
        for sequence, new in segments:
            sequence.length += len(new)
        return states, slots, np.array(owners)

    def _read(
        self, tokens: Tensor, lines: Tensor, positions: Ints, owners: Ints
    ) -> tuple[Tensor, Tensor]:
        """Read pairs. Return the states that follow and their slots, [N, H] and [N].

        tokens, lines: [N] on the device; lines of the host's table
        positions, owners: [N] on the host; rows of one owner stand beside each other, in order
        """
        position = to_device(positions, self._table.device)
        slots, before = self._table[lines, position].long(), self._table[lines, position - 1].long()
        attend = PoolPass(self._pool, slots, lines, positions, position, owners, self._table)
        return self.head(tokens, self._x[before], position, attend), slots


class PoolPass:
    """A pass over rows whose keys and values are in slots: see `Attend`.

    A row at position p sees positions 1 to p: p keys.
    """

    def __init__(
        self,
        pool: Tensor,
        slots: Tensor,
        lines: Tensor,
        positions: Ints,
        position: Tensor,
        owners: Ints,
        table: Tensor,
    ) -> None:
        self._keys, self._values = pool
        self._slots, self._lines, self._lens = slots, lines, position
        self._table = table[:, 1:]
        self._firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        self._counts = np.diff(self._firsts, append=len(owners))
        self._ends = positions[self._firsts] + self._counts - 1

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each row look at its past."""
        self._keys[self._slots], self._values[self._slots] = k, v
        is_prompt = int(self._counts.max()) > FEW_ROWS
        if use_triton(q.device):
            return self._kernel(q, is_prompt)
        return self._one_by_one(q) if is_prompt else self._side_by_side(q)

    def _kernel(self, q: Tensor, is_prompt: bool) -> Tensor:
        group, scale = q.shape[1] // self._keys.shape[1], q.shape[-1] ** -0.5
        tile, longest = Tile.fit(group), int(self._ends.max())
        if not is_prompt:
            rows = Layout.of_lines(self._lines, self._lens, self._table, tile, group, longest)
            return paged_attention(q, self._keys, self._values, rows, scale)
        tile = tile.for_prefill(arch(q.device), q.shape[-1], same_bits=False)
        lines = self._lines[to_device(self._firsts, q.device)]
        prefixes = (self._ends - self._counts).tolist()
        runs = Layout.of_runs(lines, prefixes, self._counts.tolist(), self._table, tile, group)
        return prefill_attention(q, self._keys, self._values, runs, scale)

    def _one_by_one(self, q: Tensor) -> Tensor:
        """Attend from the rows of each sequence in turn: they are many."""
        found, lines = [], self._lines[self._firsts].tolist()
        for line, end, mine in zip(lines, self._ends, q.split(self._counts.tolist()), strict=True):
            slots = self._table[line, :end].long()
            found.append(causal(mine, self._keys[slots], self._values[slots]))
        return torch.cat(found)

    def _side_by_side(self, q: Tensor) -> Tensor:
        """Attend from all rows at once, padded to the most rows and keys of a sequence."""
        size, most, longest = len(self._firsts), int(self._counts.max()), int(self._ends.max())
        owner = torch.from_numpy(np.repeat(np.arange(size), self._counts))
        place = torch.arange(len(q)) - torch.from_numpy(self._firsts)[owner]
        slots = self._table[self._lines[self._firsts], :longest].long()
        lens = torch.ones(size, most, dtype=torch.int64)  # padding sees something: no NaN
        lens[owner, place] = self._lens
        queries = q.new_zeros(size, most, *q.shape[1:])
        queries[owner, place] = q
        found = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            self._keys[slots].transpose(1, 2),
            self._values[slots].transpose(1, 2),
            attn_mask=(torch.arange(longest) < lens[..., None])[:, None],
            enable_gqa=True,
        )
        return found.transpose(1, 2)[owner, place]


class SglangHeadDrafter(ModelDrafter[DraftSequence]):
    """Drafts with a head whose states are in the target's slots."""

    def __init__(
        self, model: SglangHead, vocab_size: int, min_survival: float = 0.3, siblings: int = 0
    ) -> None:
        super().__init__(model, vocab_size, min_survival, siblings)
        self.name = model.head.name

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget the drafts, right or not: they are read again with the target's states."""
        for outcome in outcomes:
            sequence = self._states[outcome.request.id].sequence
            self._model.truncate(sequence, outcome.request.length)
