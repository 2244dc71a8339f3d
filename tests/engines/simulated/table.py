"""How fast the simulated server is, relative to plain decoding: on every text, for every drafter.

    python tests/engines/simulated/table.py           # compute every cell, print the table
    python tests/engines/simulated/table.py --write   # and write table.json, after a change that is
                                                      # meant to change speeds

A cell is a profile of `engines.costs`, a way of arriving, a kind of text, a batch size and a
drafter. *Fixed*: B requests start together. *Closed*: each of B clients sends requests of different
lengths, one after the other. `GRIDS` has the cells of each profile.

Plain decoding is an engine that does the same without Outrider: see `plain_seconds`.

Floating-point functions differ between processors in their last bit, and a decision may turn on it.
So cells are computed in processes that use what all x86-64 processors have, as in
tests/control/golden.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import recorded

from outrider.engines.costs import H100_8B, H100_8B_LINE, DeviceProfile
from outrider.engines.simulated import SimulatedDevice, SimulatedServer, run_clients

FILE = Path(__file__).parent / "table.json"
TEXTS = ("chat", "code", "edit", "json", "prose", "mixed")
BATCHES = (1, 4, 16, 64)
DRAFTERS = {
    "none": ("none", 0),
    "suffix 4": ("suffix", 4),
    "device 2": ("device", 2),
    "device 4": ("device", 4),
    "device 8": ("device", 8),
    "adaptive": ("adaptive", 24),
    "adaptive+model": ("adaptive", 24),
}
"""Drafter and most drafts, by the names of columns."""

FIXED = ("none", "device 2", "device 4", "device 8")
"""What adaptive cells are compared with: see BEST_FIXED_LEAST."""


@dataclass(frozen=True)
class Grid:
    """The cells of a profile. rounds: requests of each client, by their number"""

    profile: DeviceProfile
    arrivals: Sequence[str]
    drafters: Sequence[str]
    rounds: Mapping[int, int]

    def cells(self, batches=BATCHES):
        """Return the cells at these batch sizes."""
        sides = (self.profile.name,), self.arrivals, TEXTS, batches, self.drafters
        return ["/".join(map(str, cell)) for cell in product(*sides)]


GRIDS = {
    grid.profile.name: grid
    for grid in (
        Grid(
            H100_8B_LINE,
            ("fixed", "closed"),
            ("none", "suffix 4", "device 4", "adaptive", "adaptive+model"),
            {1: 2, 4: 2, 16: 2, 64: 2},
        ),
        # longer: what is compared with the best fixed number of drafts has to learn it first
        Grid(
            H100_8B,
            ("closed",),
            (*FIXED, "adaptive", "adaptive+model"),
            {1: 3, 4: 3, 16: 4, 64: 3},
        ),
    )
}
"""By profile: a straight line, on which rows are expensive, and a measured curve, which is flat to
about 256 rows."""

PARTS = {1: 2, 4: 2, 16: 1, 64: 1}
"""Recorded texts of a request, of up to 128 tokens each, by batch size."""

TOLERANCE = 0.005
"""Share by which a cell may differ from what is recorded."""

LOSS = 0.02
"""Share by which an adaptive cell may be slower than what is recorded."""

NONE_LEAST = 0.99
"""Speed of plain decoding that a server reaches whose requests have no drafts."""

ADAPTIVE_LEAST = 0.97
"""Speed that no adaptive cell without a draft model may be recorded below, of plain decoding's. The
worst is h100-8b-line/fixed/chat/64: 0.975."""

MODEL_LEAST = 0.89
"""The same with a draft model. A new one may cost eight plain steps (`model_choice.MAX_CREDIT`),
and a cell has few of them. The worst is h100-8b-line/fixed/mixed/64: 0.902."""

BEST_FIXED_LEAST = 0.93
"""Speed that no adaptive cell may be recorded below, of the best of FIXED. The worst is
h100-8b/closed/json/64: 0.940. All others are above 0.968. What is missing is mostly what learning
takes: a cell has some hundred steps."""


def cells(batches=BATCHES):
    return [cell for grid in GRIDS.values() for cell in grid.cells(batches)]


def requests_of(grid, arrivals, text, batch, drafter="none", max_drafts=0):
    count = batch if arrivals == "fixed" else batch * grid.rounds[batch]
    longest = 128 * PARTS[batch]
    lengths = [longest] * count
    if arrivals == "closed":
        lengths = [random.Random(number).randint(longest // 8, longest) for number in range(count)]
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


def server_of(profile, batch, drafter, options=None):
    """Return a server for so many clients."""
    name, max_drafts = DRAFTERS[drafter]
    device = SimulatedDevice(profile, recorded.VOCABULARY)
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
    profile, arrivals, text, batch, drafter = cell.split("/")
    grid, batch = GRIDS[profile], int(batch)
    server = server_of(grid.profile, batch, drafter, options)
    requests = requests_of(grid, arrivals, text, batch, *DRAFTERS[drafter])
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


def of_best_fixed(found):
    """Return {cell: its speed as a share of the best fixed choice's}, of adaptive cells."""
    shares = {}
    for cell, speed in found.items():
        where, drafter = cell.rsplit("/", 1)
        if drafter == "adaptive" and f"{where}/{FIXED[-1]}" in found:
            shares[cell] = speed / max(found[f"{where}/{fixed}"] for fixed in FIXED)
    return shares


def shown(found):
    """Return the table as text."""
    lines = []
    for name, grid in GRIDS.items():
        for arrivals, text in product(grid.arrivals, TEXTS):
            if text == TEXTS[0]:
                sizes = "".join(f"{'B=' + str(b):>8}" for b in BATCHES)
                lines.append(f"{name}, {arrivals}")
                lines.append(" " * 8 + "".join(f"{drafter:>32}" for drafter in grid.drafters))
                lines.append(" " * 8 + sizes * len(grid.drafters))
            where = [f"{b}/{drafter}" for drafter in grid.drafters for b in BATCHES]
            row = [found[f"{name}/{arrivals}/{text}/{rest}"] for rest in where]
            lines.append(f"{text:8}" + "".join(f"{speed:8.2f}" for speed in row))
    worst = sorted(of_best_fixed(found).items(), key=lambda each: each[1])[:8]
    lines.append("adaptive, as a share of the best fixed choice, the worst cells:")
    lines += [f"{share:8.3f} {cell}" for cell, share in worst]
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
