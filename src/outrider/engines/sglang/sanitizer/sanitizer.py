"""The KV sanitizer: a debug mode in which a real server checks each KV slot that it reads.

`sanitize: true` in the profile. Each pass of the target, of a draft model and of heads names the
slots that it writes (`shadow`). Before that it is checked that

* a row reads its own request's text, from position 0 to its own, and writes the slot that the
  table has for its position;
* what enters the prefix cache is the text of its key;
* a slot is given out only when it is free, and freed only when it is not;
* where the device computes how many tokens of a request are cached, the CPU settles the same;
* a draft model or a head reads its request's text, too. Where it has read nothing, or where the
  text comes from another request, its drafts are poor, and nothing else: that is not checked.

The first violation stops the server and says which request wrote the slot and which one reads it.
SGLang without speculation can be checked too: it is the control. A pass waits for the device, so
figures of speed mean nothing in this mode. Branches of a head's trees have slots of their own and
are not checked.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any

import numpy as np

from outrider.core import Ints, Unsupported
from outrider.engines.sglang.arguments.chosen import NAME, is_chosen
from outrider.engines.sglang.hooks.laying import Table
from outrider.engines.sglang.sanitizer.pass_rows import Rows, ints, rows_of, split_rows
from outrider.engines.sglang.sanitizer.shadow import (
    NONE,
    Hashes,
    Shadow,
    Violation,
    Write,
    terms,
    text_hashes,
)
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.profile import load_profile
from outrider.serving.values import Knows

logger = logging.getLogger(__name__)

SAY_EVERY = 2_000
"""Passes between two lines in the log that say how much was checked."""

TARGET, DRAFT = "target", "draft model"


def is_wanted() -> bool:
    """Say whether the profile asks for the sanitizer. One that cannot be read does not."""
    try:
        return load_profile().sanitize
    except Unsupported:
        return False


@contextmanager
def stopping() -> Iterator[None]:
    """Stop the server at a violation, as SGLang's scheduler does at an error of its own."""
    try:
        yield
    except Violation as violation:
        logger.critical("KV sanitizer: %s", violation)
        os.kill(os.getppid(), signal.SIGQUIT)
        raise


class Text:
    """The hashes of a request's text, as far as it is known.

    base: the hash of the empty text: of the LoRA adapter that the request has
    """

    def __init__(self, req: Any) -> None:
        adapter = getattr(req, "lora_id", None)
        self.req, self.base = req, np.uint64(abs(hash(adapter)) if adapter else 0)
        self._hashes: Hashes = np.empty(0, np.uint64)

    def hashes(self) -> Hashes:
        """Return the hash up to each token that the scheduler knows."""
        prompt, output = self.req.origin_input_ids, self.req.output_ids
        have, count = len(self._hashes), len(prompt) + len(output)
        if count < have:
            self._hashes, have = self._hashes[:0], 0
        if count > have:
            new = [*prompt[have:], *output[max(0, have - len(prompt)) :]]
            before = self._hashes[-1] if have else self.base
            self._hashes = np.concatenate([self._hashes, text_hashes(new, have, before)])
        return self._hashes


class Sanitizer:
    """Checks all passes of a process over its pool of slots. It begins with the first pass."""

    def __init__(self, version: SglangVersion) -> None:
        self._version = version
        self._allocator: Any = None
        self._table: Any = None
        self._num_passes = 0
        self._shadows: dict[str, Shadow] = {}
        self._texts: dict[int, Text] = {}
        self._bases = {0}

    def hooks(self) -> Table:
        """Return where it looks: at passes, and at what enters the prefix cache."""
        ours = "outrider.engines.sglang."
        inserts = [f"sglang.srt.{name}.insert" for name in self._version.caches]
        return {
            "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": (
                self._target_pass,
                "BEFORE",
            ),
            **dict.fromkeys(inserts, (self._insert, "BEFORE")),
            f"{ours}drafts.draft_model.SglangDraftModel._forward": (self._draft_pass, "BEFORE"),
            f"{ours}drafts.slot_heads.SglangHead.read": (self._head_pass, "BEFORE"),
            f"{ours}drafts.slot_heads.UnrolledHead.read": (self._unrolled_pass, "BEFORE"),
            "outrider.serving.step.ServedStep.settle_next": (_check_lengths, "AFTER"),
        }

    def _target_pass(self, worker: Any, batch: Any, *args: Any, **options: Any) -> None:
        if batch is None or worker.is_draft_worker:
            return
        with stopping():
            if self._allocator is None:
                runner = worker.model_runner
                _check_algorithm(self._version.arguments(runner.server_args))
                self._begin(runner.token_to_kv_pool_allocator, runner.req_to_token_pool)
            for line, req in zip(ints(batch.req_pool_indices).tolist(), batch.reqs, strict=False):
                if line not in self._texts or self._texts[line].req is not req:
                    self._texts[line] = Text(req)
                    self._bases.add(int(self._texts[line].base))
            self._check(TARGET, rows_of(batch, self._version))

    def _draft_pass(self, model: Any, batch: Any) -> None:
        with stopping():
            self._check(DRAFT, rows_of(batch, self._version))

    def _head_pass(
        self, head: Any, tokens: Any, lines: Any, positions: Any, counts: Any, *args: Any
    ) -> None:
        slots = head._table[lines, positions]
        self._check_pairs(head.name, lines, tokens, positions, slots, counts)

    def _unrolled_pass(self, unrolled: Any, tokens: Any) -> None:
        depth = unrolled._depth
        slots, positions = unrolled._slots[depth], unrolled._positions[depth]
        counts = np.ones(len(tokens), np.int64)
        name = unrolled._head.name
        self._check_pairs(name, unrolled._lines, tokens, positions, slots, counts)

    def _check_pairs(
        self, name: str, lines: Any, tokens: Any, positions: Any, slots: Any, counts: Ints
    ) -> None:
        """Check a pass of a head. The first token of a text is no pair: it has no row."""
        rows = split_rows(ints(lines), ints(tokens), ints(positions), ints(slots), counts, start=1)
        with stopping():
            self._check(f"head {name}", rows, start=1)

    def _insert(self, cache: Any, params: Any) -> None:
        if cache.token_to_kv_pool_allocator is not self._allocator or params.value is None:
            return
        if params.prev_prefix_len >= len(params.key):
            return  # 0.5.23 splits a node so: nothing enters, and its slots may be freed duplicates
        slots = ints(params.value)[: len(params.key)]
        with stopping():
            shadow, names = self._shadow(TARGET), text_hashes(params.key.token_ids[: len(slots)])
            base = shadow.names(slots[:1]) - names[:1]  # the hash of an adapter, if it is one
            if len(names) and int(base[0]) in self._bases:
                names = names + base
            shadow.read(slots, names, "the prefix cache")

    def _begin(self, allocator: Any, table: Any) -> None:
        self._allocator, self._table = allocator, table.req_to_token
        taken = np.ones(allocator.size + allocator.page_size, np.bool_)
        size = allocator.page_size
        taken[(_free_pages(allocator)[:, None] * size + np.arange(size)).ravel()] = False
        self._shadow(TARGET).begin(taken)
        self._watch_allocator()
        logger.info("the KV sanitizer checks %d slots", len(taken))

    def _check(self, what: str, groups: Iterator[Rows], start: int = 0) -> None:
        """Check what each request's rows read, and name what they write.

        start: the first position that is read
        """
        self._num_passes += 1
        if self._num_passes % SAY_EVERY == 0:
            read = {name: shadow.num_read for name, shadow in self._shadows.items()}
            logger.info("sanitizer: %d passes, slots read: %s", self._num_passes, read)
        shadow = self._shadow(what)
        for rows in groups:
            self._check_rows(shadow, ints(self._table[rows.line]), rows, start)

    # -- rows

    def _check_rows(self, shadow: Shadow, line: Ints, rows: Rows, start: int) -> None:
        text, first = self._texts[rows.line], int(rows.positions[0])
        if text.req.finished():
            return  # its slots are free or the prefix cache's, and its rows are discarded
        reader = f"a row of request {text.req.rid} at position {first} in pass {self._num_passes}"
        known, before = text.hashes(), line[start:first]
        is_draft, most = shadow.what != TARGET, max(0, len(known) - start)
        is_fine = partial(self._is_gap, shadow, text.req.rid) if is_draft else None
        shadow.read(before[:most], known[start:first], reader, start, is_fine)
        if len(before) > most:
            # the scheduler learns of these tokens later: until then they are this request's
            shadow.read_own(before[most:], text.req.rid, reader, start + most)
        base = known[first - 1] if 0 < first <= len(known) else text.base
        if first > len(known):
            base = shadow.names(line[first - 1 : first])[0]
        made = self._names_of(rows, base)
        inside = rows.positions < len(known)
        wrong = inside & (made != known[np.where(inside, rows.positions, 0)])
        if wrong.any() and not is_draft:
            position = int(rows.positions[wrong.argmax()])
            raise Violation(
                f"{shadow.what}: {reader} has another token at {position} than its text"
            )
        places = first + np.arange(len(rows.slots))
        if not is_draft and (line[places] != rows.slots).any():
            place = int((line[places] != rows.slots).argmax())
            raise Violation(
                f"{shadow.what}: {reader} writes slot {rows.slots[place]}, and its place in the "
                f"table is that of slot {line[places[place]]}"
            )
        writes = [Write(text.req.rid, p, self._num_passes) for p in rows.positions.tolist()]
        shadow.write(rows.slots, made, writes)

    def _is_gap(self, shadow: Shadow, request: str, slot: int) -> bool:
        """Say whether a slot may lack what a draft model keeps: its drafts are poor then, no more.

        It was not read, or it came to the request from the prefix cache: others wrote it.
        """
        is_inherited = not self._shadow(TARGET).is_written_by(slot, request)
        return is_inherited or not shadow.is_written(slot)

    @staticmethod
    def _names_of(rows: Rows, base: np.uint64) -> Hashes:
        """Return what rows write. base: the name of what stands before the first"""
        if (rows.parents == np.arange(len(rows.parents)) - 1).all():
            if (np.diff(rows.positions) != 1).any():
                raise Violation(f"rows of one request at positions {rows.positions.tolist()}")
            return text_hashes(rows.tokens, int(rows.positions[0]), base)
        names, added = np.empty(len(rows.tokens), np.uint64), terms(rows.tokens, rows.positions)
        for row, parent in enumerate(rows.parents.tolist()):
            names[row] = added[row] + (base if parent < 0 else names[parent])
        return names

    # -- slots

    def _shadow(self, what: str) -> Shadow:
        if what not in self._shadows:
            allocator = self._allocator
            count = allocator.size + allocator.page_size
            self._shadows[what] = shadow = Shadow(what, count, allocator.page_size)
            if what != TARGET:
                shadow.begin(self._shadows[TARGET].is_taken())
        return self._shadows[what]

    def _take(self, slots: Any, ends: Any) -> None:
        """Note that slots were given out. ends: the last slots of texts that go on in their page"""
        size, tails = self._allocator.page_size, NONE
        if ends is not None:
            behind = ints(ends)[:, None] + np.arange(1, size)
            tails = behind[behind // size == ints(ends)[:, None] // size]
        with stopping():
            for shadow in self._shadows.values():
                shadow.take(ints(slots), tails)

    def _free(self, slots: Any) -> None:
        with stopping():
            for shadow in self._shadows.values():
                shadow.free(ints(slots))

    def _watch_allocator(self) -> None:
        """See what SGLang's allocator gives and takes back."""
        allocator = self._allocator

        def watch(name: str, see: Callable[..., Any]) -> None:
            original = getattr(allocator, name)
            setattr(allocator, name, wraps(original)(partial(see, original)))

        def give(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
            slots = original(*args, **options)
            if slots is not None:
                asked = signature(original).bind(*args, **options).arguments
                self._take(slots, asked.get("last_loc"))
            return slots

        def take_back(original: Callable[..., Any], slots: Any) -> Any:
            if slots.numel() and not _is_grouping(allocator):
                self._free(slots)
            return original(slots)

        def release(original: Callable[..., Any], *pages: Any) -> Any:
            for some in pages:
                self._free(some * allocator.page_size)
            return original(*pages)

        def clear(original: Callable[..., Any]) -> Any:
            self._texts.clear()
            for shadow in self._shadows.values():
                shadow.clear()
            return original()

        for name in ("alloc", "alloc_extend", "alloc_decode"):
            watch(name, give)
        watch("clear", clear)
        if hasattr(allocator, "_release_page_ids"):  # the way of all pages in 0.5.23
            watch("_release_page_ids", release)
        else:
            watch("free", take_back)


def _check_lengths(settled: Any, step: Any) -> None:
    """Check a settled step: the device accepted what the CPU did. settled: None for a prefill"""
    carried = None if settled is None else settled.launched.ticket.next_draft_input
    if carried is None or carried.knows is Knows.CPU:
        return  # after drafts of the CPU the device is given the lengths
    members = settled.members
    on_device = ints(carried.new_seq_lens)[members.places].tolist()
    for request, length in zip(members.requests, on_device, strict=True):
        # of a request that has ended the device may keep more
        if request.finish_reason is None and length != request.length - 1:
            with stopping():
                raise Violation(
                    f"the device has {length} tokens of request {request.req.rid} cached, and the "
                    f"CPU {request.length - 1}"
                )


def _check_algorithm(server_args: Any) -> None:
    """Stop the server if it speculates without Outrider: what its passes write is not known."""
    algorithm = server_args.speculative_algorithm
    if algorithm is not None and not is_chosen(server_args):
        raise SystemExit(
            f"outrider: the profile's sanitize with --speculative-algorithm {algorithm}: "
            f"use {NAME}, or leave the flag out"
        )


def _free_pages(allocator: Any) -> Ints:
    """Return the pages that an allocator has not given out."""
    if hasattr(allocator, "get_all_free_pages"):  # in 0.5.23
        return ints(allocator.get_all_free_pages())
    return np.concatenate([ints(allocator.free_pages), ints(allocator.release_pages)])


def _is_grouping(allocator: Any) -> bool:
    """Say whether what is freed now is only noted, and freed at the end of a group."""
    outside = getattr(allocator, "is_not_in_free_group", None)
    return allocator.free_group is not None if outside is None else not outside
