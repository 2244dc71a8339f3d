"""What control decides in each step, on recorded answers and by a counted clock.

    python tests/control/golden.py           # compare every cell with golden.json
    python tests/control/golden.py --write   # after a change that is meant to decide otherwise
    python tests/control/golden.py --show head/json/4 64    # 64 steps of a cell, from a step on

A cell is a world, a kind of text and a batch size. A world is who may draft, and what a host does:

* `lookups`, `model`: each step waits for its drafts, which are trees.
* `ahead`: with a draft model; plain steps are launched ahead.
* `device`: lookups on the device, in steps that are launched ahead.
* `head`: the same, and a head that drafts on either side.

Floating-point functions differ between processors in their last bit, and a decision may turn on it.
So cells are computed in a process that uses what all x86-64 processors have.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import replay

from outrider.control import adaptive_drafter
from outrider.core import Draft, PointMass, Proposal
from outrider.drafters import NgramDrafter

FILE = Path(__file__).parent / "golden.json"
KINDS = ("chat", "code", "edit", "json", "prose", "mixed")
BATCHES = {
    "lookups": (1, 4, 16),
    "model": (1, 4, 16),
    "ahead": (1, 16, 64),
    "device": (1, 4, 16, 32),
    "head": (1, 4, 16),
}
CELLS = [f"{world}/{kind}/{b}" for world, all_b in BATCHES.items() for kind in KINDS for b in all_b]
CHUNK = 64
"""Steps of one digest."""


class Recorded(replay.Theatre):
    """Each step waits for its drafts."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.steps: list[str] = []

    def propose(self, drafter, budget):
        """Return what is verified in this step, and note it."""
        proposal = drafter.propose(self.on_stage, budget)
        drafter.meanwhile()
        self.note("waits", proposal, drafter.used_by(self.on_stage))
        return proposal

    def note(self, how, proposal, names):
        """Add a step: how it was launched, and each request's drafter and drafts."""
        drafts = [
            f"{name}:{','.join(map(str, draft.tokens))}"
            for name, draft in zip(names, proposal.drafts(), strict=True)
        ]
        self.steps.append(f"{self.seconds:.6f} {how} {' '.join(drafts)}")


class Ahead(replay.Overlapped, Recorded):
    """Plain steps are launched ahead."""

    def propose(self, drafter, budget):
        """Return what is verified in this step, and note it."""
        how = "ahead" if drafter.is_asleep else "waits"
        proposal = replay.Overlapped.propose(self, drafter, budget)
        self.note(how, proposal, drafter.used_by(self.on_stage))
        return proposal


class OnDevice(replay.Overlapped, Recorded):
    """The device may draft, by lookups or with the draft model as a head, launched ahead."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.lookup, self.known = NgramDrafter(min_n=1), set()

    def propose(self, drafter, budget):
        """Return what is verified in this step, and note it."""
        device, heads = drafter.device, frozenset(drafter.models)
        here, how = device.widths and self.drafts_of(device), "ahead"
        device.is_possible, device.ready = True, heads
        if device.widths or drafter.is_asleep:
            drafter.meanwhile()
            name = device.drafter
            self.unlooked += 1
            if self.unlooked * self.looks_every > self.batch:
                self.unlooked = 0
                drafter.look(self.on_stage, budget)
        else:
            how = "waits"
            self.seconds += self.wait / 3
            proposal = drafter.propose(self.on_stage, budget)
            self.seconds += self.wait * 2 / 3 + self.queued
            self.queued = 0.0
            drafter.meanwhile()
            name, here = device.drafter, device.widths and self.drafts_of(device)
            if not here:
                self.note(how, proposal, drafter.used_by(self.on_stage))
                return proposal
        proposal = here or Proposal.empty(self.batch)
        if here:
            device.drafted = name
            self.seconds += self.draft(self.batch) * proposal.max_depth if name in heads else 0.0
        self.note(f"{how} device={name if here else ''}", proposal, [""] * self.batch)
        return proposal

    def drafts_of(self, device):
        """Return what the device drafts at the widths that control has chosen."""
        drafts = []
        for request, width in zip(self.on_stage, device.of(self.on_stage).tolist(), strict=True):
            width = min(width, len(request.left) - 1)
            if device.drafter in device.ready:
                tokens = [int(said[0]) for said in request.drafts()[:width]]
            else:
                tokens = found_in(request, width)
            drafts.append(Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), PointMass()))
        return Proposal.of(drafts)


def found_in(request, width):
    """Return what followed the last token when it was last seen, as a lookup on the device does."""
    text = [*request.prompt, *request.output]
    before = [at for at in range(len(text) - 1) if text[at] == text[-1]]
    return text[before[-1] + 1 :][:width] if before and width else []


def steps_of(cell):
    """Return the steps of a cell, a line for each."""
    world, kind, batch = cell.split("/")
    batch = int(batch)
    make = {"lookups": Recorded, "model": Recorded, "ahead": Ahead}.get(world, OnDevice)
    theatre = make(replay.traces_of(kind, batch), batch)
    if world in ("lookups", "device"):
        drafter = adaptive_drafter(clock=theatre.clock)
        for rows in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128):
            drafter.cost.observe(rows, 0, theatre.verify(rows))
    else:
        drafter = replay.adaptive(theatre)
    drafter.cost.launches_ahead = make is not Recorded
    if world == "head":
        drafter.device.add(drafter.models["model"])
    theatre.play(drafter)
    return theatre.steps


def digests(steps):
    """Return a digest of each CHUNK of steps."""
    chunks = ("\n".join(steps[at : at + CHUNK]) for at in range(0, len(steps), CHUNK))
    return [hashlib.blake2b(chunk.encode(), digest_size=4).hexdigest() for chunk in chunks]


def decided(cells):
    """Return {cell: steps and digests}, computed as on any processor."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    newer = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    environment = {
        **os.environ,
        "NPY_DISABLE_CPU_FEATURES": " ".join(newer),
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F,-AVX512VL",
    }
    command = [sys.executable, __file__, "--compute", *cells]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def differences(found, golden):
    """Return a line for each cell that decides otherwise: from which step on."""
    lines = []
    for cell, now in found.items():
        before = golden[cell]
        if now != before:
            pairs = enumerate(zip(now["digests"], before["digests"], strict=False))
            first = next((i for i, (a, b) in pairs if a != b), len(now["digests"])) * CHUNK
            lines.append(f"{cell}: step {first} or later (golden.py --show {cell} {first})")
    return lines


def main() -> None:
    """Compare, write or show."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write golden.json")
    parser.add_argument("--show", nargs=2, metavar=("CELL", "STEP"), help="print steps of a cell")
    parser.add_argument("--compute", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.show:
        first = int(args.show[1])
        sys.stdout.write("\n".join(steps_of(args.show[0])[first : first + CHUNK]) + "\n")
    elif args.compute:
        steps = {cell: steps_of(cell) for cell in args.compute}
        found = {cell: {"steps": len(s), "digests": digests(s)} for cell, s in steps.items()}
        sys.stdout.write(json.dumps(found) + "\n")
    elif args.write:
        FILE.write_text(json.dumps(decided(CELLS), indent=1) + "\n")
    else:
        sys.exit("\n".join(differences(decided(CELLS), json.loads(FILE.read_text()))) or 0)


if __name__ == "__main__":
    main()
