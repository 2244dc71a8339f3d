"""Comparing two servers' answers: shared by the parity tests and benchmarks/parity_sglang.py."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import threading
from itertools import accumulate
from pathlib import Path

import workload

COMMON = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--enable-custom-logit-processor"),
    *("--chat-template", str(Path(__file__).parent / "plain.jinja")),
]
ROOMY = [*COMMON, "--max-total-tokens", "4096", "--max-running-requests", "16"]
TIGHT = [
    *COMMON,
    *("--max-total-tokens", "340", "--max-running-requests", "12"),
    *("--schedule-conservativeness", "0.05", "--chunked-prefill-size", "48", "--enable-metrics"),
]
RETRACTING = {"OUTRIDER_TEST_RETRACT": "40"}
"""With it, SGLang retracts requests every 40 passes: where there is little room drafts are cut
first, so a pool that is small is seldom too small."""

CROWD = [
    *COMMON,
    *("--max-total-tokens", "700", "--max-running-requests", "64"),
    *("--schedule-conservativeness", "0.05", "--chunked-prefill-size", "48", "--enable-metrics"),
]
STOCK = ["--attention-backend", "torch_native"]
DETERMINISTIC = ["--attention-backend", "outrider", "--enable-deterministic-inference"]
OUTRIDER = ["--speculative-algorithm", "OUTRIDER"]
DRAFTERS = {
    "model": {"siblings": 2, "min_survival": 0.3},
    "suffix": {"min_vote": 0.0},
    "ngram": {"min_n": 1},
    "adaptive": {},
}
"""All drafters of a server, with options that make them draft a lot; the model drafts trees."""

# With overlap, bare SGLang applies penalties one token late.
BARE = [*ROOMY, "--disable-overlap-schedule"]


class Comparison:
    """Collects what differs, and counts what was compared."""

    def __init__(self):
        self.different: list[tuple[str, object, object]] = []
        self.gaps: dict[str, float] = {}
        self.requests = self.tokens = 0

    def compare(self, wishes, bare, ours):
        for wish, a, b in zip(wishes, bare, ours, strict=True):
            self.requests += 1
            if workload.essence(a) != workload.essence(b):
                name = f"{wish.kind}/{wish.form}"
                self.different.append((name, workload.essence(a), workload.essence(b)))
                continue
            self.tokens += sum(_tokens(x) for x in (a if isinstance(a, list) else [a]))
            try:
                gap = workload.furthest(workload.logprobs(a), workload.logprobs(b))
            except AssertionError as error:  # not even of the same shape
                self.different.append((f"{wish.kind}/{wish.form}", wish.body, error))
                continue
            self.gaps[wish.kind] = max(self.gaps.get(wish.kind, 0.0), gap)

    def conclude(self, logprobs_within):
        shown = "\n".join(map(str, self.different[:4]))
        assert not self.different, f"{len(self.different)} of {self.requests} differ:\n{shown}"
        loose = max(logprobs_within, 1e-5)
        within = {kind: loose if "additive" in kind else logprobs_within for kind in self.gaps}
        assert all(gap <= within[kind] for kind, gap in self.gaps.items()), self.gaps


def _tokens(answer):
    if "choices" in answer:
        return (answer["usage"] or {}).get("completion_tokens", 0)
    return answer["meta_info"]["completion_tokens"]


def profile(folder, drafters=DRAFTERS, **more):
    """Write a profile with all drafters. Returns the environment that names it.

    The server checks each KV slot that it reads, unless `sanitize` says otherwise.
    """
    path = Path(folder) / "drafters.yaml"
    content = {"drafter": "adaptive", "drafters": drafters, "sanitize": True}
    path.write_text(json.dumps(content | (more or {"draft_bits": 4})))
    return {"OUTRIDER_CONFIG": str(path)}


def noisy(model, path, noise=0.1):
    """Make a draft model of a model: its weights with some noise. Returns its path."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(Path(model) / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() == 2:
            spread = weight.float().std() * noise
            jitter = torch.randn(weight.shape, generator=generator) * spread
            weights[name] = (weight.float() + jitter).to(weight.dtype)
    save_file(weights, path / "model.safetensors")
    return path


def with_drafters(wishes, drafters=DRAFTERS):
    """Let each request that can say so choose a drafter, one after the other."""
    chosen = []
    for i, wish in enumerate(wishes):
        body = copy.deepcopy(wish.body)
        if wish.path == "/generate":
            params = body["sampling_params"].setdefault("custom_params", {})
            params["outrider"] = {"drafter": [*drafters][i % len(drafters)]}
        chosen.append(dataclasses.replace(wish, body=body))
    return chosen


class KnownAnswers:
    """The answers of a bare server: a request that any process of the tests has asked has its own.

    It stands for the server, which starts when the first unknown request comes. The server must
    answer a request alike whatever was asked beside it or before: SGLang's deterministic mode does.

    start: returns the server
    key: what names its answers: SGLang's version, the model, the flags
    folder: where answers are kept
    """

    def __init__(self, start, key, folder):
        self._start, self._key, self._folder, self._server = start, key, Path(folder), None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._server:
            self._server.stop()

    def ask_all(self, wishes, concurrency):
        """Return the answers, in order; ask for those that are not known."""
        files = [self._file(wish) for wish in wishes]
        new = {file: wish for file, wish in zip(files, wishes, strict=True) if not file.exists()}
        if new:
            self._server = self._server or self._start()
            self._folder.mkdir(exist_ok=True)
            found = self._server.ask_all([*new.values()], concurrency)
            for file, answer in zip(new, found, strict=True):
                made = file.with_suffix(f".{os.getpid()}")
                made.write_text(json.dumps(answer))
                made.replace(file)
        return [json.loads(file.read_text()) for file in files]

    def _file(self, wish):
        said = json.dumps([self._key, *wish], sort_keys=True)
        return self._folder / f"{hashlib.sha256(said.encode()).hexdigest()}.json"


def ask_bare(server, wishes):
    """Ask what bare SGLang survives: `token_ids_logprob` beside a request without it kills it."""
    alone = ["token_ids_logprob" in wish.body for wish in wishes]
    answers = {}
    for is_alone, concurrency in ((True, 1), (False, 16)):
        group = [i for i, wish in enumerate(wishes) if alone[i] == is_alone]
        found = server.ask_all([wishes[i].wish for i in group], concurrency)
        answers |= dict(zip(group, found, strict=True))
    return [answers[i] for i in range(len(wishes))]


def disturb(server, wishes, stop, seed):
    """Hang up on requests in flight until told to stop."""
    rng = random.Random(seed)
    while not stop.is_set():
        wish = rng.choice(wishes)
        if wish.path == "/generate":
            server.cancel(*wish.wish, after=rng.randrange(6))


def ask_in_a_storm(server, wishes, concurrency):
    """Ask amid two clients that hang up; one request at a time is asked alone."""
    stop, clients = threading.Event(), 2 if concurrency > 1 else 0
    storms = [
        threading.Thread(target=disturb, args=(server, wishes, stop, seed))
        for seed in range(clients)
    ]
    for storm in storms:
        storm.start()
    try:
        return server.ask_all([wish.wish for wish in wishes], concurrency)
    finally:
        stop.set()
        for storm in storms:
            storm.join()


def check_traffic(server, retracts=True, drafters=()):
    """The run must have met what it claims to survive: drafts kept and lost, retraction.

    drafters: who must have had drafts kept; trees must have been verified then
    """
    counters = server.metrics()
    for name in drafters:
        key = "outrider:accepted_draft_tokens_total{"
        mine = [v for k, v in counters.items() if k.startswith(key) and f'drafter="{name}"' in k]
        assert sum(mine) > 0, name
    assert counters["outrider:tree_steps_total"] > 0 or not drafters
    drafted = counters["outrider:draft_tokens_total"]
    accepted = counters["outrider:accepted_draft_tokens_total"]
    assert 0 < accepted < drafted
    met = re.search("#retracted_reqs: [1-9]", server.log.read_text())
    assert met or not retracts, "nothing was retracted"


def faults(server):
    """Return why requests went without drafts, but for want of slots: the cache is small."""
    counted = [k for k, v in server.metrics().items() if "fallbacks_total{" in k and v]
    return {re.search('reason="([^"]*)"', key)[1] for key in counted} - {"slots"}


def compare_greedy(bare, ours, wishes):
    """Ask both servers for everything; most of it from ours amid clients that hang up."""
    comparison, most = Comparison(), len(wishes) * 3 // 4
    expected = ask_bare(bare, wishes)
    answers = ask_in_a_storm(ours, wishes[:most], 16)
    answers += ours.ask_all([wish.wish for wish in wishes[most:]], 4)
    comparison.compare(wishes, expected, answers)
    ours.settle_down()
    return comparison


def seeded_phases(model, count, max_new, processor):
    """Return requests to a model, by the path that they take through the host's sampler."""
    kinds = [workload.greedy(model), workload.SEEDED, workload.FILTERED]
    return [
        workload.make(kind, count // 3, seed, max_new, processor) for seed, kind in enumerate(kinds)
    ]


def compare_seeded(bare, ours, phases, concurrencies=(16,), drafters=DRAFTERS):
    """Ask bare SGLang phase by phase, and ours, of all drafters, for all of it at once.

    concurrencies: the requests are shared among these, one after the other, so that each takes
        about as long: a step costs nearly the same for one request and for sixteen
    """
    comparison = Comparison()
    expected = [ask_bare(bare, phase) for phase in phases]
    order = [(p, i) for p, phase in enumerate(phases) for i in range(len(phase))]
    random.Random(5).shuffle(order)
    mixed = [phases[p][i] for p, i in order]
    asked, answers = with_drafters(mixed, drafters), []
    weights = [max(concurrency, max(concurrencies) / 4) for concurrency in concurrencies]
    for concurrency, weight in zip(concurrencies, accumulate(weights), strict=True):
        most = round(len(asked) * weight / sum(weights))
        answers += ask_in_a_storm(ours, asked[len(answers) : most], concurrency)
    comparison.compare(mixed, [expected[p][i] for p, i in order], answers)
    ours.settle_down()
    return comparison
