"""The commands `outrider explain` and `outrider demo`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from outrider.errors import Unsupported, UsageError
from outrider.explain.recording import Decode, ExplainOptions, OnTokens, Recording
from outrider.explain.terminal import show
from outrider.explain.walk import Walk, make_walk
from outrider.report.console import Exit, Stage, Terminal

__all__ = ["run"]


def run(
    options: ExplainOptions,
    *,
    url: str | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Generate, show the walk, write it. Ends with 1 if plain decoding says otherwise.

    What there was until an interruption is shown.

    url: of a server; without it, models run in this process
    out: a folder for explain.json and explain.html
    """
    console = Terminal(stderr=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    walk = _walk(options, url, console)
    from outrider.report import document

    text = document(walk.as_json())
    if as_json:
        sys.stdout.write(text)
    else:
        show(walk, Terminal())
    if out is not None:
        from outrider.explain.page import page

        (out / "explain.json").write_text(text, encoding="utf-8")
        (out / "explain.html").write_text(page(walk), encoding="utf-8")
        console.print(f"{out / 'explain.json'}, {out / 'explain.html'}", highlight=False)
    if walk.finish_reason == "interrupted":
        raise SystemExit(Exit.INTERRUPTED)
    if walk.plain is not None and not walk.plain.equal:
        raise SystemExit(Exit.FINDING)


def _walk(options: ExplainOptions, url: str | None, console: Console) -> Walk:
    """Return the walk of a generation, with progress shown."""
    from outrider.report import provenance

    columns = (
        Stage(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("tokens", total=options.max_tokens)
        recording, decode = _recorder(options, url)(
            lambda count: progress.update(task, completed=count)
        )
    try:
        return make_walk(recording, decode, provenance())
    except (ValueError, LookupError) as error:
        raise Unsupported(
            str(error), fix="a busy server may have begun the request anew: ask again"
        ) from error


def _recorder(
    options: ExplainOptions, url: str | None
) -> Callable[[OnTokens], tuple[Recording, Decode]]:
    if url is None:
        from outrider.explain import in_process

        return lambda on_tokens: in_process.record(options, on_tokens)
    for given, option, fix in (
        (options.draft, "--draft", "the server has its draft model already"),
        (options.compare, "--compare", "`outrider audit` compares servers"),
    ):
        if given:
            raise UsageError(f"{option} with --url", fix=fix)
    from outrider.explain import server

    return lambda on_tokens: server.record(options, url, on_tokens)
