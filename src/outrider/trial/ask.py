"""What one server is asked: requests whose answers are compared, then its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from outrider.bench.measure import Cell, Plan, Run, measure
from outrider.bench.result import Result
from outrider.bench.workloads import SINGLE, VARIANTS, prompts
from outrider.clients import Answer, Counts, Engine, Query, Refused, Token
from outrider.errors import Unsupported
from outrider.trial.plan import Wanted

__all__ = ["ask", "examine", "queries", "read_answers"]

LOADS = (1, 2, 4, 8, 16)
"""Requests at once. Each has a share of the requests in proportion: about the same time."""

ALTERNATIVES = 5
"""Logprobs asked for at each place, so that a tie can be told from a mistake."""

TEXTS = VARIANTS * len(SINGLE)
ROUNDS = 3
Ticker = Callable[[str, int], Callable[[], None]]
"""Called with the name of a stage and its size; returns what is called after each answer."""


def queries(count: int, chat: bool, max_tokens: int, deterministic: bool) -> list[Query]:
    """Return what both servers are asked.

    Where SGLang is deterministic: half of them greedy, every other one without logprobs, which is
    another path through the server; a quarter sampled with a seed, a quarter with top-p too.
    Elsewhere only logprobs tell a tie from a mistake.
    """
    texts = prompts("mixed", min(count, TEXTS))
    made = []
    for n in range(count):
        more: dict[str, Any] = {"logprobs": ALTERNATIVES}
        if deterministic and 2 * n >= count:
            more = {"temperature": (0.7, 1.0)[n % 2], "seed": n}
            more |= {"top_p": 0.9} if 4 * n >= 3 * count else {}
        elif deterministic and n % 2:
            more = {}
        made.append(Query(texts[n % len(texts)], chat, max_tokens, **more))
    return made


def phases(asked: Sequence[Query]) -> list[list[int]]:
    """Return the numbers of the requests that may share a batch.

    Bare SGLang draws over ranks instead of ids where a neighbour has top-k or top-p, a greedy one
    included: seeded answers are compared where all neighbours are of the same kind.
    """
    found: dict[tuple[bool, bool], list[int]] = {}
    for n, query in enumerate(asked):
        found.setdefault((query.temperature > 0, query.top_p < 1), []).append(n)
    return list(found.values())


def loads(count: int) -> Iterator[tuple[int, range]]:
    """Yield how many requests are open at once, and the places of the requests asked so."""
    start, total = 0, sum(LOADS)
    for at, load in enumerate(LOADS):
        end = count * sum(LOADS[: at + 1]) // total
        if end > start:
            yield load, range(start, end)
        start = end


def ask(
    engines: Sequence[Engine],
    asked: Sequence[Query],
    tick: Callable[[], None],
    backwards: bool = False,
) -> tuple[dict[int, Answer], dict[int, str]]:
    """Return the answers, and why a request is refused, by the number of the request.

    engines: one server with several options; each is asked two requests in turn, as neighbours
        differ in logprobs and temperature
    backwards: in the other order, so that a request has other neighbours
    """
    answers: dict[int, Answer] = {}
    refusals: dict[int, str] = {}
    for phase in phases(asked):
        order = phase[::-1] if backwards else phase
        for (load, places), (at, engine) in product(loads(len(order)), enumerate(engines)):
            numbers = [order[p] for p in places if order[p] // 2 % len(engines) == at]

            def heard(place: int, answer: Answer, numbers: Sequence[int] = numbers) -> None:
                answers[numbers[place]] = answer
                tick()

            def refused(place: int, error: Refused, numbers: Sequence[int] = numbers) -> None:
                refusals[numbers[place]] = str(error)
                tick()

            if numbers:
                engine.ask([asked[n] for n in numbers], load, heard=heard, refused=refused)
    return answers, refusals


def examine(
    engine: Engine,
    wanted: Wanted,
    count: int,
    deterministic: bool,
    *,
    chat: bool | None,
    again: bool,
    ticker: Ticker,
    drafting: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a server answers and how fast it is, as plain values.

    count: how many requests are compared
    drafting: options of every second pair of them: a fixed drafter, as control may find here that
        no drafts pay, and answers without drafts would prove nothing. Speed is that of the
        server's own choice.
    chat: whether the model has a chat template; None tries it
    again: ask a second time the other way round: does this server agree with itself?
    """
    chat = _has_template(engine) if chat is None else chat
    asked = queries(count, chat, wanted.max_tokens, deterministic)
    engines = [engine] if drafting is None else [engine, engine.variant(drafting)]
    before = engine.counts()
    answers, refused = ask(engines, asked, ticker("answers", count))
    after = engine.counts()
    if not answers:
        raise Unsupported(
            f"every request is refused: {refused.popitem()[1]}", fix="use a longer context"
        )
    found = {
        "facts": engine.facts(),
        "chat": chat,
        "asked": count,
        "answers": _plain(answers),
        "refused": {str(n): why for n, why in refused.items()},
        "counts": (after - before).as_json() if before and after else None,
    }
    if again:
        repeated, _ = ask(engines, asked, ticker("the same again", count), backwards=True)
        found["again"] = _plain(repeated)
    texts = [query.prompt for n, query in enumerate(asked) if n in answers]
    return {**found, "speed": _speed(engine, wanted, texts, chat, ticker)}


def _has_template(engine: Engine) -> bool:
    try:
        engine.ask([Query("Hello", chat=True, max_tokens=1)])
    except Refused:
        return False
    return True


def _speed(
    engine: Engine, wanted: Wanted, texts: Sequence[str], chat: bool, ticker: Ticker
) -> list[dict[str, Any]]:
    """Return what `outrider bench` says of each concurrency."""
    plan = Plan(
        {"mixed": texts},
        wanted.concurrencies,
        max_tokens=wanted.max_tokens,
        rounds=1 if wanted.quick else ROUNDS,
        requests=1 if wanted.quick else 2,
        chat=chat,
    )
    tick = ticker("speed", len(plan.cells) * (plan.rounds + 1))
    result = Result({}, [engine.facts()], plan)

    def begun(cell: Cell, engine: int, round_: int) -> None:
        tick()

    result.runs += [run for run in measure([engine], plan, begun) if isinstance(run, Run)]
    return [result.summary(cell, 0) for cell in result.cells]


# -- answers as plain values


def _plain(answers: Mapping[int, Answer]) -> dict[str, Any]:
    return {
        str(n): [one.text, one.count, one.finish_reason,
                 [[token.text, token.logprob, token.top] for token in one.tokens]]
        for n, one in sorted(answers.items())
    }  # fmt: skip


def read_answers(found: Mapping[str, Any]) -> dict[int, Answer]:
    """Return answers from what a part has kept."""
    answers = {}
    for n, (text, count, reason, tokens) in found.items():
        told = tuple(
            Token(token, logprob, tuple((other, value) for other, value in top))
            for token, logprob, top in tokens
        )
        answers[int(n)] = Answer(text, told, count, reason, ())
    return answers


def read_counts(found: Mapping[str, Any] | None) -> Counts | None:
    """Return the sums of what speculation did, from what a part has kept."""
    if found is None:
        return None
    return Counts(**{name: value for name, value in found.items() if not isinstance(value, dict)})
