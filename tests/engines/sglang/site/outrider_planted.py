"""Faults in what a server does with its KV slots, planted so that the KV sanitizer must find them.

$OUTRIDER_TEST_PLANTED names one of `PLANTED`.
"""

from __future__ import annotations

import itertools
import os

OURS, SERVING, SRT = "outrider.engines.sglang.", "outrider.serving.", "sglang.srt."


def claimed(result, self, settled, output, batch):
    """An answer's last token counts as cached, which no pass has written."""
    for request in settled.members.requests:
        if request.finish_reason is not None and not request.req.finished():
            self.version.kv(request.req).kv_committed_len += 1


def rejected():
    """Now and then a token is not written, so that the draft in its slot stays, right or not."""
    calls = itertools.count()

    def rows(made, *args):
        if next(calls) % 10 == 9:
            made[0].out_cache_loc[0] = 0
        return made

    return rows


def session(original, self, req, *args, **options):
    """A session keeps a token whose keys and values were not written."""
    is_kept = original(self, req, *args, **options)
    slot = self.slots.get(req.session.session_id) if is_kept else None
    if slot is not None:
        kv = getattr(slot, "kv", slot)
        kv.kv_committed_len += 1
        kv.kv_allocated_len = max(kv.kv_allocated_len, kv.kv_committed_len)
    return is_kept


def given_back():
    """Now and then a request loses slots that its next rows write to."""
    calls = itertools.count()

    def take(room, self, batch):
        if next(calls) % 20 == 19:
            cache = self._version.kv(batch.reqs[0])
            line = batch.req_to_token_pool.req_to_token[cache.req_pool_idx]
            held = line[cache.kv_committed_len + 1 : cache.kv_allocated_len]
            batch.token_to_kv_pool_allocator.free(held.long())

    return take


def given_twice():
    """The allocator gives a slot that it has given before."""
    calls, first = itertools.count(), []

    def alloc(original, self, need_size):
        slots = original(self, need_size)
        if slots is not None and need_size:
            first.append(int(slots[0]))
            if next(calls) % 20 == 19:
                slots = slots.clone()
                slots[0] = first[-2]
        return slots

    return alloc


def shifted():
    """Now and then a request's last row stands one position too early."""
    calls = itertools.count()

    def rows(made, *args):
        forward, _ = made
        if next(calls) % 20 == 19:
            for lens in (forward.seq_lens, forward.seq_lens_cpu):
                lens[-1] -= 1
        return made

    return rows


def stale():
    """Now and then a head does not read a token before it drafts on the device."""
    calls = itertools.count()

    def rows(found, *args):
        token, position, last = found
        if next(calls) % 10 == 9:
            position = position.clone()
            position[0] = 0
        return token, position, last

    return rows


def miscounted():
    """Now and then the device forgets the last token that it accepted."""
    calls = itertools.count()

    def accept(found, *args):
        lens, last, told = found
        if next(calls) % 10 == 9:
            lens = lens.clone()
            lens[0] -= 1
        return lens, last, told

    return accept


PLANTED = {
    "claimed": {OURS + "workers.base.OutriderWorker._commit": (claimed, "AFTER")},
    "rejected": {OURS + "engine.proposal_rows": (rejected(), "AFTER")},
    "session": {
        SRT + "session.streaming_session.StreamingSession.try_cache_finished_req": (
            session,
            "AROUND",
        )
    },
    "given back": {OURS + "slots.Slots.take": (given_back(), "AFTER")},
    "given twice": {
        # where each version has it
        SRT + "mem_cache.allocator.TokenToKVPoolAllocator.alloc": (given_twice(), "AROUND"),
        SRT + "mem_cache.allocator.token.TokenToKVPoolAllocator.alloc": (given_twice(), "AROUND"),
    },
    "shifted": {OURS + "engine.proposal_rows": (shifted(), "AFTER")},
    "stale": {SERVING + "head_steps.unread_rows": (stale(), "AFTER")},
    "miscounted": {SERVING + "device.accept": (miscounted(), "AFTER")},
}


def register():
    """Plant the fault that the environment names."""
    name = os.environ.get("OUTRIDER_TEST_PLANTED")
    if not name:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (hook, kind) in PLANTED[name].items():
        HookRegistry.register(target, hook, HookType[kind])
