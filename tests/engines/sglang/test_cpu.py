"""What SGLang lacks on CPU, without a server."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F

from outrider.engines.sglang.hooks.on_cpu import enable_row_invariance
from outrider.kernels import row_invariant


def test_a_second_model_runner_does_not_tile_every_product_again(monkeypatch):
    """SGLang enables batch invariance once for each model runner: the target's and the draft's."""
    calls, in_tiles = [], row_invariant.in_tiles

    def counted(product, x):
        calls.append(len(x))
        return in_tiles(product, x)

    monkeypatch.setattr(row_invariant, "in_tiles", counted)

    def serve():
        enable_row_invariance()
        enable_row_invariance()
        F.linear(torch.ones(20, 8), torch.ones(4, 8))

    thread = threading.Thread(target=serve)  # it is for good, and for one thread
    thread.start()
    thread.join()
    assert calls == [20]
    assert not row_invariant.RowInvariant.is_active()
