"""Our coin is SGLang's: its own kernel, in Triton's interpreter, says the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch
from sglang.srt.layers.utils.hash import murmur_hash32
from sglang.srt.layers.sampler import multinomial_with_seed
from outrider.core import KeyedCoins
from outrider.core import murmur_hash32 as ours

generator = torch.Generator().manual_seed(0)
seeds = torch.randint(0, 2**62, (64,), generator=generator)
seeds[:4] = torch.tensor([0, 1, 42, 2**32 + 7])
positions = torch.randint(0, 2**20, (64,), generator=generator)
columns = torch.arange(3000)
theirs = murmur_hash32(seeds.to(torch.uint64), positions, columns).to(torch.int64)
assert torch.equal(theirs, ours(seeds[:, None], positions[:, None], columns))
logprobs = torch.randn(64, 3000, generator=generator).log_softmax(-1)
drawn = multinomial_with_seed(logprobs, seeds, positions)[:, 0]
assert torch.equal(drawn, KeyedCoins().draw(logprobs, seeds, positions))
assert drawn.unique().numel() > 50
print("equal")
"""


def test_coins_are_sglangs_own():
    env = {**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
