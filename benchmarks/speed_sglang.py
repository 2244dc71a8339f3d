"""Speed inside SGLang beside bare SGLang: the real servers, side by side, taking turns.

    python benchmarks/speed_sglang.py [--tokens 40] [--rounds 2] [--batches 1 2 4 8]

Run it in the environment of scripts/setup-sglang-cpu. Each round asks every method in turn for the
same texts, while the other server is suspended; what counts is the ratio within a round. Greedy. A
batch of B is B requests sent at once. `same` counts the answers that are bare SGLang's: bf16 rounds
differently in batches of other shapes, in bare SGLang too, and a tie may then fall either way
(parity_sglang.py compares both in SGLang's deterministic mode, where none may).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import PROMPTS, chat_ids, model_path, spread, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts" / "sglang"))
from server import Server

BARE = "bare sglang"
METHODS: dict[str, dict[str, Any]] = {
    "K = 0": {"max_drafts": 0},
    "ngram, K <= 8": {"drafter": "ngram", "max_drafts": 8},
    "model, K <= 3": {"drafter": "model", "max_drafts": 3},
    "model, K <= 6": {"drafter": "model", "max_drafts": 6},
}
FLAGS = [
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.6", "--max-total-tokens", "6144"),
    *("--max-running-requests", "8", "--context-length", "1024", "--enable-metrics"),
]


class Suspendable(Server):
    """A server that can be frozen while the other one works."""

    def family(self) -> list[psutil.Process]:
        """Return the server's processes."""
        tree = psutil.Process(self.process.pid)
        return [tree, *tree.children(recursive=True)]

    def suspend(self) -> None:
        """Stop all its processes."""
        for process in self.family():
            process.suspend()

    def resume(self) -> None:
        """Let them go on."""
        for process in self.family():
            process.resume()


def seconds_by_part(server: Server) -> dict[str, float]:
    """Return the time of decode steps so far, by part."""
    found = server.metrics()
    parts = ("draft_forward", "draft", "forward", "verify", "host", "scheduler")
    key = "outrider:step_seconds_total"
    return {
        part: sum(v for k, v in found.items() if k.startswith(key) and f'part="{part}"' in k)
        for part in parts
    }


def measure(
    server: Suspendable, prompts: list[list[int]], tokens: int, wishes: dict[str, Any] | None
) -> dict[str, Any]:
    """Ask for all prompts at once. Return the time and the answers."""
    server.resume()
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if wishes is not None:
        params["custom_params"] = {"outrider": wishes}
    bodies = [{"input_ids": ids, "sampling_params": params} for ids in prompts]
    server.post("/flush_cache", {})
    before = seconds_by_part(server)
    started = time.perf_counter()
    answers = server.ask_all([("/generate", body) for body in bodies], len(bodies))
    seconds = time.perf_counter() - started
    after = seconds_by_part(server)
    server.suspend()
    metas = [answer["meta_info"] for answer in answers]
    steps = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    return {
        "seconds": round(seconds, 3),
        "tokens": sum(meta["completion_tokens"] for meta in metas),
        "accepted": sum(meta.get("spec_accepted_drafts", 0) for meta in metas),
        "proposed": sum(meta.get("spec_proposed_drafts", 0) for meta in metas),
        "request_steps": steps,
        "parts": {part: round(after[part] - before[part], 3) for part in after},
        "outputs": [answer["output_ids"] for answer in answers],
    }


def main() -> None:
    """Measure, print a table, and write benchmarks/results/speed_sglang.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--kinds", nargs="+", default=list(PROMPTS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--threads", default="2")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    target, draft = Path(model_path(args.target)), model_path(args.draft)
    logs = Path(tempfile.mkdtemp(prefix="outrider-bench-"))
    threads = {"OMP_NUM_THREADS": args.threads}
    outrider = [
        *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
        *("--speculative-draft-model-path", draft, "--speculative-num-steps", "8"),
    ]
    bare = Suspendable(
        target,
        *FLAGS,
        *("--attention-backend", "torch_native"),
        log=logs / "bare.log",
        SGLANG_PLUGINS="none",
        **threads,
    )
    bare.wait()  # one after the other: SGLang looks how much memory is left
    ours = Suspendable(target, *FLAGS, *outrider, log=logs / "ours.log", **threads)
    runs: list[dict[str, Any]] = []
    with Progress() as progress, bare, ours:
        bare.suspend()
        ours.suspend()
        warm = [chat_ids(tokenizer, "Hello")]
        measure(bare, warm, 8, None)
        measure(ours, warm, 8, {})
        cells = [(k, b, r) for r in range(args.rounds) for b in args.batches for k in args.kinds]
        names = [BARE, *args.methods]
        task = progress.add_task("measuring", total=len(cells) * len(names))
        for kind, batch, round_ in cells:
            texts = [PROMPTS[kind][(round_ + i) % len(PROMPTS[kind])] for i in range(batch)]
            # requests of one batch differ, so that each has a cache and drafts of its own
            prompts = [chat_ids(tokenizer, f"{text} ({i})") for i, text in enumerate(texts)]
            for name in names:
                server = bare if name == BARE else ours
                found = measure(server, prompts, args.tokens, METHODS.get(name))
                runs.append(
                    {"kind": kind, "batch": batch, "round": round_, "method": name, **found}
                )
                progress.advance(task)
        bare.resume()
        ours.resume()
    report(runs, names, args)


def report(runs: list[dict[str, Any]], names: list[str], args: argparse.Namespace) -> None:
    """Say for each kind of text and batch how each method does against bare SGLang."""
    table = Table("text", "B", "method", "tokens/s", "x bare", "tokens/step", "in forwards", "same")
    summary = []
    for kind, batch in dict.fromkeys((run["kind"], run["batch"]) for run in runs):
        here = [run for run in runs if (run["kind"], run["batch"]) == (kind, batch)]
        plain = [run for run in here if run["method"] == BARE]
        for name in names:
            own = [run for run in here if run["method"] == name]
            speeds = [run["tokens"] / run["seconds"] for run in own]
            ratios = [p["seconds"] / run["seconds"] for run, p in zip(own, plain, strict=True)]
            pairs = [
                (a, b)
                for run, p in zip(own, plain, strict=True)
                for a, b in zip(run["outputs"], p["outputs"], strict=True)
            ]
            same = sum(a == b for a, b in pairs)
            cell: dict[str, Any] = {
                "kind": kind,
                "batch": batch,
                "method": name,
                "tokens_per_second": spread(speeds),
                "times_bare": spread(ratios),
                "same_tokens_as_bare": f"{same}/{len(pairs)}",
            }
            steps = sum(run["request_steps"] for run in own)
            total = sum(sum(run["parts"].values()) for run in own)
            if total:
                passes = ("draft_forward", "forward")
                forwards = sum(run["parts"][part] for run in own for part in passes)
                cell["tokens_per_step"] = round(sum(run["tokens"] for run in own) / steps, 3)
                cell["loop_efficiency"] = round(forwards / total, 3)
                cell["parts"] = {
                    part: round(sum(run["parts"][part] for run in own) / total, 3)
                    for part in own[0]["parts"]
                }
            summary.append(cell)
            shown = [
                f"{c['median']:.2f} ({c['min']:.2f}-{c['max']:.2f})"
                for c in (cell["tokens_per_second"], cell["times_bare"])
            ]
            more = [str(cell.get(key, "")) for key in ("tokens_per_step", "loop_efficiency")]
            table.add_row(kind, str(batch), name, *shown, *more, cell["same_tokens_as_bare"])
    Console(width=140).print(table)
    for run in runs:
        del run["outputs"]
    if not args.no_write:
        models = {"target": args.target, "draft": args.draft, "dtype": "bfloat16"}
        write("speed_sglang", {**models, "summary": summary, "runs": runs})


if __name__ == "__main__":
    main()
