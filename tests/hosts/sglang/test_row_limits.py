"""Rows of a pass, where there is a limit: who gets fewer drafts, and that it is counted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.hosts.sglang.row_limits import share_rows
from outrider.hosts.sglang.worker import OutriderWorker


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


def test_a_stock_backend_with_many_requests_is_counted():
    """--max-running-requests 64 and 40 of them: no room for drafts, and /metrics says so."""
    worker = OutriderWorker.__new__(OutriderWorker)
    worker._max_rows, worker._coins, worker._trees = 64, None, False
    worker._logits = 1000, 2
    worker._drafters = SimpleNamespace(fallbacks=Counter())
    request = SimpleNamespace(output=[])
    orchestrator = SimpleNamespace(is_required=False)
    batch = SimpleNamespace(sampling_info=SimpleNamespace(penalizer_orchestrator=orchestrator))
    for count, drafts, counted in ((10, 4, {}), (40, 0, {"rows": 40})):
        columns = SimpleNamespace(max_tokens=np.full(count, 100), max_drafts=np.full(count, 4))
        worker._requests = SimpleNamespace(columns=columns)
        found = worker._budget(batch, [request] * count, np.arange(count))
        assert found.max_drafts.tolist() == [drafts] * count
        assert worker._drafters.fallbacks == counted
