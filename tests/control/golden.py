"""What control decides in each step, on recorded answers and by a counted clock.

    python tests/control/golden.py           # compare every cell with golden.json
    python tests/control/golden.py --write   # after a change that is meant to decide otherwise
    python tests/control/golden.py --show head/json/4 64    # 64 steps of a cell, from a step on

A cell is a world, a kind of text and a batch size. A world is who may draft, and what an engine
does:

* `lookups`, `model`: each step waits for its drafts, which are trees.
* `ahead`: with a draft model; plain steps are launched early.
* `device`: lookups on the device, in steps that are launched early.
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

from outrider.control import Limits, adaptive_control
from outrider.control.decision import CpuDrafts, DeviceDrafts

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


class Recorded(replay.Served):
    """Each step waits for its drafts."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.steps: list[str] = []

    def propose(self, control, budget):
        """Return what is verified in this step, and note it."""
        proposal = super().propose(control, budget)
        how = "early" if self.early else "waits"
        if isinstance(self.launched, DeviceDrafts):
            how += f" device={self.launched.drafter}/{self.launched.width}"
        self.note(how, proposal)
        return proposal

    def note(self, how, proposal):
        """Add a step: how it was launched, and each request's drafter and drafts."""
        from_cpu = isinstance(self.launched, CpuDrafts)
        names = self.launched.names if from_cpu else [""] * self.batch
        drafts = [
            f"{name}:{','.join(map(str, draft.tokens))}"
            for name, draft in zip(names, proposal.drafts(), strict=True)
        ]
        self.steps.append(f"{self.seconds:.6f} {how} {' '.join(drafts)}")


class Early(Recorded, replay.Overlapped):
    """Plain steps are launched early."""


class OnDevice(Recorded, replay.OnDevice):
    """The device may draft, by lookups or with the draft model as a head, launched early."""


def steps_of(cell):
    """Return the steps of a cell, a line for each."""
    world, kind, batch = cell.split("/")
    batch = int(batch)
    make = {"lookups": Recorded, "model": Recorded, "ahead": Early}.get(world, OnDevice)
    theatre = make(replay.traces_of(kind, batch), batch)
    if world in ("lookups", "device"):
        limits = Limits(launches_early=theatre.launches_early)
        control = adaptive_control(clock=theatre.clock, limits=limits)
        replay.calibrate(control, theatre)
    else:
        control = replay.adaptive(theatre)
    if world == "head":
        control.add_to_device(["model"])
    theatre.play(control)
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
