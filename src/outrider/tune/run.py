"""The command `outrider tune`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.syntax import Syntax

from outrider.errors import Unsupported, UsageError
from outrider.redact import hide, redact_args
from outrider.report.console import Exit, Stage, Terminal

if TYPE_CHECKING:
    from outrider.clients import Engine
    from outrider.tune.advice import Advice
    from outrider.tune.search import Search

__all__ = ["Wanted", "run"]

SAVED_FOR_BITS = 0.2
"""Share of the budget that is kept for trying the draft model's weights in other precision."""


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    engine: a running one; or flags: of SGLang, for a server to start
    """

    engine: str | None
    flags: Sequence[str]
    workload: str
    concurrency: int
    minutes: float
    chat: bool
    out: Path


def run(wanted: Wanted, as_json: bool) -> None:
    """Search, and write profile.yaml, tune.json and tune.html."""
    from outrider.bench.measure import workload
    from outrider.tune.search import KS, Search, Traffic, available, grid

    if (wanted.engine is None) == (not wanted.flags):
        raise UsageError(
            "either a running engine or a model to serve",
            fix="name --engine http://host:port, or SGLang's --model-path and so on",
        )
    if wanted.flags and not any(flag.startswith(("--model", "--config")) for flag in wanted.flags):
        raise UsageError(
            f"{' '.join(redact_args(wanted.flags)):.200} without a model to serve",
            fix="add --model-path; options of SGLang's are passed on, all others are `tune --help`",
        )
    console = Terminal(stderr=True)
    texts = workload(wanted.workload, 12 * wanted.concurrency)
    wanted.out.mkdir(parents=True, exist_ok=True)
    traffic = Traffic(texts, wanted.concurrency, wanted.chat)
    budget, bits = 60 * wanted.minutes, _bits(wanted.flags)
    interrupted, tried, search = False, None, None
    try:
        with _opened(wanted, bits, KS[-1], "tune.log", console) as engine:
            facts = engine.facts()
            most = facts.get("speculative_num_steps")
            if most == 0:
                raise Unsupported(f"{engine.spec} allows no drafts", fix="raise its K above 0")
            names, refused = available(engine)
            if not names:
                raise Unsupported(f"no drafter at {engine.spec}: {refused}", fix="serve Outrider")
            share = 1 - SAVED_FOR_BITS if bits and "model" in names else 1.0
            search = Search(engine, traffic, grid(names, most), budget * share)
            _search(search, console)
        if bits and _advice(search, None, None).chosen.drafter in ("model", "adaptive"):
            tried = _other_bits(wanted, search, budget * SAVED_FOR_BITS, console)
    except KeyboardInterrupt:
        interrupted = True
    if search is None or not search.finalists:
        console.print("interrupted before the first trial", style="yellow")
        raise SystemExit(Exit.INTERRUPTED)
    if not any(trial.speed for trial in search.trials):
        console.print(
            "every answer was empty or one token long: there is nothing to time; use other prompts "
            "(--workload), with or without --no-chat",
            style="red",
        )
        raise SystemExit(Exit.UNDECIDED)
    _write(wanted, search, facts, bits, tried, interrupted, as_json, console)
    if interrupted:
        raise SystemExit(Exit.INTERRUPTED)


def _bits(flags: Sequence[str]) -> int | None:
    """Return the bits that a draft model's weights are tried with: few, on CPU."""
    text = " ".join(flags).replace("=", " ")
    has_draft = "--speculative-draft-model-path" in text
    return 4 if has_draft and "--device cpu" in text else None


@contextmanager
def _opened(
    wanted: Wanted, bits: int | None, most: int, log: str, console: Console
) -> Iterator[Engine]:
    from outrider.clients import open_engine
    from outrider.tune.server import serving

    if wanted.engine is not None:
        with console.status("opening the engine"):
            engine = open_engine(wanted.engine)
        yield engine
        engine.close()
        return
    with (
        console.status("starting a server") as status,
        serving(wanted.flags, most, bits, wanted.out / log) as url,
    ):
        status.stop()
        yield open_engine(url)


def _search(search: Search, console: Console) -> None:
    columns = (BarColumn(), TimeElapsedColumn(), Stage())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def begun(rung: int, candidate: Any, spent: float) -> None:
            left = len(search.rungs[-1])
            said = f"rung {rung + 1}, {left} left: {candidate}"
            progress.update(task, completed=min(1.0, spent), description=said)

        for trial in search.run(begun):
            progress.console.print(
                f"rung {trial.rung + 1}: {trial.candidate}: {trial.speed:.2f} tokens/s, "
                f"{trial.times_plain:.2f} times plain",
                style="dim",
                highlight=False,
            )


def _other_bits(
    wanted: Wanted, search: Search, seconds: float, console: Console
) -> tuple[float, float]:
    """Return how the chosen candidate does with few bits, and with the draft model's own weights.

    The latter is tried on a server of its own, with the texts of the last rung.
    """
    from outrider.tune.search import Search

    chosen = _advice(search, None, None).chosen
    first = search.rounds_of(len(search.rungs) - 1)[0]
    with _opened(wanted, None, chosen.max_drafts, "tune-own-weights.log", console) as engine:
        other = Search(engine, search.traffic, [chosen], seconds, first, search.tokens)
        _search(other, console)
    shared = range(first, min(search.next_round, other.next_round))
    return search.score(chosen, rounds=shared), other.score(chosen, rounds=shared)


def _advice(search: Search, bits: int | None, tried: tuple[float, float] | None) -> Advice:
    """Return the profile. tried: the speed with few bits, and with the model's own weights"""
    from outrider.tune.advice import advise

    if bits is None:
        return advise(search)
    if tried is None:
        return advise(search, bits, "as this machine's memory is slow; the own were not tried")
    reason = f"{tried[0]:.2f} times plain; with the draft model's own weights {tried[1]:.2f}"
    return advise(search, bits if tried[0] >= tried[1] else None, reason)


def _write(
    wanted: Wanted,
    search: Search,
    facts: dict[str, Any],
    bits: int | None,
    tried: tuple[float, float] | None,
    interrupted: bool,
    as_json: bool,
    console: Console,
) -> None:
    from outrider import report
    from outrider.tune.advice import about
    from outrider.tune.page import page

    advice, made = _advice(search, bits, tried), report.provenance()
    text = hide(advice.yaml(about(facts, search, wanted.workload, made["date"])))
    document = report.document(
        {
            "outrider_tune": 1,
            "interrupted": interrupted,
            "provenance": made,
            "engine": facts,
            "traffic": {"workload": wanted.workload, "concurrency": wanted.concurrency},
            "minutes": wanted.minutes,
            "profile": advice.values,
            "reasons": advice.reasons,
            "times_plain": round(search.gain(advice.chosen), 4),
            "noise": round(search.noise, 4),
            "draft_bits_tried": tried and {"few": tried[0], "own": tried[1]},
            "max_tokens": search.tokens,
            "trials": [asdict(trial) for trial in search.trials],
        }
    )
    (wanted.out / "profile.yaml").write_text(text, encoding="utf-8")
    (wanted.out / "tune.json").write_text(document, encoding="utf-8")
    subtitle = f"{facts.get('model')}: {wanted.workload}, {wanted.concurrency} at once"
    html = page(search, advice, text, made, subtitle, interrupted)
    (wanted.out / "tune.html").write_text(html, encoding="utf-8")
    if as_json:
        sys.stdout.write(document)
    elif not sys.stdout.isatty():
        sys.stdout.write(text)  # not folded: it may become a file
    else:
        Terminal().print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    different = sum(trial.asked - trial.same for trial in search.trials)
    if different:
        console.print(
            f"{different} of {sum(t.asked for t in search.trials)} answers were not those of plain "
            "decoding: `outrider audit` tells ties from mistakes",
            style="yellow",
        )
    names = ("profile.yaml", "tune.json", "tune.html")
    console.print(", ".join(str(wanted.out / name) for name in names), highlight=False)
