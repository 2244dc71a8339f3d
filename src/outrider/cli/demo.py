"""The first thing to try: a real pair of models, and every draft in colour."""

from __future__ import annotations

import os
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

ACCEPTED, REJECTED, OWN = "bold green", "red strike", "bold yellow"


def run(
    prompt: str,
    target: Path | None,
    draft: Path | None,
    max_tokens: int,
    max_drafts: int,
    temperature: float,
    seed: int,
) -> None:
    """Generate step by step, show each, and compare with plain decoding."""
    console = Console()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with console.status("loading torch and transformers"):
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging
    except ImportError as error:
        console.print(f"[red]{error}[/]: pip install 'outrider\\[transformers]'")
        raise SystemExit(1) from error
    logging.disable_progress_bar()
    import outrider

    def load(path: Path) -> Any:
        dtype = torch.float32 if target is None else torch.bfloat16
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    with as_file(files("outrider") / "assets" / "tiny") as tiny, console.status("loading models"):
        if target is None:
            torch.set_num_threads(1)  # the models are tiny
            target, draft = tiny / "target", draft or tiny / "draft"
            model, drafter = load(tiny / "target"), load(draft)
        else:
            model, drafter = load(target), load(draft) if draft else "ngram"
        tokenizer = AutoTokenizer.from_pretrained(target)

    ids = tokenizer.encode(prompt)
    options: dict[str, Any] = {
        "sampling": {"temperature": temperature, "seed": seed, "max_tokens": max_tokens},
        "exactness": "bitwise",
    }
    started = time.perf_counter()
    stream = outrider.stream(model, ids, drafter=drafter, max_drafts=max_drafts, **options)
    legend = Text.assemble(
        ("accepted", ACCEPTED), "  ", ("rejected", REJECTED), "  ", ("the target's own", OWN)
    )
    console.print(legend)
    steps = Table(box=None, show_header=False, padding=(0, 1))
    story = Text(prompt, style="dim")
    for number, event in enumerate(stream):
        (outcome,) = event.outcomes
        drafts = event.proposal.tokens.tolist()
        kept = outcome.num_accepted_drafts
        line = Text()
        line.append(tokenizer.decode(drafts[:kept]), ACCEPTED)
        line.append(tokenizer.decode(outcome.tokens[kept:]), OWN)
        rejected = Text(tokenizer.decode(drafts[kept:]), REJECTED)
        story.append_text(line)
        for text in (line, rejected):
            text.plain = text.plain.replace("\n", "⏎")
        steps.add_row(f"{number:4}", f"{kept}/{len(drafts)}", line, rejected)
    took = time.perf_counter() - started
    console.print(steps)
    console.rule("the text")
    console.print(story)

    with console.status("decoding again without drafts, to compare"):
        plain = outrider.generate(model, ids, drafter="none", **options)
    result, stats = stream.result, stream.result.stats
    same = sum(a == b for a, b in zip(plain.outputs[0], result.outputs[0], strict=False))
    total = len(plain.outputs[0])
    console.rule()
    console.print(
        f"{len(result.outputs[0])} tokens in {stats.steps + 1} passes of the target, {took:.1f} s"
    )
    console.print(
        f"{stats.accepted} of {stats.drafted} drafts accepted: "
        f"{stats.accept_length:.2f} tokens a pass"
    )
    equal = same == total == len(result.outputs[0])
    colour = "green" if equal else "red"
    console.print(f"[{colour}]equal to plain decoding: {same} of {total} tokens[/]")
    if not equal:
        raise SystemExit(1)
