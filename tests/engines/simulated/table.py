"""How fast the simulated server is, relative to plain decoding: every text, batch size and drafter.

    python tests/engines/simulated/table.py           # compute every cell, print the table
    python tests/engines/simulated/table.py --write   # and write table.json, after a change that is
                                                      # meant to change speeds

A cell is a way of arriving, a kind of text, a batch size and a drafter. *Fixed*: B requests start
together. *Closed*: each of B clients sends requests of different lengths, one after the other.
Plain decoding is an engine that does the same without Outrider: see `plain_seconds`.

Floating-point functions differ between processors in their last bit, and a decision may turn on it.
So cells are computed in processes that use what all x86-64 processors have, as in
tests/control/golden.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import deque
from itertools import product
from pathlib import Path

import recorded

from outrider.engines.simulated import SimulatedDevice, SimulatedServer, run_clients

FILE = Path(__file__).parent / "table.json"
ARRIVALS = ("fixed", "closed")
TEXTS = ("chat", "code", "edit", "json", "prose", "mixed")
BATCHES = (1, 4, 16, 64)
DRAFTERS = {
    "none": ("none", 0),
    "suffix 4": ("suffix", 4),
    "device 4": ("device", 4),
    "adaptive": ("adaptive", 24),
    "adaptive+model": ("adaptive", 24),
}
"""Drafter and most drafts, by the names of columns."""

ROUNDS = {1: 2, 4: 2, 16: 2, 64: 2}
"""Requests of each client, by their number."""

PARTS = {1: 2, 4: 2, 16: 1, 64: 1}
"""Recorded texts of a request, of up to 128 tokens each, by batch size."""

TOLERANCE = 0.005
"""Share by which a cell may differ from what is recorded."""

LOSS = 0.02
"""Share by which an adaptive cell may be slower than what is recorded."""

NONE_LEAST = 0.99
"""Speed of plain decoding that a server reaches whose requests have no drafts."""

ADAPTIVE_LEAST = 0.88
"""Speed that no adaptive cell without a draft model may be recorded below, of plain decoding's."""


def cells(batches=BATCHES, texts=TEXTS):
    return ["/".join(map(str, cell)) for cell in product(ARRIVALS, texts, batches, DRAFTERS)]


def requests_of(arrivals, text, batch, drafter="none", max_drafts=0):
    count = batch if arrivals == "fixed" else batch * ROUNDS[batch]
    longest = 128 * PARTS[batch]
    lengths = [longest] * count
    if arrivals == "closed":
        lengths = [longest * (4 + (7 * number) % 13) // 16 for number in range(count)]
    return [
        recorded.request(number, text, PARTS[batch], length, drafter, max_drafts)
        for number, length in enumerate(lengths)
    ]


def plain_seconds(requests, clients, device):
    """Return how long an engine takes that overlaps plain steps, and does nothing else.

    It launches step t + 1 and takes in step t. So a request that ends has a row in the step after.
    """
    costs, cpu = device.profile, device.cpu
    now = free = 0.0
    waiting, running, emitted = deque(requests[:clients]), [], {}
    coming, launched = deque(requests[clients:]), deque()
    while waiting or running or launched:
        before = len(launched)
        running = [req for req in running if emitted[req.id] < req.sampling.max_tokens]
        if waiting:
            step, running = list(waiting), running + list(waiting)
            seconds = costs.target.prefill(sum(len(req.prompt) for req in waiting))
            waiting.clear()
            emitted |= {req.id: 0 for req in step}
        elif running:
            step, in_flight = running, launched[-1][0] if launched else ()
            reading = {req.id for req in in_flight}
            context = sum(len(r.prompt) + emitted[r.id] + (r.id in reading) - 1 for r in running)
            seconds = costs.target.decode(len(running), context)
        else:
            step = None
        if step is not None:
            now += cpu.launch
            free = max(now, free) + seconds
            launched.append((step, free))
        if before:
            step, ready = launched.popleft()
            now = max(now, ready)
            for req in step:
                if emitted[req.id] < req.sampling.max_tokens:
                    emitted[req.id] += 1
                    if emitted[req.id] == req.sampling.max_tokens and coming:
                        waiting.append(coming.popleft())
        now += cpu.schedule
    return now


def server_of(batch, drafter, options=None):
    """Return a server for so many clients."""
    name, max_drafts = DRAFTERS[drafter]
    device = SimulatedDevice(recorded.PROFILE, recorded.VOCABULARY)
    heads = {"model": recorded.RecordedModel(device)} if drafter.endswith("model") else None
    return SimulatedServer(
        device,
        name,
        options,
        max_drafts=max_drafts,
        max_requests=batch,
        max_length=2048,
        heads=heads,
    )


def speed(cell, options=None):
    """Return a cell's speed as a multiple of plain decoding's. Check every answer."""
    arrivals, text, batch, drafter = cell.split("/")
    batch = int(batch)
    server = server_of(batch, drafter, options)
    requests = requests_of(arrivals, text, batch, *DRAFTERS[drafter])
    done = run_clients(server, batch, requests)
    assert len(done) == len(requests)
    for req in requests:
        assert req.output == list(req.answer[: req.sampling.max_tokens]), f"{cell}: {req.rid}"
    faults = server.pool.fallback_totals().keys() - {"rows"}
    assert not faults, f"{cell}: {faults}"
    plain = plain_seconds(requests, batch, server.device)
    return round(plain / server.device.clock.now(), 4)


def computed(wanted):
    """Return {cell: speed}, computed as on any processor."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    newer = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    environment = {
        **os.environ,
        "NPY_DISABLE_CPU_FEATURES": " ".join(newer),
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F,-AVX512VL",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--compute", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def changed(found, before):
    """Return a line for each cell whose speed is another one."""
    return [
        f"{cell}: {now}, was {before[cell]}"
        for cell, now in found.items()
        if abs(now - before[cell]) > TOLERANCE * before[cell]
    ]


def slower(found, before):
    """Return a line for each cell that is slower than it may be."""
    least = {
        cell: NONE_LEAST if cell.endswith("/none") else (1 - LOSS) * before[cell]
        for cell in found
        if cell.endswith("/none") or "/adaptive" in cell
    }
    return [f"{c}: {found[c]}, below {most:.4f}" for c, most in least.items() if found[c] < most]


def shown(found):
    """Return the table as text."""
    lines = []
    for arrivals, text in product(ARRIVALS, TEXTS):
        if (text, arrivals) == (TEXTS[0], arrivals):
            lines.append(f"{arrivals:14}" + "".join(f"{d:>32}" for d in DRAFTERS))
            lines.append(" " * 14 + "".join(f"{'B=' + str(b):>8}" for b in BATCHES) * len(DRAFTERS))
        row = [found[f"{arrivals}/{text}/{b}/{d}"] for d in DRAFTERS for b in BATCHES]
        lines.append(f"{text:14}" + "".join(f"{value:8.2f}" for value in row))
    return "\n".join(lines)


def main() -> None:
    """Compute, and compare or write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write table.json")
    parser.add_argument("--compute", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compute:
        sys.stdout.write(json.dumps({cell: speed(cell) for cell in args.compute}) + "\n")
        return
    found = computed(cells())
    sys.stdout.write(shown(found) + "\n")
    if args.write:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return
    before = json.loads(FILE.read_text())
    sys.exit("\n".join([*changed(found, before), *slower(found, before)]) or 0)


if __name__ == "__main__":
    main()
