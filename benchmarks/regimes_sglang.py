"""How fast the adaptive drafter follows when texts and load change, on one SGLang server.

    python benchmarks/regimes_sglang.py             # in the environment of scripts/setup-sglang-cpu
    python benchmarks/regimes_sglang.py --report    # where there is matplotlib: the plot

Prose for one client, a code edit for one, sixteen clients with texts of all kinds, and an edit for
one again. All prompts are in the prefix cache before: phases are told apart by what is decoded. The
server writes down each of its steps (option `trace` of the drafter).

*Goodput* is tokens over seconds in the last WINDOW steps, all of the same phase. A phase *settles*
at the median goodput of its second half, and *adapts* in as many steps as it takes to first reach
READY of that: WINDOW at least. Steps count while all clients of the phase are being served.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import IMAGES, chat_ids, model_path, pyplot, save_plot, write
from common_sglang import Suspendable, end_servers_at_sigterm, outrider_flags, wish
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from outrider.bench.workloads import prompts
from outrider.report import provenance

WINDOW, READY = 4, 0.9
FLAGS = [
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.6", "--max-total-tokens", "20480"),
    *("--max-running-requests", "16", "--context-length", "2048"),
]
RESULT = Path(__file__).parent / "results" / "regimes_sglang.json"

Steps = list[dict[str, Any]]


class Phase(NamedTuple):
    """So many requests of a kind, from variant `offset` on, by clients that wait for answers."""

    kind: str
    clients: int
    requests: int
    tokens: int
    offset: int

    @property
    def name(self) -> str:
        """What the plot calls it."""
        return f"{self.kind}, {self.clients} client{'s' * (self.clients > 1)}"


PHASES = (
    Phase("prose", 1, 1, 96, offset=20),  # no text comes up twice: mixed has the first ten of each
    Phase("edit", 1, 1, 320, offset=20),
    Phase("mixed", 16, 48, 32, offset=0),
    Phase("edit", 1, 1, 320, offset=21),
)


def main() -> None:
    """Measure and report, or only report what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tokens, to try it out")
    parser.add_argument("--report", action="store_true", help="measure nothing: read --out")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args()
    if not args.report:
        traced = run(args)
        models = {"target": args.target, "draft": args.draft, "dtype": "bfloat16"}
        phases = [describe(phase, steps) for phase, steps in traced]
        result = {"provenance": provenance(), **models, "window": WINDOW, "phases": phases}
        write("regimes_sglang", result, args.out)
    phases = json.loads(args.out.read_text())["phases"]
    show(phases)
    if pyplot() is None:
        print("no matplotlib here: --report where it is makes the plot")
    else:
        plot(phases, args.images)


# -- measuring


def run(args: argparse.Namespace) -> list[tuple[Phase, Steps]]:
    """Let a server go through the phases. Return the steps of each."""
    end_servers_at_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="outrider-regimes-"))
    trace, profile = folder / "trace.jsonl", folder / "profile.yaml"
    drafters = {"adaptive": {"trace": str(trace)}}
    options = {"drafter": "adaptive", "draft_bits": 4, "drafters": drafters}
    profile.write_text(json.dumps(options))
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    phases = [phase._replace(tokens=round(phase.tokens * args.scale)) for phase in PHASES]
    asked = [
        [chat_ids(tokenizer, text) for text in prompts(phase.kind, phase.requests, phase.offset)]
        for phase in phases
    ]
    server = Suspendable(
        Path(model_path(args.target)),
        *FLAGS,
        *outrider_flags(args.draft, 12),
        log=folder / "server.log",
        OMP_NUM_THREADS=args.threads,
        OUTRIDER_CONFIG=str(profile),
    )
    found = []
    with server:
        for ids in track([ids for phase in asked for ids in phase], "reading prompts"):
            server.ask(*wish(ids, 1, None))
        for phase, texts in zip(track(phases, "phases"), asked, strict=True):
            before = len(read(trace))
            server.ask_all([wish(ids, phase.tokens, None) for ids in texts], phase.clients)
            found.append((phase, read(trace)[before:]))
    return found


def read(trace: Path) -> Steps:
    """Return the steps that a server has written down so far."""
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


# -- reporting


def goodput(steps: Steps) -> list[float]:
    """Return tokens a second of each WINDOW steps in a row; the first ends with step WINDOW."""
    windows = [steps[i : i + WINDOW] for i in range(len(steps) - WINDOW + 1)]
    return [sum(s["tokens"] for s in w) / sum(s["seconds"] for s in w) for w in windows]


def describe(phase: Phase, steps: Steps) -> dict[str, Any]:
    """Say how a phase went, and when it had settled."""
    full = [step for step in steps if step["requests"] == phase.clients]
    found: dict[str, Any] = {**phase._asdict(), "name": phase.name, "full_steps": len(full)}
    speeds = goodput(full)
    if speeds:
        settled = statistics.median(speeds[len(speeds) // 2 :])
        late = next(i for i, speed in enumerate(speeds, WINDOW) if speed >= READY * settled)
        found |= {
            "settled_tokens_per_second": round(settled, 3),
            "steps_to_adapt": late,
            "seconds_to_adapt": round(sum(step["seconds"] for step in full[:late]), 3),
        }
    return {**found, "steps": steps}


def show(phases: list[dict[str, Any]]) -> None:
    """Print a line for each phase."""
    table = Table("phase", "steps", "tokens/s, settled", "steps to adapt", "seconds", "drafters")
    for phase in phases:
        served: dict[str, int] = {}
        for step in phase["steps"]:
            for name, count in step["drafters"].items():
                served[name] = served.get(name, 0) + count
        total = sum(served.values()) or 1
        keys = ("settled_tokens_per_second", "steps_to_adapt", "seconds_to_adapt")
        table.add_row(
            phase["name"],
            str(len(phase["steps"])),
            *(str(phase.get(key, "too short")) for key in keys),
            ", ".join(f"{name or 'none'} {n / total:.0%}" for name, n in sorted(served.items())),
        )
    Console(width=120).print(table)


def plot(phases: list[dict[str, Any]], folder: Path) -> None:
    """Draw goodput and drafts by step, one phase after the other."""
    plt = pyplot()
    figure, (speed, drafts) = plt.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    start = 0
    for phase in phases:
        steps, x = phase["steps"], range(start, start + len(phase["steps"]))
        rates = [step["tokens"] / step["seconds"] for step in steps]
        speed.plot(x, rates, ".", color="#b8b8b8", markersize=3)
        middle = goodput(steps)
        # a window stands where it ends, as a reader of the server's log would know it
        speed.plot(range(start + WINDOW - 1, start + len(steps)), middle, color="#0a6ebd")
        verified = [(step["rows"] - step["requests"]) / step["requests"] for step in steps]
        passes = [step["draft_passes"] for step in steps]
        drafts.plot(x, verified, color="#0a6ebd", label="drafts verified, each request")
        drafts.plot(x, passes, color="#c77700", linestyle=":", label="passes of the draft model")
        end = start + len(steps)
        if "steps_to_adapt" in phase:
            settled, late = phase["settled_tokens_per_second"], phase["steps_to_adapt"]
            speed.hlines(settled, start, end, color="black", linewidth=0.7, linestyle="--")
            note = f"{phase['name']}\nadapts in {late} steps"
        else:
            note = phase["name"]
        for axes in (speed, drafts):
            axes.axvline(start, color="black", linewidth=0.7)
        speed.annotate(
            note, ((start + end) / 2, 1.02), xycoords=("data", "axes fraction"), ha="center"
        )
        start = end
    speed.set_ylim(bottom=0)
    speed.set_ylabel(f"tokens/s\n(line: over {WINDOW} steps)")
    drafts.set_ylabel("in a step")
    drafts.set_xlabel("step")
    drafts.set_ylim(0, 1.4 * drafts.get_ylim()[1])  # room for the legend
    drafts.legend(*_once(drafts), loc="upper right", ncols=2)
    save_plot(figure, "regimes_sglang", folder)


def _once(axes: Any) -> tuple[list[Any], list[str]]:
    """Return each line of the legend once, although every phase drew it."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    return list(unique.values()), list(unique)


if __name__ == "__main__":
    main()
