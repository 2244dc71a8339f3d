"""Rows of a pass, where there is a limit: who gets fewer drafts, and that it is counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.control.decision import DeviceDrafts, Plain
from outrider.core import Proposal, SamplingParams, chain
from outrider.drafters import GuardedDrafter
from outrider.serving import logits
from outrider.serving.decider import Decider
from outrider.serving.device_drafters import DeviceDrafters
from outrider.serving.logits import max_rows
from outrider.serving.pool import Pool
from outrider.serving.rows import RowBudget, drafts_in, share_rows
from outrider.serving.values import Batch, Columns, Knows, Members, ServedRequest, Traits

QWEN = 151_936


@pytest.mark.parametrize(
    ("wanted", "max_rows", "shared", "cut"),
    [
        ([4] * 8, 64, [4] * 8, 0),
        ([4] * 16, 64, [3] * 16, 16),
        ([4] * 33, 64, [0] * 33, 33),
        ([0] * 40, 64, [0] * 40, 0),
        ([8, 0, 0, 0], 12, [8, 0, 0, 0], 0),  # all fit, though not in equal shares
        ([8, 1, 0, 0], 12, [2, 1, 0, 0], 1),
        ([2] * 3, 2, [0] * 3, 3),
        ([], 2, [], 0),
    ],
)
def test_shares(wanted, max_rows, shared, cut):
    found, fewer = share_rows(np.array(wanted, np.int64), max_rows)
    assert (found.tolist(), fewer) == (shared, cut)
    assert found.sum() + len(wanted) <= max(max_rows, len(wanted))


@pytest.mark.parametrize(
    ("vocab_size", "penalties", "rows"),
    [(QWEN, 0, 1009), (QWEN, 3, 371), (128_256, 0, 1195), (128_256, 3, 440)],
)
def test_logits_stay_within_the_limit(vocab_size, penalties, rows):
    """The figures of docs/sglang-settings.md."""
    assert max_rows(vocab_size, 2, penalties) == rows
    limit = logits.MAX_LOGITS_BYTES
    assert rows * logits.row_bytes(vocab_size, 2, penalties) <= limit
    assert (rows + 1) * logits.row_bytes(vocab_size, 2, penalties) > limit


def requests(count, output=(), max_tokens=100):
    return [
        ServedRequest(
            r, (1, 2), SamplingParams(), 0, output=list(output), traits=Traits(max_tokens),
            drafter="full", max_drafts=4,
        )
        for r in range(count)
    ]  # fmt: skip


class Full:
    """Drafts as much as it may."""

    name = "full"

    def start(self, requests):
        pass

    observe = stop = start

    def propose(self, requests, budget):
        return Proposal.of([chain([1] * most) for most in budget.max_drafts])


class Steps:
    """Decides for requests of a server whose passes have room for so many rows.

    depths, device: of drafters of the device
    """

    def __init__(self, limit, vocab_size=1000, depths=None, device=None):
        self.pool = Pool({"full": GuardedDrafter(Full(), vocab_size)}, depths=depths or {})
        rows = RowBudget(limit, vocab_size, logit_bytes=2, coins=None, trees=False)
        self.table = SimpleNamespace(columns=None)
        self.decider = Decider(self.table, self.pool, device or DeviceDrafters(), rows)

    def drafts(self, members, num_penalties=0, room=None):
        """Return how many drafts each request gets in a step."""
        self.table.columns = members.columns
        size = len(members.requests)
        batch = Batch(
            [], Knows.CPU, members.lens, None, None, None, room=room, num_penalties=num_penalties
        )
        decision = self.decider.decide(batch, members)
        if isinstance(decision, Plain):
            return [0] * size
        return decision.proposal.num_drafts.tolist()


def running(found):
    return Members.running(found, Columns.of(found))


def test_a_stock_backend_with_many_requests_is_counted():
    """--max-running-requests 64 and 40 of them: no room for drafts, and /metrics says so."""
    steps = Steps(limit=64)
    for count, drafts, counted in ((10, 4, {}), (40, 0, {"rows": 40})):
        assert steps.drafts(running(requests(count))) == [drafts] * count
        assert steps.pool.fallback_totals() == counted


def test_a_step_with_penalties_has_fewer_rows():
    """256 requests, K = 4: 1,280 rows of Qwen's logits do not fit, with penalties far fewer do."""
    steps = Steps(max_rows(QWEN, 2), QWEN)

    def most(count, num_penalties=0):
        (drafts,) = set(steps.drafts(running(requests(count)), num_penalties))
        return drafts

    assert (most(200), most(256), most(256, 3)) == (4, 2, 0)
    assert steps.pool.fallback_totals() == {"rows": 512}


def test_a_full_pool_leaves_a_slot_for_the_next_token_and_counts():
    """A request that may have its last token in flight has slots for two next tokens."""
    assert drafts_in(np.array([10, 12, 20, 9]), np.array([8, 8, 8, 8])).tolist() == [0, 2, 10, 0]
    steps, found = Steps(limit=64), requests(3)
    lens = running(found).lens
    assert steps.drafts(running(found), room=lens + np.array([2, 4, 9])) == [0, 2, 4]
    assert steps.pool.fallback_totals() == {"slots": 2}


def test_the_last_token_has_no_draft_beside_it():
    steps = Steps(limit=64)
    for emitted, drafts in ((96, 3), (98, 1), (99, 0)):
        assert steps.drafts(running(requests(1, [3] * emitted))) == [drafts]
    assert not steps.pool.fallback_totals()


# -- steps that are launched early


class OnDevice:
    """Drafts on the device, for all requests or for none."""

    def __init__(self, can=True):
        self.can = can

    def names(self, columns, longest, requests):
        return frozenset(["full"] if self.can else [])

    def follows(self, drafter, before, requests):
        return True


def early(count, limit=64, knows=Knows.DEVICE, room=None, most=4, **device):
    """Return what is decided early for so many requests."""
    steps = Steps(limit, depths={"full": 64}, device=OnDevice(**device))
    found = [replace(r, max_drafts=most) for r in requests(count)]
    steps.table.columns = Columns.of(found)
    batch = Batch([], knows, running(found).lens, None, None, None, room=room)
    assert steps.decider.may_be_early(batch)
    return steps.decider.decide_early(batch, found, lambda: batch.longest)


def test_early_drafts_keep_to_the_rows_of_a_pass():
    for count, drafts in ((10, 4), (16, 3), (40, 0)):
        found = early(count)
        assert found.num_drafts.tolist() == [drafts] * count
        assert count * (1 + drafts) <= 64


def test_early_drafts_keep_to_their_slots():
    found = early(4, room=np.array([3, 4, 5, 9]))
    assert found.num_drafts.tolist() == [0, 1, 2, 4]
    assert found.width == 4, "as many are made, also for requests without rows"


@pytest.mark.parametrize(
    ("knows", "can", "expected"),
    [
        (Knows.BOTH, True, Plain),
        (Knows.BOTH, False, Plain),
        (Knows.DEVICE, True, DeviceDrafts),
        (Knows.DEVICE, False, type(None)),
    ],
)
def test_an_early_step_without_drafts(knows, can, expected):
    """Where only the device knows the lengths, it lays the rows out."""
    found = early(3, knows=knows, most=0, can=can)
    assert type(found) is expected
    if isinstance(found, DeviceDrafts):
        assert found.num_drafts.tolist() == [0, 0, 0]
        assert found.width == 1


def test_nothing_is_decided_early_for_drafts_that_the_device_cannot_make():
    assert early(3, can=False) is None
    assert early(3).num_drafts.tolist() == [4] * 3
