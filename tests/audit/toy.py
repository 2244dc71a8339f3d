"""Engines without a model: a table of logits, sampled exactly or by a biased rule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from outrider.clients import Answer, Counts, Query, Refused, Token
from outrider.errors import Unsupported

WORDS = [" red", " green", " blue", " white", " black", " grey", " pink", " gold"]
Row = list[float]


@cache
def logits(model: int, prompt: str, context: tuple[str, ...]) -> Row:
    """Return what a model thinks comes next: fixed, but without rhyme or reason."""
    coins = random.Random(f"{model} {prompt} {' '.join(context)}")
    return [coins.gauss(0, 1.2) for _ in WORDS]


def softmax(row: Row, temperature: float = 1.0, top_p: float = 1.0) -> Row:
    largest = max(row)
    p = [math.exp((value - largest) / temperature) for value in row]
    p = [value / sum(p) for value in p]
    mass, kept = 0.0, set()
    for i in sorted(range(len(p)), key=lambda i: -p[i]):
        if mass >= top_p:
            break
        kept.add(i)
        mass += p[i]
    return [value / mass if i in kept else 0.0 for i, value in enumerate(p)]


def draw(p: Row, coins: random.Random) -> int:
    return coins.choices(range(len(p)), p)[0]


# Rules: (target's logits, draft's logits, query, coins, steps so far) -> the next token


def exact(p: Row, q: Row, query: Query, coins: random.Random) -> int:
    if query.temperature == 0:
        return p.index(max(p))
    return draw(softmax(p, query.temperature, query.top_p), coins)


def greedy(p: Row, q: Row, query: Query, coins: random.Random) -> int:
    """Takes the most likely token whatever the temperature."""
    return p.index(max(p))


def no_top_p(p: Row, q: Row, query: Query, coins: random.Random) -> int:
    """Forgets top-p."""
    return draw(softmax(p, query.temperature), coins)


def argmax_as_sampled(p: Row, q: Row, query: Query, coins: random.Random) -> int:
    """Tests the draft's most likely token as if it had been drawn from q."""
    ps, qs = softmax(p, query.temperature), softmax(q, query.temperature)
    x = q.index(max(q))
    if coins.random() < ps[x] / qs[x]:
        return x
    left = [max(0.0, a - b) for a, b in zip(ps, qs, strict=True)]
    return draw(left, coins)


def top_two(p: Row, q: Row, query: Query, coins: random.Random) -> int:
    """Takes a draft that is among the target's two best."""
    x = q.index(max(q))
    return x if x in sorted(range(len(p)), key=lambda i: -p[i])[:2] else exact(p, q, query, coins)


Rule = Callable[[Row, Row, Query, random.Random], int]


@dataclass
class Toy:
    """An engine. Its first token needs no draft, so it is always drawn as it should be.

    noise: how far its logits may be off, after the first token
    grid: logits are rounded to multiples of it, as in half precision
    fail: called before each query with how many were answered
    refuse: whether to refuse logprobs
    room: for the letters of a prompt and the tokens of its answer
    """

    rule: Rule = exact
    noise: float = 0.0
    grid: float = 0.0
    drafts: bool = True
    tell: bool = True
    fail: Callable[[int], None] = lambda n: None
    refuse: bool = False
    room: int = 1_000_000
    spec: str = "toy"
    asked: list[Query] = field(default_factory=list)

    def answer(self, query: Query) -> Answer:
        coins = random.Random(query.seed if query.seed is not None else query.prompt)
        shaken = random.Random(f"noise {query.prompt}")
        words: list[str] = []
        tokens = []
        for _ in range(query.max_tokens):
            p, q = (logits(model, query.prompt, tuple(words[-3:])) for model in (0, 1))
            if words and self.noise:
                p = [value + shaken.uniform(-self.noise, self.noise) for value in p]
            if self.grid:
                p = [round(value / self.grid) * self.grid for value in p]
            i = (self.rule if words else exact)(p, q, query, coins)
            words.append(WORDS[i])
            top = sorted(zip(WORDS, map(math.log, softmax(p)), strict=True), key=lambda t: -t[1])
            told = dict(top)[words[-1]], tuple(top[: query.logprobs or 0])
            tokens.append(Token(words[-1], *told) if self.tell else Token(words[-1]))
        known = tuple(tokens) if query.logprobs is not None else ()
        return Answer("".join(words), known, len(words), "length", ((0.0, 0.0), (1.0, 1.0)))

    def ask(self, queries, concurrency=1, *, stream=False, rate=None, heard=None, refused=None):
        answers = []
        for number, query in enumerate(queries):
            if len(query.prompt) + query.max_tokens > self.room:
                error = Refused("too long", fix="shorten it")
                if refused is None:
                    raise error
                refused(number, error)
                continue
            if self.refuse and query.logprobs is not None:
                raise Unsupported("no logprobs here", fix="ask for none")
            if query.max_tokens > 1:  # an audit's first question only tries whether it may ask
                self.fail(len(self.asked))
                self.asked.append(query)
            answers.append(self.answer(query))
            if heard is not None:
                heard(number, answers[-1])
        return answers

    def counts(self):
        drafted = sum(query.max_tokens for query in self.asked) if self.drafts else 0
        return Counts(drafted=drafted, accepted=drafted // 2)

    def facts(self):
        return {"engine": self.spec, "model": "toy"}

    def close(self):
        pass
