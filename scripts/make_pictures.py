"""Make the pictures of docs/speculation.md and docs/scaling.md: docs/img/*.svg.

    python scripts/make_pictures.py [folder]

Steps are real ones, of the tiny pair in the package. Times are recorded ones, named where they are
drawn. The rest is arithmetic. Colours are those of the reports, light and dark.
"""

import gzip
import json
import re
import sys
from html import escape
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLOURS = (":root", "@media (prefers-color-scheme: dark)")
PROMPT = "On a misty morning, an outrider rode out of Harrow."


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img"
    for name, make in PICTURES.items():
        (folder / f"{name}.svg").write_text(make(), encoding="utf-8")
        print(folder / f"{name}.svg")


# -- steps of the tiny pair


def chain_steps() -> str:
    """Three steps with a draft model: all accepted, some, none."""
    walk = recorded(max_drafts=5)
    drafted = [step for step in walk.steps if len(step.drafts) >= 4]
    found = [
        next(step for step in drafted if step.accepted == len(step.drafts)),
        next(step for step in drafted if 1 < step.accepted < len(step.drafts) - 1),
        next(step for step in drafted if not step.accepted),
    ]
    notes = (
        "All accepted; the pass adds one token more, the bonus",
        "Accepted as far as the target agrees; then its own token, the recovered one",
        "Nothing accepted: the step has still emitted one token, as plain decoding would",
    )
    return steps_picture(walk, list(zip(found, notes, strict=True)))


def tree_steps() -> str:
    """A step whose drafts branch, and in which a sibling was accepted."""
    walk = recorded(max_drafts=12, siblings=2, min_survival=0.1)

    def beside(step) -> bool:
        """Whether a kept draft is not the first child of its parent."""
        first = {}
        for i, draft in enumerate(step.drafts):
            first.setdefault(draft.parent, i)
        kept = [i for i, draft in enumerate(step.drafts) if draft.fate == "accepted"]
        return any(first[step.drafts[i].parent] != i for i in kept)

    step = max((s for s in walk.steps if beside(s)), key=lambda step: step.accepted)
    note = "The likeliest draft was wrong, and the one beside it right"
    return steps_picture(walk, [(step, note)])


def recorded(max_drafts: int, siblings: int = 0, min_survival: float = 0.0):
    """Return the walk through one generation of the tiny pair, greedy and bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    import outrider
    from outrider.drafters import ModelDrafter
    from outrider.engines.transformers import Runner
    from outrider.explain import make_walk
    from outrider.explain.recording import Recording, StepRecord

    torch.set_num_threads(1)
    disable_progress_bar()
    tiny = files("outrider") / "assets" / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(tiny / "target")
    model, draft = (
        AutoModelForCausalLM.from_pretrained(tiny / which, dtype=torch.float32).eval()
        for which in ("target", "draft")
    )
    drafter = ModelDrafter(Runner(draft), Runner(model).vocab_size, min_survival, siblings)
    ids = tokenizer.encode(PROMPT)
    stream = outrider.stream(
        model,
        ids,
        drafter=drafter,
        max_drafts=max_drafts,
        sampling={"max_tokens": 150},
        exactness="bitwise",
    )
    recording = Recording(PROMPT, ids)
    for event in stream:
        (outcome,) = event.outcomes
        recording.steps.append(
            StepRecord(
                drafter="model",
                drafts=event.proposal.tokens.tolist(),
                parents=event.proposal.parents,
                kept=[row - 1 for row in outcome.rows[1:]],
                emitted=outcome.tokens,
            )
        )
    recording.output_ids = stream.result.outputs[0]
    recording.finish_reason = "length"

    def decode(lists):
        return [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in lists]

    return make_walk(recording, decode, {})


def steps_picture(walk, steps) -> str:
    """Return the pictures of these steps, one below the other, each with a line of words."""
    from outrider.explain.tree import picture

    parts, top, width = [], 0.0, 0.0
    for step, note in steps:
        before = walk.steps[step.number - 1].emitted[-1].text
        svg = picture(step, before)
        wide, high = (float(n) for n in re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
        parts.append(f'<text class="note" x="2" y="{top + 14:.0f}">{escape(note)}</text>')
        parts.append(svg.replace("<svg ", f'<svg x="0" y="{top + 26:.0f}" ', 1))
        top += high + 56
        width = max(width, wide, 7.2 * len(note))
    style = files("outrider.explain").joinpath("explain.css").read_text(encoding="utf-8")
    rules = "\n".join(
        line for line in style.splitlines() if line.startswith((".tree", ".n-", ".e-", *COLOURS))
    )
    note = ".note { fill: var(--dim); font: 13px system-ui, sans-serif; }"
    return standalone("\n".join(parts), width, top - 20, f"{rules}\n{note}")


# -- times and arithmetic


def speedup_curves() -> str:
    """Speed-up against acceptance, by the equation alone."""
    import numpy as np

    from outrider.report import plots

    figure, axes = plots.new_figure(6.4, 3.6)
    chance = np.linspace(0.02, 0.98, 97)
    for drafts, variable in ((2, "--host"), (4, "--ours"), (8, "--good")):
        tokens = (1 - chance ** (drafts + 1)) / (1 - chance)
        for cost, style in ((0.0, "-"), (0.2, "--")):
            line = axes.plot(chance, tokens / (1 + drafts * cost), style, lw=1.8)[0]
            line.set_color(plots.colour(variable))
        axes.text(0.985, tokens[-1], f"K = {drafts}", va="center")
    axes.axhline(1, color=plots.colour("--torch"), lw=1)
    axes.set_xlim(0, 1.1)
    axes.set_ylim(0, 8.5)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_xlabel("chance of each draft to be accepted, given those before it")
    axes.set_ylabel("times plain decoding")
    axes.text(0.02, 6.2, "solid: drafts are free\ndashed: each costs 0.2 of a step", va="top")
    title = "Tokens per step / (step time / decode time), if verifying costs what decoding does"
    return plot(plots.svg(figure, axes, title, "speedup"))


def staircase() -> str:
    """Seconds of a pass against its rows: recorded, and as control has learnt it."""
    from outrider.control.curve import Curve
    from outrider.report import plots

    traces = ROOT / "tests" / "control" / "traces.json.gz"
    record = json.loads(gzip.decompress(traces.read_bytes()))
    times = {int(rows): seconds for rows, seconds in record["times"]["verify"].items()}
    curve = Curve()
    for rows, seconds in times.items():
        for _ in range(20):
            curve.observe(rows, seconds)
    figure, axes = plots.new_figure(6.4, 3.4)
    seen = [1e3 * seconds for seconds in times.values()]
    axes.plot([*times], seen, "o", ms=4, color=plots.colour("--torch"))
    table = 1e3 * curve.table(max(times))
    axes.step(range(1, len(table)), table[1:], where="mid", lw=1.8, color=plots.colour("--ours"))
    axes.set_xlim(0, 66)
    axes.set_ylim(0, 640)
    axes.set_xlabel("rows of a pass: last tokens and drafts of all requests")
    axes.set_ylabel("milliseconds")
    axes.text(33, 190, "points: medians of recorded passes\nline: what control believes", va="top")
    title = "A pass of Qwen2.5-Coder 1.5B in SGLang, on two CPU cores"
    return plot(plots.svg(figure, axes, title, "staircase"))


# -- how it is built

LAYERS = (
    ("cli", "doctor  explain  audit  bench  tune  trial", "report"),
    ("clients", "", ""),
    ("engines", "sglang   transformers   simulated", ""),
    ("serving", "the served step", ""),
    ("control", "which drafter, how many drafts", ""),
    ("drafters", "ngram  suffix  model  heads  ahead", "checkpoint"),
    ("kernels", "references and Triton", "selftest"),
    ("core", "the theory", ""),
)
"""The packages from top to bottom: a name, what is in it, and what stands beside it."""


def packages() -> str:
    """The packages: each imports what stands below it."""
    parts = []
    for row, (name, inside, beside) in enumerate(LAYERS):
        top, width = 4 + 40 * row, 470 if beside else 590
        parts.append(box(4, top, width, 32, name, inside))
        if beside:
            parts.append(box(484, top, 110, 32, beside))
    return standalone("\n".join(parts), 598, 4 + 40 * len(LAYERS), BOXES)


BOXES = """
.box { fill: none; stroke: var(--dim); }
.busy { fill: var(--ours); fill-opacity: 0.25; stroke: var(--ours); }
.name { fill: var(--text); font: 600 13px system-ui, sans-serif; }
.inside { fill: var(--dim); font: 13px system-ui, sans-serif; }
.arrow { stroke: var(--dim); fill: none; }
"""


def box(x: float, y: float, width: float, height: float, name: str, inside: str = "") -> str:
    """Return a box with a name, and what is in it."""
    kind = "box"
    text = f'<text class="name" x="{x + 8}" y="{y + 21}">{escape(name)}</text>'
    if inside:
        text += f'<text class="inside" x="{x + 88}" y="{y + 21}">{escape(inside)}</text>'
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>{text}'


CPU_LINE = (
    (0, 70, "launch 1"), (74, 90, "meanwhile"), (204, 70, "settle 0"), (278, 70, "launch 2"),
    (352, 90, "meanwhile"), (484, 70, "settle 1"), (704, 70, "settle 2"), (778, 70, "look up"),
    (852, 70, "launch 3"), (926, 90, "meanwhile"),
)  # fmt: skip
DEVICE_LINE = ((0, 200, "step 0"), (204, 276, "step 1"), (484, 216, "step 2"), (926, 90, "step 3"))
"""From where to where, and what is done: steps 1 and 2 are launched early, step 3 is informed."""


def served_step() -> str:
    """The served step in time, on two lines."""
    parts = []
    for top, line, name in ((28, CPU_LINE, "CPU"), (88, DEVICE_LINE, "device")):
        parts.append(f'<text class="name" x="2" y="{top + 21}">{name}</text>')
        for x, width, what in line:
            kind = "busy" if name == "device" else "box"
            place = f'x="{60 + x}" y="{top}" width="{width}" height="32" rx="4"'
            parts.append(f'<rect class="{kind}" {place}/>')
            parts.append(f'<text class="inside" x="{66 + x}" y="{top + 21}">{what}</text>')
    notes = ((60, "launched early: the device never waits"), (764, "informed: the device waits"))
    parts += [f'<text class="inside" x="{x}" y="16">{note}</text>' for x, note in notes]
    return standalone("\n".join(parts), 1080, 130, BOXES)


# -- files


def plot(svg: str) -> str:
    """Return a plot of `outrider.report` as a file of its own."""
    _, _, wide, high = re.search(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', svg).groups()
    rule = "text { font-family: system-ui, sans-serif !important; }"
    return standalone(svg, float(wide), float(high), rule)


def standalone(svg: str, width: float, height: float, rules: str) -> str:
    """Return a file that knows its colours: an image follows its page's scheme, light or dark."""
    page = files("outrider.report").joinpath("page.css").read_text(encoding="utf-8")
    colours = page[: page.index("* { box-sizing")].strip()
    svg = re.sub(r'\s+xmlns="[^"]+"', "", svg)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">\n'
        f"<style>\n{colours}\nsvg {{ color: var(--text); }}\n{rules}\n</style>\n{svg}\n</svg>\n"
    )


PICTURES = {
    "chain_steps": chain_steps,
    "tree_steps": tree_steps,
    "speedup": speedup_curves,
    "staircase": staircase,
    "packages": packages,
    "served_step": served_step,
}

if __name__ == "__main__":
    main()
