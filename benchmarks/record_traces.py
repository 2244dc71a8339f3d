"""Record what a draft model says at every position of real answers, to be replayed.

    python benchmarks/record_traces.py                          # the texts
    python benchmarks/record_traces.py --likely                 # only what is likely to follow
    python benchmarks/record_traces.py --times trace.jsonl      # only how long passes take

The target answers a few prompts of each kind of text, greedily. At each position of its answers the
draft model is asked for its drafts, and for the next best token beside each. With that and the text
itself, any choice of drafter and number of drafts can be played through later, token for token
(tests/control/replay.py). What it thinks likely to follow each token, LIKELY tokens with their
chances, is for trees that branch more (ahead.py).

Times come from a server: --times names the trace of a run of adaptive_sglang.py (--trace).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import chat_ids, load, model_path
from rich.progress import track
from transformers import AutoTokenizer

import outrider
from outrider.bench.workloads import SINGLE, prompts
from outrider.engines.transformers.runner import Runner
from outrider.report import provenance

FILE = Path(__file__).parents[1] / "tests" / "control" / "traces.json.gz"
DEPTH, LIKELY = 12, 6


def main() -> None:
    """Record and write tests/control/traces.json.gz."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--each", type=int, default=4, help="texts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--likely", action="store_true", help="keep texts, times and drafts")
    parser.add_argument("--times", type=Path, help="take times from a trace, and keep the texts")
    args = parser.parse_args()
    before: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    if args.likely:
        add_likely(before["traces"], args.draft)
        made = {**before, "likely_provenance": provenance()}
    elif args.times:
        made = {**before, "times": fit(args.times), "times_provenance": provenance()}
    else:
        made = {**before, **texts(args), "provenance": provenance()}
    FILE.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))
    print(f"wrote {FILE.name}: {FILE.stat().st_size} bytes")


def texts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the answers with what the draft model says at each of their positions."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(args.target))
    kinds = [kind for kind in SINGLE for _ in range(args.each)]
    ids = [chat_ids(tokenizer, text) for kind in SINGLE for text in prompts(kind, args.each, 20)]
    target = load(args.target, "bfloat16")
    draft = draft_model(args.draft)
    sampling = {"max_tokens": args.tokens}
    done = outrider.generate(target, ids, drafter=draft, max_drafts=4, sampling=sampling)
    runner, answers = Runner(draft), list(zip(kinds, ids, done.outputs, strict=True))
    traces = [
        {"kind": kind, "prompt": prompt, "output": output, "drafts": record(runner, prompt, output)}
        for kind, prompt, output in track(answers, "recording")
    ]
    add_likely(traces, args.draft)
    return {"target": args.target, "draft": f"{args.draft}, 4 bits", "traces": traces}


def draft_model(name: str) -> Any:
    """Load the draft model, in 4 bits."""
    return outrider.quantized_copy(load(name, "bfloat16"), 4)


def add_likely(traces: list[dict[str, Any]], name: str) -> None:
    """Add to each trace what the draft model thinks likely after each token of the output."""
    model = draft_model(name)
    for trace in track(traces, "likely"):
        text = torch.tensor([[*trace["prompt"], *trace["output"][:-1]]])
        with torch.inference_mode():
            logits = model(text).logits[0, len(trace["prompt"]) :].float()
        chances, tokens = logits.softmax(-1).topk(LIKELY)
        found = zip(tokens.tolist(), chances.tolist(), strict=True)
        trace["likely"] = [[ids, [round(p, 4) for p in ps]] for ids, ps in found]


def record(runner: Runner, prompt: list[int], output: list[int]) -> list[list[list[float]]]:
    """Return the drafts after each token of the output: [token, chance, next best, its chance]."""
    sequence, chain, found = runner.open(), list[list[float]](), []
    for read in range(1, len(output)):
        known = [*prompt, *output[:read]]
        if chain and chain[0][0] == output[read - 1]:
            chain = chain[1:]  # what was said after it still holds
        else:
            chain = []
            runner.truncate(sequence, len(known) - 1)
        while len(chain) < DEPTH:
            unread = [*known, *(int(entry[0]) for entry in chain)][sequence.length :]
            logits = runner.extend([(sequence, unread)])[0].float()
            chances, tokens = logits.softmax(-1).topk(2)
            pairs = zip(tokens.tolist(), chances.tolist(), strict=True)
            chain.append([x for token, chance in pairs for x in (token, round(chance, 4))])
        found.append(list(chain))
    runner.close(sequence)
    return found


def fit(trace: Path) -> dict[str, dict[str, float]]:
    """Return the median time of a pass by rows, and of a draft pass by tokens read, from a trace.

    Where there were several draft passes, the first must have read little more than the others.
    """
    verify, draft = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for line in trace.read_text().splitlines():
        step: dict[str, Any] = json.loads(line)
        verify[step["rows"]].append(step["seconds"] - step["draft_seconds"])
        passes, unread = step["draft_passes"], step["unread"]
        users = step["drafters"].get("model", 0)
        if passes == 1:
            draft[unread].append(step["draft_seconds"])
        elif passes and unread <= 2 * users:
            draft[users].append(step["draft_seconds"] / passes)
    return {
        name: {str(n): round(statistics.median(v), 4) for n, v in sorted(found.items()) if v[2:]}
        for name, found in (("verify", verify), ("draft", draft))
    }


if __name__ == "__main__":
    main()
