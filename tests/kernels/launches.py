"""Launch kernels for a GPU that is not here: Triton compiles and binds, a stand-in driver notes.

    python tests/kernels/launches.py gfx942 | sm_90

Run as a program of its own, because tests run kernels in the interpreter. Prints how many binaries
each kernel needed for requests of every kind.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from outrider.kernels.paged_attention import Layout, Past, Tile
from outrider.kernels.paged_attention import triton as paged
from outrider.kernels.prefill_attention import triton as prefill
from outrider.kernels.row_invariant import triton as row_invariant
from outrider.kernels.sample_match import triton as sampling
from outrider.kernels.static import LOCAL_BYTES, TARGETS

GROUP, KV_HEADS, DIM, SLOTS, VOCAB = 4, 2, 64, 700, 1000


class Driver:
    """What Triton asks of a driver, answered without one."""

    def __init__(self, target: str) -> None:
        properties = {"max_shared_mem": LOCAL_BYTES[target]}
        self.target, self.launches = TARGETS[target], 0
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (None, None, 0, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: properties,
        )

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        def launch(*args):
            self.launches += 1

        return launch


@triton.jit
def _specialised(x, num_rows):
    """A twin: takes the number of rows as Triton does by default."""
    tl.store(x, num_rows)


def attend(tile: Tile) -> None:
    """One row, many rows, trees, ragged batches, odd addresses."""
    k, v = (torch.zeros(SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    for lens in ([1], [300], [17, 256, 600], [599] * 5):
        for rows in (1, 2, 5, 8):
            requests, row = [], 0
            for n in lens:
                span = range(max(1, n - rows + 1), n + 1)
                requests.append([Past(range(row, row + len(span)), span, torch.arange(n))])
                row += len(span)
            layout = Layout.of(requests, tile, GROUP)
            q = torch.zeros(row, KV_HEADS * GROUP, DIM, dtype=torch.bfloat16)
            paged.paged_attention(q, k, v, layout, 0.1)
            prefill.prefill_attention(q, k, v, layout, 0.1)
    table = torch.zeros(9, SLOTS, dtype=torch.int32)[1:]
    lines = torch.arange(7) // 3
    layout = Layout.of_lines(lines, lines.int() + 40, table, tile, GROUP, SLOTS)
    paged.paged_attention(torch.zeros(7, 8, DIM, dtype=torch.bfloat16), k, v, layout, 0.1)


def main(target: str) -> None:
    for module in (paged, prefill, row_invariant):
        module.arch = lambda device: target
    driver = Driver(target)
    triton.runtime.driver.set_active(driver)
    attend(Tile.fit(GROUP))
    for rows in (1, 2, 7, 16, 33, 128):
        x = torch.zeros(rows, 96, dtype=torch.bfloat16)
        row_invariant.linear(x, torch.zeros(80, 96, dtype=torch.bfloat16))
        one, no, keys = torch.ones(rows), torch.zeros(rows), torch.arange(rows)
        _specialised[(1,)](torch.zeros(1), rows)
        sampling.sample(torch.zeros(rows, VOCAB), one, no.int(), one, no, keys, keys)
    kernels = {
        "partial": paged._partial,
        "combine": paged._combine,
        "prefill": prefill._prefill,
        "linear": row_invariant._linear,
        "sample draw": sampling.draw_kernel,
        "sample pick": sampling.pick_kernel,
        "twin": _specialised,
    }
    binaries = {name: len(kernel.device_caches[0][0]) for name, kernel in kernels.items()}
    sys.stdout.write(json.dumps({"launches": driver.launches, "binaries": binaries}))


if __name__ == "__main__":
    main(sys.argv[1])
