"""Requests that come and go on the paced device, beside bare SGLang in the same run.

    python benchmarks/traffic.py             # in scripts/setup-sglang-cpu's environment
    python benchmarks/traffic.py --all       # and a fixed batch, and what served other texts before
    python benchmarks/traffic.py --resume    # go on with a run that was interrupted
    python benchmarks/traffic.py --quick     # one device, B = 16, one round, in 3 minutes
    python benchmarks/traffic.py --report    # table, goals and, with matplotlib, the plot

B clients each send a request of any kind of text and 32 to 320 tokens, read the stream to its end,
and send the next one. In a round every server gets the same requests. What counts is the ratio to
bare SGLang with overlap in the same turn. A request that was sent in the measured seconds is a
user. If one answer is not the recorded text, the run stops and says no speed.

The scheduler has a core of its own. The clients, HTTP and the detokenizer share the others.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common import IMAGES, pyplot
from paced_sglang import (
    ADAPTIVE,
    KINDS,
    MIXED,
    PROFILES,
    TOKENS,
    prompts,
    size_flags,
)
from traffic_clients import TOKENS as LENGTHS
from traffic_clients import WrongAnswer, now, run_clients, sequence
from traffic_figures import (
    FIXED,
    HISTORIES,
    THROUGHPUT,
    TRAFFIC,
    Run,
    VirtualTimes,
    run_figures,
)
from traffic_plan import BEFORE, QUICK, SERVED, Part, Progress, Recording, Turn, plan
from traffic_report import plot, show

if TYPE_CHECKING:  # a report needs neither SGLang nor psutil
    import psutil
    from paced.device import Pass
    from paced_servers import Paced

RESULT = Path(__file__).parent / "results" / "traffic.json"
DEVICES = "h100-8b", "h200-8b", "h100x4-70b"
BATCHES = 4, 16, 64
FIXED_BATCHES = 1, 4, 16, 64, 256

IDLE_SECONDS = 60
"""After its clients have hung up, until a run is stopped."""

SETTINGS = "seconds", "ramp", "warm_up", "stretch", "stream_interval"
"""Arguments that all runs of a result file share."""


def main() -> None:
    """Measure and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = [name for name in DEVICES if name in PROFILES]
    parser.add_argument("--devices", nargs="+", default=known, choices=list(PROFILES))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="of clients")
    usual = [name for name in SERVED if name != THROUGHPUT]
    parser.add_argument("--contenders", nargs="+", default=usual, choices=list(SERVED))
    parser.add_argument("--fixed-batches", type=int, nargs="+", default=list(FIXED_BATCHES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="that are measured of a run")
    parser.add_argument("--ramp", type=float, default=2.0, help="seconds of a run before these")
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="seconds of a server's first run"
    )
    parser.add_argument("--stretch", type=float, default=20.0, help="seconds of a history")
    parser.add_argument("--history-batch", type=int, default=16, help="clients after a history")
    parser.add_argument(
        "--stream-interval", type=int, help="tokens in a chunk; by default 1, above B = 16 8"
    )
    parser.add_argument("--servers", type=int, default=8, help="at once: each needs 1.2 GiB")
    parser.add_argument("--fixed", action="store_true", help="measure a fixed batch instead")
    parser.add_argument("--histories", action="store_true", help="measure histories instead")
    parser.add_argument("--all", action="store_true", help="measure all three")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the result file")
    parser.add_argument("--quick", action="store_true", help="one device, B = 16, one round")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if args.quick:
        args.devices, args.batches, args.contenders = args.devices[:1], [16], list(QUICK)
        args.rounds, args.seconds, args.fixed_batches = 1, 8.0, [16]
    folder = Path(tempfile.gettempdir()) if args.quick else RESULT.parent
    recording = Recording(args.out or folder / RESULT.name)
    if not args.report:
        measure(args, recording)
    result = recording.finish()
    show(result)
    if pyplot() is not None and result[TRAFFIC]:
        plot(result, IMAGES if recording.file == RESULT else recording.file.parent)


# -- measuring


def measure(args: argparse.Namespace, recording: Recording) -> None:
    """Make all runs that are missing."""
    from paced_servers import Contender, servers

    modes = [mode for mode, wanted in ((FIXED, args.fixed), (HISTORIES, args.histories)) if wanted]
    modes = [TRAFFIC, FIXED, HISTORIES] if args.all else modes or [TRAFFIC]
    settings = {name: getattr(args, name) for name in SETTINGS} | {"cores": _cores()}
    recording.begin(settings, modes, args.resume)
    parts = plan(args, modes, recording.runs)
    progress = Progress(parts)
    print(f"{progress.total} runs are left; results go to {recording.file}")
    for part in parts:
        made = {
            name: Contender(**SERVED[ADAPTIVE if name in BEFORE else name])
            for name in part.contenders
        }
        with servers(part.device, made, _flags(part)) as running, _pinned(running.values()):
            try:
                _warm_up(args, part, running)
                progress.begin_part()
                for turn in part.turns:
                    for name in recording.order(turn):
                        place = {
                            "mode": part.mode, "device": part.device, "kind": turn.kind,
                            "batch": turn.batch, "round": turn.round, "contender": name,
                            "turn": recording.turns,
                        }  # fmt: skip
                        run = place | _measured(args, part, turn, running[name])
                        recording.add(run)
                        print(progress.end_run(part.mode), _line(run), flush=True)
                    recording.turns += 1
            except (WrongAnswer, SystemExit) as error:
                if "recorded text" in str(error):
                    recording.stop(f"A wrong answer: {error}")
                raise SystemExit(str(error)) from error
        progress.end_part()


def _line(run: Run) -> str:
    what = f"{run['mode']} {run['device']} {run['kind']} B={run['batch']} round {run['round']}"
    said = f"{run['contender']}: {run['tokens_per_second']:.0f} tokens/s"
    if "token_ms" in run:
        said += f", {run['token_ms']['median']:.2f} ms a token, CPU {run['cpu_share']}"
    return f"{what}, {said}"


def _flags(part: Part) -> tuple[str, ...]:
    cells = {(turn.kind, turn.batch) for turn in part.turns}
    if part.mode == FIXED:
        return size_flags(sorted(cells), _fixed_tokens)
    if part.mode == HISTORIES:
        cells |= {(MIXED, clients) for _, clients in BEFORE.values() if clients}
    # a chunk has its own tokens only, not the whole answer so far again
    return (*size_flags(sorted(cells), lambda _: LENGTHS[1]), "--incremental-streaming-output")


def _fixed_tokens(batch: int) -> int:
    return TOKENS.get(batch, 128)


def _warm_up(args: argparse.Namespace, part: Part, running: dict[str, Paced]) -> None:
    """Let every server meet what is discarded: traffic, or its history."""
    from paced_servers import run

    for name, server in running.items():
        if part.mode == HISTORIES and name in BEFORE:
            kinds, clients = BEFORE[name]
            if kinds:
                _serve(args, server, clients or args.history_batch, "history", args.stretch, kinds)
            continue
        for batch in dict.fromkeys(turn.batch for turn in part.turns):
            if part.mode == FIXED:
                run(server, prompts(MIXED, batch, first=900), batch, 64)
            else:
                _serve(args, server, batch, "warm-up", args.warm_up)


def _measured(args: argparse.Namespace, part: Part, turn: Turn, server: Paced) -> Run:
    from paced_servers import ask

    if part.mode == FIXED:
        asked = prompts(turn.kind, turn.batch, first=turn.round * turn.batch)
        return ask(server, asked, turn.batch, _fixed_tokens(turn.batch))
    return _serve(args, server, turn.batch, f"round {turn.round}", args.seconds)


def _serve(
    args: argparse.Namespace, server: Paced, batch: int, seed: str, seconds: float,
    kinds: Sequence[str] = KINDS,
) -> Run:  # fmt: skip
    """Let a server work for so many seconds, and be idle and suspended then."""
    from paced.log import finished_log

    server.resume()
    since, interval = now(), args.stream_interval or (1 if batch <= 16 else 8)
    processes = roles(server)
    try:
        traffic = run_clients(
            server.port, batch, sequence(seed, batch, kinds), args.ramp, seconds,
            lambda: cpu_seconds(processes), interval,
        )  # fmt: skip
    except WrongAnswer as error:
        raise WrongAnswer(f"{server.log}: {error}") from error
    server.post("/abort_request", {"abort_all": True})
    deadline = now() + IDLE_SECONDS
    while server.running_requests():
        if now() > deadline:
            raise TimeoutError(f"{server.log}: not idle after {IDLE_SECONDS} s")
        time.sleep(0.05)
    passes = finished_log(server.passes, since)
    server.suspend()
    times = virtual_times(passes)
    steps = _steps(passes, times.at(traffic.begun), times.at(traffic.ended))
    return run_figures(traffic, times) | steps | {"stream_interval": interval}


def virtual_times(passes: Sequence[Pass]) -> VirtualTimes:
    """Return how a run's moments are converted to the server's clock: see `paced.work`."""
    excused = [made.excused for made in passes]
    virtual = [made.queued for made in passes]
    return VirtualTimes([v + e for v, e in zip(virtual, excused, strict=True)], virtual, excused)


def _steps(passes: Sequence[Pass], begun: float, ended: float) -> Run:
    steps = [p for p in passes if p.kind == "decode" and begun <= p.queued < ended]
    requests, rows = sum(p.requests for p in steps), sum(p.rows for p in steps)
    return {
        "steps": len(steps),
        "requests_per_step": round(requests / max(1, len(steps)), 2),
        "rows_per_request": round(rows / max(1, requests), 3),
    }


# -- processes


def roles(server: Paced) -> dict[str, list[psutil.Process]]:
    """Return a server's processes: its scheduler, and others."""
    found: dict[str, list[psutil.Process]] = {"scheduler": [], "others": []}
    for process in server.family():
        title = (process.cmdline() or [""])[0]
        found["scheduler" if title.startswith("sglang::scheduler") else "others"].append(process)
    assert found["scheduler"], f"{server.log}: no process is a scheduler"
    return found


def cpu_seconds(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Return the CPU time so far of a server's processes, of this one, and of all elsewhere."""
    import psutil

    times = {role: [process.cpu_times() for process in group] for role, group in processes.items()}
    found = {role: sum(t.user + t.system for t in group) for role, group in times.items()}
    found["client"] = time.process_time()
    machine = psutil.cpu_times()._asdict()
    busy = sum(machine.get(name, 0.0) for name in ("user", "nice", "system", "steal"))
    return {**found, "elsewhere": busy - sum(found.values())}


def _cores() -> dict[str, list[int]] | None:
    """Return which cores are whose; None if there is one for all."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {"scheduler": cores[:1], "others": cores[1:]} if len(cores) > 1 else None


@contextmanager
def _pinned(running: Sequence[Paced]) -> Iterator[None]:
    """Keep the servers' schedulers on one core, and all else, this process too, on the others."""
    cores = _cores()
    if cores is None:
        yield
        return
    for server in running:
        for role, group in roles(server).items():
            for process in group:
                for thread in process.threads():  # new ones inherit it
                    os.sched_setaffinity(thread.id, cores[role])
    os.sched_setaffinity(0, cores["others"])
    try:
        yield
    finally:  # servers that are started next inherit it
        os.sched_setaffinity(0, cores["scheduler"] + cores["others"])


if __name__ == "__main__":
    main()
