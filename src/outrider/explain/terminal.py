"""The walk in a terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.explain.label import LONE_BYTES, visible
from outrider.explain.walk import ROOT, Walk, WalkStep, counted

__all__ = ["show"]

STYLES = {
    "accepted": "bold green",
    "rejected": "red strike",
    "unreached": "dim red strike",
    "own": "bold yellow",
}


def show(walk: Walk, console: Console) -> None:
    """Print the steps, the text in colour, and what it adds up to."""
    _Painter(console.color_system is not None).show(walk, console)


class _Painter:
    """Draws in the colours of fates; without colours, what was rejected is ~so~."""

    def __init__(self, colours: bool) -> None:
        self._colours = colours

    def show(self, walk: Walk, console: Console) -> None:
        """Print all of it."""
        console.print(
            Text("accepted", STYLES["accepted"]),
            Text("rejected" if self._colours else "~rejected~", STYLES["rejected"]),
            Text("the target's own", STYLES["own"]),
            sep="  ",
        )
        steps = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
        for _ in range(3):
            steps.add_column(no_wrap=True)
        steps.add_column(no_wrap=True, overflow="ellipsis")
        for step in walk.steps:
            who = Text(visible(step.drafter))  # others' words are no markup
            steps.add_row(f"{step.number:4}", who, step.tally, self.picture(step))
        console.print(steps)
        console.rule("the text")
        story = Text(visible(walk.prompt, lines=True), style="dim")
        for step in walk.steps:
            story.append_text(_line(step, lines=True))
        console.print(story, soft_wrap=False)
        console.rule()
        self._sum(walk, console)

    def picture(self, step: WalkStep) -> Text:
        """Return what a step emitted, and below each token the drafts that stood in its place."""
        lines = [_line(step)]
        ends = [0]  # of the lines below
        for run in _lost_runs(step):
            text = run.text if self._colours else Text.assemble("~", run.text, "~")
            start = run.start if self._colours else max(0, run.start - 1)
            row = next((i for i, end in enumerate(ends) if i and end < start), len(ends))
            if row == len(ends):
                lines.append(Text())
                ends.append(0)
            lines[row].append(" " * (start - ends[row])).append_text(text)
            ends[row] = start + text.cell_len
        return Text("\n").join(lines)

    def _sum(self, walk: Walk, console: Console) -> None:
        totals = walk.totals
        took = f", {walk.seconds:.1f} s" if walk.seconds is not None else ""
        console.print(f"{walk.verdict}{took}")
        if len(walk.steps) > 1:
            spared = f"plain decoding takes {counted(totals.tokens, 'pass', 'es')}"
            console.print(f"{totals.accepted} of {totals.drafted} drafts accepted; {spared}")
            if walk.foreseen:
                console.print(walk.foreseen)
            console.print(walk.counted)
            console.print(walk.equation)
        if walk.plain is not None:
            style = "green" if walk.plain.equal else "red"
            said = f"equal to plain decoding: {walk.plain.same} of {walk.plain.total} tokens"
            console.print(said, style=style)


def _line(step: WalkStep, lines: bool = False) -> Text:
    """Return what a step emitted. lines: whether its line breaks are such."""
    line = Text()
    for token in step.emitted:
        text = visible(token.text, lines) if lines else _seen(token.text)
        line.append(text, STYLES["own" if token.draft is None else "accepted"])
    return line


@dataclass
class _Run:
    """Drafts that follow each other and are no part of the text. start: its column"""

    start: int
    text: Text


def _lost_runs(step: WalkStep) -> list[_Run]:
    """Return them from left to right: each begins where its first draft would have stood."""
    after = {ROOT: 0}  # the column after each draft
    column = 0
    for token in step.emitted:
        column += cell_len(_seen(token.text))
        if token.draft is not None:
            after[token.draft] = column
    runs = []
    for run in step.lost():
        start, text = after[step.drafts[run[0]].parent], Text()
        for i in run:
            one = step.drafts[i]
            text.append(_seen(one.text), STYLES[one.fate])
            after[i] = start + text.cell_len
        spaces = len(text.plain) - len(text.plain.lstrip(" "))
        if spaces < len(text):
            start, text = start + spaces, text[spaces:]
        runs.append(_Run(start, text))
    return sorted(runs, key=lambda run: run.start)


def _seen(text: str) -> str:
    return visible(text) or LONE_BYTES
