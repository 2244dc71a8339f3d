"""Results of every tool with words of others in each place that has some."""

from __future__ import annotations

from outrider.audit.result import Heard, Settings
from outrider.audit.result import Result as Audit
from outrider.bench.measure import Parity, Plan, Run
from outrider.bench.result import Result as Bench
from outrider.clients import Answer, Counts, Token


class Engine:
    """Answers with the words that it is called by, and counts with them."""

    def __init__(self, name):
        self.spec = name
        self.asked = 0

    def ask(self, queries, concurrency=1, *, heard=None, **more):
        found = [answer(self.spec, 2) for _ in queries]
        self.asked += len(found)
        for number, one in enumerate(found if heard is not None else ()):
            heard(number, one)
        return found

    def counts(self):
        counts = Counts(self.asked, self.asked, 3 * self.asked, 2 * self.asked, self.asked)
        counts.by_drafter[self.spec] = counts.fallbacks[self.spec] = self.asked
        counts.accepted_at[1] = counts.proposed_at[1] = self.asked
        counts.seconds.update({self.spec: 0.1 * self.asked, "forward": 0.2 * self.asked})
        return counts

    def variant(self, options, salt=None):
        return self

    def facts(self):
        return {"engine": self.spec, "model": self.spec, "version": self.spec}


def answer(text, count):
    tokens = tuple(Token(text, -0.1, ((text, -0.1), ("b", -0.2))) for _ in range(count))
    return Answer(text * count, tokens, count, text, ((0.0, 0.0), (1.0, 1.0), (2.0, 2.0)))


def bench(name, other, is_broken=False):
    plan = Plan({name: ["a"]}, (1,))
    (cell,) = plan.cells
    engine = Engine(other)
    before, _, after = engine.counts(), engine.ask(["a"]), engine.counts()
    runs = [Run(e, cell, 0, 2.0 + e, 6, (0.1,), (0.1,), after - before) for e in (0, 1)]
    made = {"date": name, "argv": [other], "versions": {name: other}}
    engines = [Engine("http://plain:1").facts(), Engine(f"http://h:2#{other}").facts()]
    found = Bench(made, engines, plan, runs)
    found.parities[cell, 1] = Parity(3, 2, (other,) if is_broken else ())
    return found


def audit(one, other):
    plain = {0: answer(one, 3), 1: answer("x", 3), 2: answer(other, 1)}
    sampled = [{n: answer(text, 2) for n in range(100)} for text in (one, other)]
    heard = Heard(plain, {**plain, 0: answer(other, 3)}, {**plain, 1: answer(one, 2)}, *sampled)
    facts = {"engine": one, "model": other, "version": one}
    made = {"date": one, "argv": [other], "versions": {other: one}}
    sides = {"plain": facts, "speculative": facts | {"engine": other}}
    return Audit(
        Settings(samples=100), [one, other, "p"], [one], heard, sides, made, stopped=one or None
    )


def walk(one, other):
    from outrider.explain.recording import Logprobs, Recording, StepRecord
    from outrider.explain.walk import make_walk

    first = StepRecord(drafter="", drafts=(), parents=(), kept=(), emitted=(2,))
    second = StepRecord(drafter=one, drafts=(3, 4), parents=(-1, 0), kept=(0,), emitted=(3, 5))
    recording = Recording(other, [1], [2, 3, 5], [first, second])
    recording.logprobs = [Logprobs(-0.1, ((2, -0.1), (9, -3.0)))] * 3
    recording.settings = {"target": one, "draft": other, "engine": one, "drafter": other}
    made = {"date": one, "argv": [other], "versions": {one: other}}
    return make_walk(recording, lambda lists: [(one, other)[len(ids) % 2] for ids in lists], made)


def search(one, other):
    """Return what `tune` tried on an engine that is as fast as it pleases."""
    from outrider.tune.search import Search, Traffic, grid

    made = Search(Engine(one), Traffic([other], 1), grid(["suffix"]), 1e-3)
    list(made.run(lambda rung, candidate, spent: None))
    return made


def trial(one, other):
    from outrider.trial.ask import examine
    from outrider.trial.plan import Pair, Wanted
    from outrider.trial.result import Trial

    wanted = Wanted(one, other, requests=3, quick=True, device="cpu", flags=(one,))
    servers = {
        ("pair", side): examine(
            Engine(text), wanted, 3, True, chat=True, again=side == "bare",
            ticker=lambda stage, total: lambda: None,
        ) | {"seconds": 1.0}
        for side, text in (("bare", one), ("ours", other))
    }  # fmt: skip
    finding = {"level": "problem", "area": one, "what": other, "why": one, "fix": other}
    check = {"name": one, "passed": not one, "promised": True, "detail": other}
    kernels = {
        "passed": not one, "verdict": one, "environment": {"device": other}, "checks": [check],
        "measurements": [],
    }  # fmt: skip
    made = {"date": one, "argv": [other], "commit": one, "versions": {one: other}}
    doctor = {"machine": {"device": one, "gpu": other}, "findings": [finding]}
    pairs = [Pair("pair", ()), Pair(one or "a", (), skip=other)]
    return Trial(wanted, made, doctor, pairs, kernels, servers, failures={one: other})


def selftest(one, other):
    from outrider.selftest.check import Outcome
    from outrider.selftest.report import Report

    outcomes = [Outcome(one, "correctness", not other, True, other, 0.1)]
    environment = {"gpu": one, "device": other, "arch": one, "triton": other}
    return Report({"date": one, "argv": [other], "versions": {one: other}}, environment, outcomes)
