"""Drafting ahead beside ordinary speculation: by counted time, by coins, and with real processes.

    python benchmarks/ahead.py counted           # 2 minutes; needs no download
    python benchmarks/ahead.py paced             # 10 minutes, in scripts/setup-sglang-cpu's
    python benchmarks/ahead.py coins             # 2 minutes; needs no download
    python benchmarks/ahead.py real TARGET DRAFT # 15 minutes on two idle cores
    python benchmarks/ahead.py picture           # docs/img/ahead.svg, from counted time
    python benchmarks/ahead.py report            # the tables and the goals of the last runs

*Counted*: two devices, a 70B target on four H100 and a 1B draft model on one, whose passes take
what COSTS says. Texts and drafts are those of `tests/control/traces.json.gz` (Qwen2.5-Coder, 1.5B
and 0.5B): what the draft model says off the recorded text is made up, as sure as it is elsewhere.
Ordinary speculation waits for each pass of the draft model, with the best of several K.

*Paced*: the same devices and texts under a real SGLang server and a real draft server, with all
that these do on the host: see ahead_paced.py.

*Coins*: how often the tree had what the target emitted, at several temperatures, when it is grown
with the target's coins and with others. The tiny models of the package.

*Real*: `outrider draft-server` on one core and the target on another, beside the same draft model
in the target's process, on one core and on both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import torch
from common import (
    chat_ids,
    different_tokens,
    load,
    model_path,
    pyplot,
    save_plot,
    spread,
    write,
)
from heads import TINY
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "control"))
import replay

import outrider
from outrider.core import KeyedCoins, Request, SamplingParams
from outrider.drafters import AheadDrafter
from outrider.drafters.ahead import Growth
from outrider.drafters.ahead.messages import request_of
from outrider.engines.transformers.runner import Runner
from outrider.report import provenance

RESULT = Path(__file__).parent / "results" / "ahead.json"
COSTS = {"target": (18.2e-3, 46e-6), "draft": (2.1e-3, 3.2e-6)}
"""Seconds of a pass, and of each of its rows. The target's first figure is the SSD paper's step of
plain decoding (18.3 ms, host included), the second SpecDecode-Bench's fit for 8B (docs/paced.md) by
work: 141 of 16 GFLOP on four GPUs. `h100x4-70b` of the paced device was this line when results were
measured; today it is a measured curve. The draft model is of 1B."""

BATCHES, DRAFTS, KINDS = (1, 2, 4, 8, 16), (2, 4, 6, 8), ("code", "chat", "json", "prose", "mixed")
WIDTH, FAN_OUT, MOST = 32, 3, 8
PROMPTS = {kind: common.PROMPTS[kind] for kind in ("code", "chat")}


def main() -> None:
    """Measure one part and report, or only report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["counted", "paced", "coins", "real", "picture", "report"])
    parser.add_argument("models", nargs="*", help="for real: the target and the draft model")
    parser.add_argument("--tokens", type=int, default=64, help="for real: of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="for real and paced")
    args = parser.parse_args()
    if args.part == "picture":
        picture()
        return
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result["provenance"] = result.get("provenance") or provenance()
    if args.part == "counted":
        result["counted"] = {"provenance": provenance(), "cells": counted()}
    elif args.part == "paced":
        from ahead_paced import paced

        made, found = provenance(), paced(KINDS, BATCHES, DRAFTS, args.rounds)
        result["paced"] = {"provenance": made, **found}
    elif args.part == "coins":
        result["coins"] = {"provenance": provenance(), "cells": coins()}
    elif args.part == "real":
        result["real"] = {
            "provenance": provenance(),
            **real(*args.models, args.tokens, args.rounds),
        }
    result["goals"] = goals(result)
    write("ahead", result, RESULT)
    show(result)


# -- counted


def seconds(who: str, rows: int) -> float:
    """Return how long a pass takes."""
    fixed, row = COSTS[who]
    return fixed + row * rows


class Said:
    """A sequence of the recorded draft model: how far it is on the recorded text, if it is."""

    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        self.tokens = tokens

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)


class RecordedBranches:
    """Says what the draft model said on the recorded texts, and something like it elsewhere."""

    max_length = 1 << 30

    def __init__(self, traces: Sequence[dict[str, Any]]) -> None:
        self.vocab_size = 1 + max(t for trace in traces for t in (*trace["prompt"], *_ids(trace)))
        self._texts = {
            (*trace["prompt"], *trace["output"][: i + 1]): said
            for trace in traces
            for i, said in enumerate(trace["likely"])
        }
        self._all = list(self._texts.values())

    def open(self) -> Said:
        """Return an empty sequence."""
        return Said()

    def close(self, sequence: Said) -> None:
        """Do nothing."""

    def fork(self, sequence: Said) -> Said:
        """Return a branch."""
        return Said(sequence.tokens)

    def adopt(self, sequence: Said, branch: Said, others: Sequence[Said]) -> None:
        """Go on as a branch."""
        sequence.tokens = branch.tokens

    def extend(self, segments: Sequence[tuple[Said, Sequence[int]]]) -> Tensor:
        """Return logits of what was said: the likeliest tokens, and the rest alike."""
        logits = []
        for sequence, tokens in segments:
            sequence.tokens = (*sequence.tokens, *tokens)
            said = self._texts.get(sequence.tokens)
            if said is None:
                rng = random.Random(hash(sequence.tokens))
                _, chances = rng.choice(self._all)
                said = rng.sample(range(self.vocab_size), len(chances)), chances
            ids, chances = said
            rest = max(1e-6, 1 - sum(chances)) / self.vocab_size
            p = torch.full((self.vocab_size,), rest)
            p[ids] = torch.tensor(chances).clamp(min=rest)
            logits.append(p.log())
        return torch.stack(logits)


def _ids(trace: dict[str, Any]) -> list[int]:
    return [*trace["output"], *(token for ids, _ in trace["likely"] for token in ids)]


def renamed(traces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same texts with small ids."""
    ids: dict[int, int] = {}

    def of(token: float) -> int:
        return ids.setdefault(int(token), len(ids))

    return [
        {
            **trace,
            "prompt": [of(t) for t in trace["prompt"]],
            "output": [of(t) for t in trace["output"]],
            "drafts": [[[of(a), p, of(b), q] for a, p, b, q in chain] for chain in trace["drafts"]],
            "likely": [[[of(t) for t in ids], chances] for ids, chances in trace["likely"]],
        }
        for trace in traces
    ]


class CountedAhead(AheadDrafter):
    """The drafter and its draft server, with passes that take counted time."""

    def __init__(
        self, theatre: Any, model: RecordedBranches, width: int, wait: float = 1.0
    ) -> None:
        super().__init__("", wait=wait, clock=theatre.clock)
        self._theatre, self._growth = theatre, Growth(model, KeyedCoins(), width, FAN_OUT)
        self._inbox: list[dict[str, Any]] = []
        self._under_way: list[Any] | None = None
        self._until = 0.0
        self._hit, self.emitted, self.waits = False, Counter[bool](), {True: 0.0, False: 0.0}
        self.passes: list[tuple[str, float, float]] = []
        self._connection = SimpleNamespace(is_behind=False)  # type: ignore[assignment]  # no socket

    def observe(self, outcomes: Any) -> None:
        """Note how many tokens a step had after a hit, and after anything else."""
        self.emitted[self._hit] += sum(len(outcome.tokens) for outcome in outcomes)
        super().observe(outcomes)

    def propose(self, requests: Any, budget: Any) -> Any:
        """Note whether the step of one request was a hit, and how long it waited."""
        hits, waited = self.counts["hit"], self.waited
        found = super().propose(requests, budget)
        self._hit = self.counts["hit"] > hits
        self.waits[self._hit] += self.waited - waited
        return found

    def formula(self) -> float:
        """Return the speed of one request by the formula of SSD, in tokens a pass of the target.

        (h E_h + (1 - h) E_m) / (h max(1, T_p) + (1 - h) (1 + T_b)), with the measured hit rate h,
        the tokens of a step after a hit and after a miss, and the wait after a miss in passes.
        """
        steps = sum(self.counts.values())
        wait = self.waits[False] / seconds("target", 1 + MOST)
        return sum(self.emitted.values()) / (steps + wait)

    def _send(self, message: dict[str, Any]) -> None:
        self._receive()  # what the server has done until now it did without knowing this
        self._inbox.append(message)

    def _receive(self) -> None:
        """Let the server work until now."""
        now = self._theatre.clock()
        while True:
            if self._under_way is not None:
                if self._until > now:
                    return
                for grown in self._under_way:
                    self._add(grown)
                self._under_way, self._is_silent = None, False
            self._take_in()
            before = self._growth.passes
            grown = self._growth.grow()
            if self._growth.passes == before:
                self._until = now
                return
            self._under_way = grown
            self.passes.append(("draft", self._until, seconds("draft", WIDTH)))
            self._until += seconds("draft", WIDTH)

    def _take_in(self) -> None:
        for message in self._inbox:
            for said in message.get("open", ()):
                self._growth.open(said[0], request_of(said, 1 << 30))
            for key, length, tokens in message.get("commit", ()):
                assert self._growth.length(key) == length
                self._growth.commit(key, tokens)
            for key in message.get("close", ()):
                self._growth.close(key)
        self._inbox.clear()

    def _await(self, most: float) -> bool:
        self._receive()
        now = self._theatre.clock()
        if self._under_way is None or self._until > now + most:
            return False
        self._theatre.seconds = max(now, self._until)
        return True


def theatre(traces: Sequence[dict[str, Any]], batch: int, warm: int) -> Any:
    """Return requests with their answers, and devices that take counted time."""
    found = replay.Theatre(traces, batch, warm)
    found.trees, found.most = False, MOST
    found.verify = lambda rows: seconds("target", rows)
    found.draft = lambda rows: seconds("draft", rows)
    return found


def counted() -> list[dict[str, Any]]:
    """Return each cell: tokens a second of plain decoding, ordinary speculation and ahead."""
    cells = []
    for kind, batch in track([(k, b) for k in KINDS for b in BATCHES], "counting"):
        traces, warm = renamed(replay.traces_of(kind, batch)), max(4, batch)

        def ordinary(count: int, cell: Any = (traces, batch, warm)) -> float:
            stage = theatre(*cell)
            return float(stage.play(replay.Fixed(replay.RecordedModel(stage), count)))

        plain = ordinary(0)
        found = {count: ordinary(count) for count in DRAFTS}
        best = max(found, key=lambda count: found[count])
        stage = theatre(traces, batch, warm)
        ahead = CountedAhead(stage, RecordedBranches(traces), WIDTH)
        speed = float(stage.play(ahead))
        asked = sum(ahead.counts.values())
        cells.append(
            {
                "kind": kind,
                "batch": batch,
                "plain": round(plain, 2),
                "ordinary": round(found[best], 2),
                "ordinary_drafts": best,
                "ahead": round(speed, 2),
                "ratio": round(speed / found[best], 3),
                "ratio_to_plain": round(speed / plain, 3),
                "hit_rate": round(ahead.counts["hit"] / asked, 3),
                "counts": dict(ahead.counts),
                "waited_share": round(ahead.waited / stage.seconds, 3),
            }
        )
        if batch == 1:
            ratio = ahead.formula() / seconds("target", 1 + MOST) / found[best]
            cells[-1]["ratio_by_formula"] = round(ratio, 3)
    return cells


# -- coins


def coins() -> list[dict[str, Any]]:
    """Return how often the next token was foreseen, with the target's coins and with others."""
    target, draft = (Runner(load(str(TINY / name), "float32")) for name in ("target", "draft"))
    cells = []
    for temperature in track((0.0, 0.7, 1.0), "drawing"):
        texts = outrider.generate(
            target.model,
            [[1, 20 + n, 40 + n] for n in range(16)],
            sampling=[
                {"temperature": temperature, "max_tokens": 64, "seed": n, "ignore_eos": True}
                for n in range(16)
            ],
            max_drafts=0,
        )
        for fan_out in (1, 2, 3, 5, 8):
            for shared in (True, False):
                if temperature == 0.0 and not shared:
                    continue
                cells.append(
                    {
                        "temperature": temperature,
                        "fan_out": fan_out,
                        "shared_coins": shared,
                        "foreseen": foreseen(draft, texts, temperature, fan_out, shared),
                    }
                )
    return cells


def foreseen(draft: Runner, texts: Any, temperature: float, fan_out: int, shared: bool) -> float:
    """Return the share of tokens that were among the children of the root, once it was read."""
    right = asked = 0
    growth: Growth[int, Any] = Growth(draft, KeyedCoins(), width=16, fan_out=fan_out, max_nodes=1)
    for n, prompt in enumerate(texts.prompts):
        seed = n if shared else n + 1000
        params = SamplingParams(temperature=temperature)
        growth.open(n, Request(n, tuple(prompt), params, seed))
    for place in range(64):
        children = {grown.key: grown.tokens for grown in growth.grow()}
        for n, output in enumerate(texts.outputs):
            right += output[place] in children[n]
            asked += 1
            growth.commit(n, [output[place]])
    for n in growth.names:
        growth.close(n)
    return round(right / asked, 4)


# -- real


def real(target: str, draft: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Return tokens a second of each contender, in interleaved rounds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path(target))
    model, small = load(target, "float32"), load(draft, "float32")
    cores = sorted(os.sched_getaffinity(0))[:2]
    prompts = [(kind, chat_ids(tokenizer, p)) for kind in PROMPTS for p in PROMPTS[kind]]
    socket = Path(tempfile.mkdtemp()) / "draft.sock"
    command = [sys.executable, "-m", "outrider", "draft-server", model_path(draft)]
    command += ["--socket", str(socket), "--threads", "1", "--width", "2", "--fan-out", "2"]
    server = subprocess.Popen(
        ["taskset", "-c", str(cores[1]), *command], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    server.stdout.readline()
    ahead = AheadDrafter(socket, wait=10.0)
    contenders: dict[str, tuple[Any, int, list[int]]] = {
        "plain, one core": ("none", 0, cores[:1]),
        "plain, two cores": ("none", 0, cores),
        "model, one core": (small, 4, cores[:1]),
        "model, two cores": (small, 4, cores),
        "ahead, one core each": (ahead, 4, cores[:1]),
    }
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    expected: dict[int, list[int]] = {}
    different = 0
    work = [(r, p, name) for r in range(rounds) for p in range(len(prompts)) for name in contenders]
    for _, p, name in track(work, "generating"):
        (kind, prompt), (drafter, drafts, mine) = prompts[p], contenders[name]
        os.sched_setaffinity(0, mine)
        torch.set_num_threads(len(mine))
        began = time.perf_counter()
        made = outrider.generate(
            model,
            prompt,
            drafter=drafter,
            sampling={"max_tokens": tokens, "ignore_eos": True},
            max_drafts=drafts,
        )
        taken = time.perf_counter() - began
        speeds[name].setdefault(kind, []).append(tokens / taken)
        different += different_tokens(made.outputs, [expected.setdefault(p, made.outputs[0])])
    server.terminate()
    return {
        "target": Path(target).name,
        "draft": Path(draft).name,
        "tokens": tokens,
        "different_tokens": different,
        "speeds": {
            name: {kind: spread(v) for kind, v in kinds.items()} for name, kinds in speeds.items()
        },
        "ratios": ratios(speeds),
        "counts": dict(ahead.counts),
    }


def ratios(speeds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return ahead's speed as a multiple of each other's, prompt by prompt."""
    ahead = speeds["ahead, one core each"]
    return {
        name: {
            kind: spread([a / b for a, b in zip(ahead[kind], kinds[kind], strict=True)])
            for kind in kinds
        }
        for name, kinds in speeds.items()
        if kinds is not ahead
    }


# -- picture


def picture(kind: str = "code", until: float = 0.4) -> None:
    """Draw what both devices do, for ordinary speculation and for drafting ahead."""
    plt = pyplot()
    traces = renamed(replay.traces_of(kind, 1))
    figure, axes = plt.subplots(2, 1, figsize=(8, 2.8), sharex=True, layout="constrained")
    for axis, name in zip(axes, ("ordinary speculation", "drafting ahead"), strict=True):
        stage = theatre(traces, 1, 4)
        passes: list[tuple[str, float, float]] = []
        tokens: list[tuple[float, int]] = []

        def logged(who: str, stage: Any = stage, passes: Any = passes) -> Any:
            def cost(rows: int) -> float:
                passes.append((who, stage.seconds, seconds(who, rows)))
                return seconds(who, rows)

            return cost

        stage.verify, stage.draft = logged("target"), logged("draft")
        if name == "drafting ahead":
            drafter: Any = CountedAhead(stage, RecordedBranches(traces), WIDTH)
            drafter.passes = passes
        else:
            drafter = replay.Fixed(replay.RecordedModel(stage), 6)
        observe = drafter.observe

        def observed(
            outcomes: Any, stage: Any = stage, tokens: Any = tokens, tell: Any = observe
        ) -> None:
            tokens.append((stage.seconds, sum(len(o.tokens) for o in outcomes)))
            tell(outcomes)

        drafter.observe = observed
        stage.play(drafter)
        for place, who, colour in ((0, "draft", "#c77d2e"), (1, "target", "#31688e")):
            bars = [(1e3 * at, 1e3 * taken) for w, at, taken in passes if w == who and at < until]
            axis.broken_barh(bars, (place - 0.35, 0.7), color=colour, edgecolor="white", lw=0.4)
        seen = [(at, count) for at, count in tokens if at < until]
        for at, count in seen:
            axis.text(1e3 * at, 1.42, str(count), ha="right", fontsize=7)
        axis.set_yticks([0, 1], ["draft model", "target"])
        axis.set_ylim(-0.5, 1.8)
        axis.set_xlim(0, 1e3 * until)
        total = sum(count for _, count in seen)
        axis.set_title(f"{name}: {total} tokens", fontsize=9, loc="left")
    axes[-1].set_xlabel("ms; above each pass of the target: the tokens that it emitted")
    save_plot(figure, "ahead")


# -- report


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was aimed at, and what came of it."""
    found: list[dict[str, Any]] = []

    def goal(text: str, value: float | None, least: float) -> None:
        if value is not None:
            found.append({"goal": text, "value": value, "reached": value >= least})

    for part in ("counted", "paced"):
        if cells := result.get(part, {}).get("cells", []):
            alone = [cell["ratio"] for cell in cells if cell["batch"] == 1]
            text = f"{part}, B = 1: >= 1.4 times ordinary speculation, the median"
            goal(text, _median(alone), 1.4)
            goal(f"{part}: never below ordinary speculation", min(c["ratio"] for c in cells), 1.0)
    if measured := result.get("real"):
        for cores in ("one core", "two cores"):
            by_kind = measured["ratios"][f"model, {cores}"]
            worst = min(kind["median"] for kind in by_kind.values())
            goal(f"real: >= 1.25 times the draft model in the step, {cores}", worst, 1.25)
        goal("real: no token differs", -measured["different_tokens"], 0)
    return found


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def show(result: dict[str, Any]) -> None:
    """Print tables and goals."""
    console = Console()
    for part in [part for part in ("counted", "paced") if part in result]:
        table = Table(part, "B", "plain", "ordinary (K)", "ahead", "ahead / ordinary", "hits")
        for c in result[part]["cells"]:
            ordinary = f"{c['ordinary']:.0f} ({c['ordinary_drafts']})"
            numbers = f"{c['plain']:.0f}", ordinary, f"{c['ahead']:.0f}"
            ends = f"{c['ratio']:.2f}", f"{c['hit_rate']:.2f}"
            table.add_row(c["kind"], str(c["batch"]), *numbers, *ends)
        console.print(table)
    if cells := result.get("coins", {}).get("cells"):
        table = Table("temperature", "fan-out", "with the target's coins", "with others")
        by = {(c["temperature"], c["fan_out"], c["shared_coins"]): c["foreseen"] for c in cells}
        for temperature, fan_out, shared in by:
            if shared:
                other = by.get((temperature, fan_out, False))
                shown = f"{by[temperature, fan_out, True]:.3f}"
                table.add_row(
                    str(temperature), str(fan_out), shown, "" if other is None else f"{other:.3f}"
                )
        console.print(table)
    if measured := result.get("real"):
        table = Table("", *PROMPTS)
        for name, kinds in measured["speeds"].items():
            table.add_row(name, *(f"{kinds[kind]['median']:.2f}" for kind in PROMPTS))
        console.print(table)
        console.print(measured["counts"])
    for goal in result["goals"]:
        console.print(
            f"{'reached' if goal['reached'] else 'missed'}: {goal['goal']}: {goal['value']}"
        )


if __name__ == "__main__":
    main()
