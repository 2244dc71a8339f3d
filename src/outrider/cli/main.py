"""`outrider`: the command line."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from outrider import __version__

app = typer.Typer(
    name="outrider",
    help="Speculative decoding that never changes the answer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Speculative decoding that never changes the answer."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="How the text starts.")] = (
        "On a misty morning, an outrider rode out of Harrow."
    ),
    target: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this at run time, on Python 3.10 too
        typer.Option(help="A Transformers model; the tiny one in the package by default."),
    ] = None,
    draft: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A smaller one with the same tokenizer; else n-grams draft."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 100,
    max_drafts: Annotated[int, typer.Option(min=0, help="K, the most drafts in a step.")] = 5,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the coins.")] = 0,
) -> None:
    """Write a text with a draft and a target model, and show what was accepted and rejected."""
    from outrider.cli.demo import run

    run(prompt, target, draft, max_tokens, max_drafts, temperature, seed)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    profile: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A YAML file that says how to draft; see docs/sglang.md."),
    ] = None,
) -> None:
    """Serve with SGLang and Outrider. All other options are SGLang's: --model-path and so on."""
    from outrider.cli.serve import run

    run(profile, context.args)


class Device(str, Enum):
    """Where kernels run; ROCm's devices are called "cuda" too."""

    cuda = "cuda"
    cpu = "cpu"


@app.command()
def selftest(
    device: Annotated[
        Optional[Device],  # noqa: UP045
        typer.Option(help="cuda, ROCm too, or cpu: Triton's interpreter. A GPU if there is one."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where selftest.json and selftest.html are written.")
    ] = Path("outrider-selftest"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document instead of a table.")
    ] = False,
) -> None:
    """Prove the Triton kernels on this machine, and measure them; see docs/selftest.md."""
    from outrider.selftest.run import run

    run(device.value if device else None, out, quick, json)
