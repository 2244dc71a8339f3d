"""The command `outrider selftest --server`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.clients import open_engine
from outrider.clients.process import child, serving, sglang_command, tail
from outrider.errors import OutriderError, Unsupported, UsageError
from outrider.report import document, provenance
from outrider.report.console import Exit, Terminal, complain, printable
from outrider.trial.ask import examine
from outrider.trial.page import page
from outrider.trial.parts import KERNELS, Parts
from outrider.trial.plan import (
    DETERMINISTIC,
    SIDES,
    Pair,
    Side,
    Wanted,
    check_flags,
    environment,
    pairs,
    part_name,
)
from outrider.trial.result import Trial
from outrider.trial.terminal import announce, progress, show

__all__ = ["run"]

START = 1800.0
"""Seconds that a server may take to load: weights may lie on a slow disk, kernels are compiled."""

FEW = 24
"""Requests of each pair after the first."""

MODE = "deterministic mode"
"""The part that says whether SGLang refuses it."""

LINES = 20
"""Of a log that are shown where a server failed."""


def run(wanted: Wanted, as_json: bool) -> None:
    """Do all parts that are not done, write both files. Ends with the exit code of the verdict."""
    console = Terminal(stderr=True)
    check_flags(wanted.flags)
    sglang_command()
    with _sigterm_interrupts():
        with console.status("looking at models and machine"):
            doctor = _doctor(wanted)
        device = _device(wanted, doctor)
        known = pairs(device, version("sglang"), wanted.flags)
        trial = Trial(replace(wanted, device=device), provenance(), doctor, known)
        parts = _parts(trial)
        announce(trial, parts, console)
        try:
            _all_parts(trial, parts, console)
        except KeyboardInterrupt:
            trial.interrupted = True
    _write(trial, as_json, console)
    if trial.exit_code:
        raise SystemExit(trial.exit_code)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Make `kill` an interruption, so that the children are ended then, too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _device(wanted: Wanted, doctor: dict[str, Any]) -> str:
    """Return "cuda", of ROCm too, or "cpu". Raises Unsupported for a GPU that is not there."""
    found = "cpu" if doctor["machine"]["device"] == "cpu" else "cuda"
    if wanted.device == "cuda" and found == "cpu":
        raise Unsupported(
            "torch sees no GPU here",
            fix="install torch's CUDA or ROCm build, or use --device cpu",
        )
    return wanted.device or found


def _parts(trial: Trial) -> Parts:
    wanted, made = trial.wanted, trial.provenance
    here = {"device": wanted.device, "gpu": trial.doctor["machine"]["gpu"], "quick": wanted.quick}
    commit = str(made["commit"]).removesuffix("-dirty")
    here |= {"commit": commit, "versions": made["versions"]}
    return Parts(wanted.out / "parts", here, wanted.arguments, wanted.fresh)


def _doctor(wanted: Wanted) -> dict[str, Any]:
    """Return what `outrider doctor --json` says. A model that cannot be read is refused.

    A process of its own: this one shall hold no memory of the GPU while the servers run.
    """
    command = [sys.executable, "-m", "outrider", "doctor", wanted.target]
    command += [wanted.draft] if wanted.draft is not None else []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child([*command, "--json"], **pipes) as process:
        out, err = (said.decode(errors="replace") for said in process.communicate())
    if process.returncode not in (Exit.GOOD, Exit.FINDING):
        what, _, fix = (err.strip().splitlines() or ["no message"])[-1].partition("; ")
        kind = UsageError if process.returncode == Exit.USAGE else Unsupported
        raise kind(what, fix=fix or "see `outrider doctor`")
    found: dict[str, Any] = json.loads(out)
    return found


# -- the parts


def _all_parts(trial: Trial, parts: Parts, console: Console) -> None:
    """Do what is not done. What cannot run is noted; without the first pair there is no more."""
    trial.kernels = parts.get(KERNELS)
    if trial.kernels is None:
        try:
            trial.kernels = _kernels(trial.wanted)
            parts.put(KERNELS, trial.kernels)
        except OutriderError as error:
            trial.failures["kernels"] = str(error)
            complain(console, error)
    refused = parts.get(MODE)
    if refused is None and not _pair(trial, parts, trial.pairs[0], True, console):
        refused = _refusal(trial, parts)
        if refused is None:
            return
        parts.put(MODE, refused)
    if refused is not None:
        # the next pair takes its place
        off, on = replace(trial.pairs[0], skip=refused["why"]), replace(trial.pairs[1], skip=None)
        trial.pairs = [off, on, *trial.pairs[2:]]
        complain(console, refused["why"])
        if not _pair(trial, parts, on, True, console):
            return
    for pair in trial.pairs[2 if refused else 1 :]:
        if not pair.skip:
            _pair(trial, parts, pair, False, console)


def _pair(trial: Trial, parts: Parts, pair: Pair, full: bool, console: Console) -> bool:
    """Return whether both servers of a pair said what they were asked for.

    full: whether all requests are compared, or a few
    """
    for side in SIDES:
        name = part_name(pair, side)
        try:
            trial.servers[pair.name, side] = _server_part(trial, parts, pair, side, full, console)
        except UsageError:
            raise  # an option that SGLang does not have
        except OutriderError as error:
            lines = tail(parts.path(name, ".log"), LINES)
            trial.failures[name] = "\n".join([str(error), "", *lines])
            for line in lines:
                console.print(printable(line), style="dim", markup=False, highlight=False)
            complain(console, f"{name}: {error}")
            return False
    return True


def _refusal(trial: Trial, parts: Parts) -> dict[str, str] | None:
    """Return why bare SGLang refuses its deterministic mode; None if it failed otherwise."""
    name = part_name(trial.pairs[0], "bare")
    log = "\n".join(tail(parts.path(name, ".log"), LINES))
    if name not in trial.failures or "deterministic" not in log.lower():
        return None
    why = trial.failures.pop(name).splitlines()[0]
    return {"why": f"SGLang refuses {DETERMINISTIC} here: {why}"}


def _kernels(wanted: Wanted) -> dict[str, Any]:
    """Return what `outrider selftest` finds, in a process of its own; its progress is shown."""
    folder = wanted.out / "parts" / "kernels"
    command = [sys.executable, "-m", "outrider", "selftest", "--device", str(wanted.device)]
    command += ["--out", str(folder), *(["--quick"] if wanted.quick else [])]
    with child(command, stdout=subprocess.DEVNULL) as process:
        code = process.wait()
    if code not in (Exit.GOOD, Exit.FINDING):
        raise Unsupported("the kernels were not checked", fix="run `outrider selftest` alone")
    found: dict[str, Any] = json.loads((folder / "selftest.json").read_text(encoding="utf-8"))
    return found


def _server_part(
    trial: Trial, parts: Parts, pair: Pair, side: Side, full: bool, console: Console
) -> dict[str, Any]:
    """Return what a server said: from its part, or by starting it."""
    name, wanted = part_name(pair, side), trial.wanted
    done = parts.get(name)
    if done is not None:
        return done
    bare = trial.servers.get((pair.name, "bare"), {})
    count = wanted.requests if full else min(FEW, wanted.requests)
    device, started = str(wanted.device), time.monotonic()
    log = parts.path(name, ".log")
    with progress(name, console) as ticker:
        up = ticker("starting", 1)
        command = pair.command(side, wanted, device)
        with serving(command, log, environment(device), START) as url:
            up()
            with closing(open_engine(url)) as engine:
                found = examine(
                    engine, wanted, count, pair.deterministic,
                    chat=bare.get("chat"), again=side == "bare", ticker=ticker,
                    drafting=wanted.drafting if side == "ours" else None,
                )  # fmt: skip
    found["seconds"] = round(time.monotonic() - started, 1)
    parts.put(name, found)
    console.print(f"{name}: done in {found['seconds']:.0f} s", style="dim", highlight=False)
    return found


def _write(trial: Trial, as_json: bool, console: Console) -> None:
    out: Path = trial.wanted.out
    text = document(trial.as_json())
    (out / "server.json").write_text(text, encoding="utf-8")
    (out / "server.html").write_text(page(trial), encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
    else:
        show(trial, Terminal())
    console.print(f"{out / 'server.json'}, {out / 'server.html'}", highlight=False)
