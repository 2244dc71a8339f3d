"""The command `outrider audit`."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from outrider.audit.distribution import LENGTH
from outrider.audit.prompts import SAMPLING_PROMPTS, read_prompts
from outrider.audit.result import (
    CHANGED,
    SAME,
    TIES,
    Agreement,
    Answers,
    Heard,
    Result,
    Settings,
    summary,
)
from outrider.clients import Answer, Counts, Engine, Query, Refused, both_modes, open_engine
from outrider.errors import Unsupported
from outrider.report.console import Stage, Terminal, printable

__all__ = ["audit", "run"]

ALTERNATIVES = 5
"""Logprobs asked for at each place: what OpenAI's completions give at most."""

COLOURS = {SAME: "green", TIES: "green", CHANGED: "red"}
Ticker = Callable[[str, int], Callable[[], None]]
"""Called with the name of a stage and its size; returns what is called after each answer."""


def run(
    plain: str,
    speculative: str | None,
    prompts: Path | Sequence[str],
    settings: Settings,
    *,
    count: int | None = None,
    sampling_prompts: Path | None = None,
    out: Path = Path("outrider-audit"),
    as_json: bool = False,
) -> None:
    """Ask both engines, compare, write both files.

    Ends with the exit code of the verdict. What was heard until an interruption is written.

    prompts: themselves, or a file of which `count` are taken
    """
    from outrider.report import document

    console = Terminal(stderr=True)
    if importlib.util.find_spec("scipy") is None:
        raise Unsupported("chi-square without scipy", fix="pip install 'outrider[tools]'")
    asked = read_prompts(prompts)[:count] if isinstance(prompts, Path) else prompts
    sampled = read_prompts(sampling_prompts) if sampling_prompts else SAMPLING_PROMPTS
    names = (plain, speculative) if speculative else both_modes(plain)
    out.mkdir(parents=True, exist_ok=True)
    with _progress(console) as ticker:
        result = audit(names, asked, sampled, settings, ticker)
    text = document(result.as_json())
    _write(result, text, out)
    if as_json:
        sys.stdout.write(text)
    else:
        show(result, Terminal())
    console.print(f"{out / 'audit.json'}, {out / 'audit.html'}", highlight=False)
    if result.exit_code:
        raise SystemExit(result.exit_code)


@contextmanager
def _progress(console: Console) -> Iterator[Ticker]:
    columns = (
        Stage("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:

        def ticker(stage: str, total: int) -> Callable[[], None]:
            task = progress.add_task(stage, total=total)
            return lambda: progress.advance(task)

        yield ticker


# -- asking


def audit(
    names: tuple[str, str],
    prompts: Sequence[str],
    sampling_prompts: Sequence[str],
    settings: Settings,
    ticker: Ticker = lambda stage, total: lambda: None,
) -> Result:
    """Return what two engines answer, compared. An interruption ends it early.

    names: of the plain and of the speculative engine
    """
    from outrider.report import provenance

    heard = Heard()
    result = Result(settings, prompts, sampling_prompts, heard, {}, provenance())
    with closing(open_engine(names[0])) as plain, closing(open_engine(names[1])) as speculative:
        facts = {"plain": plain.facts(), "speculative": speculative.facts()}
        result = replace(result, facts=facts)
        counts: dict[str, Counts | None] = {}
        stopped, interrupted = None, False
        try:
            for part, name in _stages(plain, speculative, result, ticker):
                counts[name] = part
        except KeyboardInterrupt:
            stopped, interrupted = "interrupted", True
        except Unsupported as error:
            stopped = str(error)
            if not heard:
                raise
        if interrupted and not heard:
            raise KeyboardInterrupt
    return replace(
        result,
        greedy_counts=counts.get("speculative"),
        sampling_counts=counts.get("sampled_speculative"),
        plain_counts=counts.get("plain"),
        stopped=stopped,
        interrupted=interrupted,
    )


def _stages(
    plain: Engine, speculative: Engine, result: Result, ticker: Ticker
) -> Iterator[tuple[Counts | None, str]]:
    """Ask in turn. Yields what speculation did in each stage, with the stage's name."""
    settings, heard = result.settings, result.heard
    queries = [Query(prompt, settings.chat, settings.max_tokens) for prompt in result.prompts]
    order = list(range(len(queries)))
    # before the long part: an engine that refuses shall say so now
    told = {id(engine): _probe(engine, queries) for engine in (plain, speculative)}
    # the control asks the other way round: a prompt has other neighbours in its batch then
    for engine, numbers, answers, name in (
        (plain, order, heard.plain, "plain"),
        (speculative, order, heard.speculative, "speculative"),
        (plain, order[::-1], heard.plain_again, "plain again"),
    ):
        asked = [replace(query, logprobs=told[id(engine)]) for query in queries]
        left = [n for n in numbers if n not in heard.skipped]
        if not left:
            raise Unsupported(f"every prompt is refused: {heard.skipped[0]}", fix="use others")
        tick = ticker(name, len(left))
        yield _ask(engine, asked, left, answers, settings, tick, heard.skipped), name
    if not settings.samples or not result.sampling_prompts:
        return
    count = settings.samples * len(result.sampling_prompts)
    # no seed comes twice: with the same ones, engines could agree and have other distributions
    seeds = random.Random(settings.seed).sample(range(2**31), 2 * count)
    for engine, own, answers, name in (
        (plain, seeds[:count], heard.sampled_plain, "sampled_plain"),
        (speculative, seeds[count:], heard.sampled_speculative, "sampled_speculative"),
    ):
        sampled = [
            Query(
                result.sampling_prompts[n % len(result.sampling_prompts)],
                settings.chat,
                LENGTH,
                settings.temperature,
                settings.top_p,
                seed,
                logprobs=1 if told[id(engine)] else None,
            )
            for n, seed in enumerate(own)
        ]
        tick = ticker(name.replace("sampled_", "samples, "), count)
        yield _ask(engine, sampled, list(range(count)), answers, settings, tick), name


def _probe(engine: Engine, queries: Sequence[Query]) -> int | None:
    """Return how many logprobs an engine tells; None if it refuses them.

    Raises its refusal if it refuses every query. One that refuses the first may serve others.
    """
    first = None
    for query in queries:
        one = replace(query, max_tokens=1)
        with suppress(Unsupported):
            engine.ask([replace(one, logprobs=ALTERNATIVES)])
            return ALTERNATIVES
        try:
            engine.ask([one])
            return None
        except Refused as error:
            first = first or error
    raise first or Unsupported("no prompts", fix="give some")


def _ask(
    engine: Engine,
    queries: Sequence[Query],
    order: Sequence[int],
    answers: Answers,
    settings: Settings,
    tick: Callable[[], None],
    skipped: dict[int, str] | None = None,
) -> Counts | None:
    """Ask in an order. Return what speculation did meanwhile, if the engine tells.

    skipped: notes what is refused; without it, the first refusal is raised
    """
    before = engine.counts()

    def heard(place: int, answer: Answer) -> None:
        answers[order[place]] = answer
        tick()

    def refused(place: int, error: Refused) -> None:
        if skipped is not None:
            skipped[order[place]] = str(error)
        tick()

    told = None if skipped is None else refused
    engine.ask([queries[n] for n in order], settings.concurrency, heard=heard, refused=told)
    after = engine.counts()
    return after - before if before is not None and after is not None else None


# -- showing


def _write(result: Result, text: str, out: Path) -> None:
    from outrider.audit.page import page

    (out / "audit.json").write_text(text, encoding="utf-8")
    (out / "audit.html").write_text(page(result), encoding="utf-8")


def show(result: Result, console: Console) -> None:
    """Print how far the engines agree, each divergence, the sampling test, and the verdict."""
    table = Table("greedy", "identical", "95 %", "tokens agreed", "drift: median, p99, max",
                  box=None, pad_edge=False)  # fmt: skip
    sides = {"speculative": result.greedy, "plain again": result.control}
    for name, found in sides.items():
        if len(found):
            table.add_row(name, *_agreement(found))
    console.print(table)
    for n, one in result.greedy.divergences.items():
        verdict = result.verdicts[n]
        ours, theirs = (repr(t.text) if t else "the end" for t in (one.plain, one.speculative))
        where = (
            "" if one.position is None else f", token {one.position + 1}: {ours} became {theirs}"
        )
        margin = "" if one.margin is None else f", margin {one.margin:.3g}"
        console.print(
            f"prompt {n + 1}{where}{margin}: {verdict}",
            style="red" if verdict == "wrong" else "yellow",
            markup=False,
        )
    if result.sampling is not None and result.sampling.worst is not None:
        low, high = result.sampling.detectable
        console.print(
            f"sampling: {len(result.sampling.tests)} tests, smallest corrected p "
            f"{result.sampling.worst.corrected:.2g}; distances from {low:.2f} ({high:.2f} for long "
            "outcomes) would be found"
        )
    for note in result.notes:
        console.print(printable(note), style="dim", markup=False)
    console.print(
        printable(result.headline),
        style=f"bold {COLOURS.get(result.verdict, 'yellow')}",
        markup=False,
    )


def _agreement(found: Agreement) -> Iterator[str]:
    low, high = found.interval
    yield f"{found.identical} of {len(found)}"
    yield f"{low:.0%} - {high:.0%}"
    yield f"{found.agreed:,} of {found.tokens:,}"
    drift = summary(found.drifts)
    yield (
        ", ".join(f"{drift[key]:.2g}" for key in ("median", "p99", "max")) if drift else "not told"
    )
