"""Give hostile input to every door: the property tests of tests/doors, with many more inputs.

    python benchmarks/fuzz.py [--inputs 1000] [--seed 0] [--door profiles ...] [--budget 1800]

Each door runs in parts, in processes of their own, two at a time. A part that was done with the
same seed and inputs is not done again, so that an interrupted run goes on where it was; a door that
broke begins anew, mended. A test ends at the first input that breaks its door, shrunk: `broken_by`
has the test and the seed that finds it again. A door that asks a real server runs in `--sglang`, a
Python with SGLang (`scripts/setup-sglang-cpu`), and again with the SGLang of the directory
$OUTRIDER_SGLANG23.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from common import write
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
DOORS = ROOT / "tests" / "doors"

SHARES = {
    "request_options": 10, "sampling_parameters": 10, "drafter_names": 8, "prompt_files": 6,
    "recordings": 6, "profiles": 4, "results": 4, "shared_texts": 4, "draft_socket": 2,
    "http_replies": 0.7, "terminals": 0.7, "pages": 0.2, "checkpoints": 0.3, "sglang_requests": 0.2,
}  # fmt: skip
"""How many times --inputs each test of a door gets, by what one input takes; of others 1."""

LIMIT = 5.0
"""Seconds that an input may take. The machine does nothing else."""

PART = 2000
"""Inputs of a test in one process."""

COUNTS = ("inputs", "crashes", "hangs", "heavy")


class Part(NamedTuple):
    """Inputs of a door in one process.

    door: in the result
    number: among the door's
    """

    door: str
    number: int
    inputs: int
    command: tuple[str, ...]
    environment: dict[str, str]

    @property
    def name(self) -> str:
        """What a result knows it by."""
        return f"{self.door} {self.number} {self.inputs}"


def doors() -> dict[str, Path]:
    """Return the modules of tests/doors by their names."""
    return {file.stem.removeprefix("test_"): file for file in sorted(DOORS.glob("test_*.py"))}


def parts(name: str, file: Path, options: argparse.Namespace) -> list[Part]:
    """Return a door's parts."""
    wanted = max(1, int(SHARES.get(name, 1) * options.inputs))
    python, paths = sys.executable, {name: [str(ROOT / "src")]}
    if "pytest.mark.sglang" in file.read_text():
        python, beside = options.sglang, os.environ.get("OUTRIDER_SGLANG23")
        if beside:
            paths[f"{name} (SGLang 0.5.23)"] = [beside, *paths[name]]
    made = []
    for door, path in paths.items():
        for number, begun in enumerate(range(0, wanted, PART)):
            inputs = min(PART, wanted - begun)
            seed = f"--hypothesis-seed={1000 * options.seed + number}"
            command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), seed)
            environment = {"PYTHONPATH": os.pathsep.join(path)}
            environment["OUTRIDER_FUZZ_EXAMPLES"] = str(inputs)
            made.append(Part(door, number, inputs, command, environment))
    return made


def run(part: Part, budget: float) -> dict[str, Any]:
    """Return how many inputs a part had, and what broke the door."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **part.environment}
        environment |= {"OUTRIDER_FUZZ_REPORT": str(report), "PYTEST_ADDOPTS": ""}
        environment |= {"OUTRIDER_FUZZ_SECONDS": str(LIMIT)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            ended = subprocess.run(
                part.command, env=environment, cwd=ROOT, timeout=budget, check=False, **pipes
            )
            code, said = ended.returncode, ended.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired:
            code, said = None, f"it did not end within {budget:g} s"
        lines = report.read_text().splitlines() if report.exists() else []
    tests = [json.loads(line) for line in lines]
    found = {key: sum(test[key] for test in tests) for key in COUNTS}
    broken = [{"test": test["test"], "said": test["said"]} for test in tests if test["said"]]
    if code != 0 and not broken:  # nothing was collected, or the process died or hung
        found["hangs" if code is None else "crashes"] += 1
        broken.append({"test": None, "said": said[-500:]})
    repeat = {"seed": part.command[-1], "examples": part.inputs}
    return {**found, "broken_by": [one | repeat for one in broken]}


def add(doors: dict[str, Any], part: Part, found: dict[str, Any]) -> None:
    """Add what a part found to its door."""
    empty = {**dict.fromkeys(COUNTS, 0), "broken_by": [], "parts": []}
    door = doors.setdefault(part.door, {"date": "", **empty})
    door["date"] = time.strftime("%Y-%m-%d")
    for key in (*COUNTS, "broken_by"):
        door[key] += found[key]
    door["parts"].append(part.name)


def main(argv: Sequence[str] | None = None) -> None:
    """Fuzz the doors and write benchmarks/results/fuzz.json."""
    known = doors()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1000, help="of a test whose share is 1")
    parser.add_argument("--door", nargs="+", choices=known, default=list(known))
    parser.add_argument("--budget", type=float, default=1800, help="seconds that a part may take")
    parser.add_argument("--sglang", default=sys.executable, help="a Python that has SGLang")
    parser.add_argument("--out", type=Path, help="another file for the result")
    options = parser.parse_args(argv)
    file = options.out or ROOT / "benchmarks" / "results" / "fuzz.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    asked = {"seed": options.seed, "inputs_asked": options.inputs}
    found = before["doors"] if asked.items() <= before.items() else {}
    found = {name: door for name, door in found.items() if not any(map(door.get, COUNTS[1:]))}
    done = {name for door in found.values() for name in door["parts"]}
    waiting = [part for name in options.door for part in parts(name, known[name], options)]
    waiting = [part for part in waiting if part.name not in done]
    # a server takes longest: the two of them begin
    waiting.sort(key=lambda part: part.environment["PYTHONPATH"] == str(ROOT / "src"))
    with Progress() as progress, ThreadPoolExecutor(2) as pool:
        task = progress.add_task("parts", total=len(waiting))
        running = {pool.submit(run, part, options.budget): part for part in waiting}
        for ended in as_completed(running):
            add(found, running[ended], ended.result())
            progress.advance(task)
            _write(file, asked, found)
    totals = _write(file, asked, found)
    if any(totals[key] for key in COUNTS[1:]):
        sys.exit(", ".join(f"{totals[key]} {key}" for key in COUNTS[1:]))


def _write(file: Path, asked: dict[str, int], found: dict[str, Any]) -> dict[str, int]:
    totals = {key: sum(door[key] for door in found.values()) for key in COUNTS}
    limits = {"limit_seconds": LIMIT, "limit_megabytes": 500}
    doors = dict(sorted(found.items()))
    write("fuzz", {**asked, **limits, **totals, "doors": doors}, file)
    return totals


if __name__ == "__main__":
    main()
