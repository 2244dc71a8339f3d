"""`outrider`: the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional, TypeVar

import typer

from outrider import __version__
from outrider.cli.group import Commands, PassesOn, passed_on
from outrider.errors import UsageError

app = typer.Typer(
    name="outrider",
    cls=Commands,
    help="Speculative decoding that never changes the answer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, too.")
    ] = False,
) -> None:
    """Speculative decoding that never changes the answer.

    Exit codes: 0 good, 1 finding, 2 usage, 3 could not run, 4 undecided, 130 interrupted.
    """


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="How the text starts.")] = (
        "On a misty morning, an outrider rode out of Harrow."
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 48,
    max_drafts: Annotated[int, typer.Option(min=0, help="K, the most drafts in a step.")] = 5,
    temperature: Annotated[float, typer.Option(min=0, callback=_finite, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the coins.")] = 0,
) -> None:
    """Explain a text of the tiny models in the package, and compare it with plain decoding."""
    from outrider.cli.demo import run

    run(prompt, max_tokens, max_drafts, temperature, seed)


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="How the text starts; - reads it from stdin.")],
    target: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this at run time, on Python 3.10 too
        typer.Option(help="A Transformers model; the tiny one in the package by default."),
    ] = None,
    draft: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A smaller one with the same tokenizer."),
    ] = None,
    drafter: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="model, ngram, suffix, adaptive, none; model if there is a draft."),
    ] = None,
    url: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A running SGLang server with Outrider; its key is $OPENAI_API_KEY."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 100,
    max_drafts: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="K, the most drafts in a step; by default 8, or the server's."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, callback=_finite, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the coins.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode again without drafts: bit for bit the same?")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Where explain.json and explain.html are written.")
    ] = Path("outrider-explain"),
    json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document instead of the walk.")
    ] = False,
) -> None:
    """Show one generation step by step: drafted, accepted, rejected; see docs/tools/explain.md."""
    from outrider.explain.recording import ExplainOptions
    from outrider.explain.run import run

    if prompt == "-":
        try:
            prompt = typer.get_binary_stream("stdin").read().decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin is not UTF-8 ({error})", fix="convert it: iconv") from error
    options = ExplainOptions(
        prompt,
        target=target,
        draft=draft,
        drafter=drafter,
        max_tokens=max_tokens,
        max_drafts=max_drafts,
        temperature=temperature,
        seed=seed,
        chat=chat,
        compare=compare,
    )
    run(options, url=url, out=out, as_json=json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    profile: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A YAML file that says how to draft; see docs/sglang-settings.md."),
    ] = None,
) -> None:
    """Serve with SGLang and Outrider. All other options are SGLang's: --model-path and so on."""
    from outrider.cli.serve import run

    _refuse_typos(context)
    run(profile, context.args)


class Device(str, Enum):
    """Where kernels run; ROCm's devices are called "cuda" too."""

    cuda = "cuda"
    cpu = "cpu"


class Dtype(str, Enum):
    """What weights are loaded as."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@app.command()
def draft_server(
    model: Annotated[str, typer.Argument(help="A Transformers model with the target's tokenizer.")],
    socket: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Where hosts find it: a Unix socket that only you can open. "
            "By default outrider/draft.sock in $XDG_RUNTIME_DIR."
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.cpu,
    dtype: Annotated[Dtype, typer.Option(help="Of its weights.")] = Dtype.float32,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Threads of torch on CPU."),
    ] = None,
    width: Annotated[
        int, typer.Option(min=1, max=4096, help="The most nodes that a pass reads.")
    ] = 8,
    fan_out: Annotated[
        int, typer.Option(min=1, max=1024, help="How many tokens may follow a node.")
    ] = 3,
) -> None:
    """Draft ahead, in a process of its own, while targets verify; see docs/ahead.md."""
    from outrider.cli.draft_server import run

    run(model, socket, device.value, dtype.value, threads, width=width, fan_out=fan_out)


@app.command(cls=PassesOn)
def selftest(
    context: typer.Context,
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="With --server: a model, its directory or a Hugging Face name."),
    ] = None,
    draft: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="With --server: a smaller model that drafts; else text is looked up."),
    ] = None,
    server: Annotated[
        bool,
        typer.Option(
            "--server",
            help="Then start bare SGLang and SGLang with Outrider here: same answers? How fast? "
            "What follows -- is for these servers: -- --tp-size 2.",
        ),
    ] = False,
    requests: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="With --server: how many are compared; 200."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --server: do finished parts again.")
    ] = False,
    device: Annotated[
        Optional[Device],  # noqa: UP045
        typer.Option(help="cuda, ROCm too, or cpu: Triton's interpreter. A GPU if there is one."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Where selftest.json and selftest.html are written; server.* too."),
    ] = Path("outrider-selftest"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, shorter answers.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document instead of a table.")
    ] = False,
) -> None:
    """Prove the Triton kernels on this machine, and measure them; see docs/selftest.md."""
    where, flags = device.value if device else None, passed_on(context)
    if server:
        from outrider.trial.plan import Wanted
        from outrider.trial.run import run as run_servers

        if target is None:
            raise UsageError("--server without TARGET", fix="name a model to serve")
        wanted = Wanted(target, draft, requests or 200, quick, where, flags, out, fresh)
        run_servers(wanted, json)
        return
    if target is not None or requests is not None or fresh or flags:
        raise UsageError(
            "TARGET, --requests, --fresh or SGLang's options without --server", fix="add --server"
        )
    from outrider.selftest.run import run

    run(where, out, quick, json)


class DraftBits(str, Enum):
    """Bits of a draft model's weights on CPU."""

    four = "4"
    eight = "8"


@app.command()
def doctor(
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A model: its directory, or a Hugging Face name in the local cache."),
    ] = None,
    draft: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A smaller model that drafts for it; without one, text is looked up."),
    ] = None,
    url: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A running server to ask too; its key is $OPENAI_API_KEY."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many at once.")] = 8,
    context_length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Tokens of a request and its answer; at most 4096 by default."),
    ] = None,
    max_drafts: Annotated[int, typer.Option(min=1, help="K, the most drafts in a step.")] = 4,
    dtype: Annotated[
        Optional[Dtype],  # noqa: UP045
        typer.Option(help="What weights are loaded as; each model's own by default."),
    ] = None,
    draft_bits: Annotated[
        Optional[DraftBits],  # noqa: UP045
        typer.Option(help="The draft's weights in so few bits; on CPU."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Devices that share the models.")] = 1,
    memory_gib: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0.001,
            callback=_finite,
            help="Memory of a device; by default this machine's.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Explain known faults that may concern you, too.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document instead of tables.")
    ] = False,
) -> None:
    """Say whether models, machine and server fit, before anything is loaded."""
    from outrider.doctor.pair import Plan
    from outrider.doctor.run import run

    plan = Plan(
        requests=requests,
        context=context_length,
        dtype=dtype.value if dtype else None,
        tp=tp,
        drafts=max_drafts,
        draft_bits=int(draft_bits.value) if draft_bits else None,
    )
    run(target, draft, url, plan, memory_gib, verbose, json)


@app.command()
def audit(
    plain: Annotated[
        str,
        typer.Argument(
            help="The engine without speculation: http://host:port, transformers:MODEL. Alone, an "
            "Outrider server, or transformers:MODEL#draft=MODEL: compared with itself."
        ),
    ],
    speculative: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="The engine with speculation."),
    ] = None,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A .txt or .jsonl file with a prompt in each line."),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="Without a file: code, edit, chat, prose, json or mixed.")
    ] = "mixed",
    count: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="How many prompts; 24, or all of a file."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each greedy answer.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    samples: Annotated[
        int, typer.Option(min=0, help="Answers to each prompt of the sampling test; 0: none.")
    ] = 200,
    sampling_prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A file of prompts for the sampling test: with many likely answers."),
    ] = None,
    law_prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(hidden=True, help="The old name of --sampling-prompts."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, callback=_finite, help="Of the sampling test.")
    ] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Of the sampling test.")] = 1.0,
    tolerance: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0, callback=_finite, help="The largest margin of a tie, in logprob; else noise's."
        ),
    ] = None,
    min_prompts: Annotated[
        int, typer.Option(min=1, help="Compared prompts without which there is no good verdict.")
    ] = 5,
    min_tokens: Annotated[
        int, typer.Option(min=1, help="The same of tokens; of drafted ones, if the engine tells.")
    ] = 115,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the seeds of the sampling test.")] = 0,
    out: Annotated[Path, typer.Option(help="Where audit.json and audit.html are written.")] = Path(
        "outrider-audit"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document instead of a table.")
    ] = False,
) -> None:
    """Is speculation changing answers? Compare two engines; see docs/tools/audit.md."""
    from outrider.audit.result import Settings
    from outrider.audit.run import run
    from outrider.bench import workloads

    if workload not in workloads.KINDS:
        raise typer.BadParameter(f"workload {workload!r}: choose from {', '.join(workloads.KINDS)}")
    if sampling_prompts and law_prompts:
        raise typer.BadParameter("--law-prompts is the old name of --sampling-prompts: give one")
    try:
        asked = prompts or workloads.prompts(workload, count or 24)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    settings = Settings(
        chat=chat,
        max_tokens=max_tokens,
        concurrency=concurrency,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        tolerance=tolerance,
        seed=seed,
        min_prompts=min_prompts,
        min_tokens=min_tokens,
    )
    run(
        plain,
        speculative,
        asked,
        settings,
        count=count,
        sampling_prompts=sampling_prompts or law_prompts,
        out=out,
        as_json=json,
    )


@app.command()
def bench(
    engines: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            help="Plain first: http://host:port, transformers:MODEL, with #options; "
            "one Outrider server alone is compared with itself without drafts."
        ),
    ] = None,
    workload: Annotated[
        list[str],
        typer.Option(help="code, edit, chat, prose, json, mixed, or a .jsonl or .txt file."),
    ] = ["code", "chat"],  # noqa: B006 - typer's way
    concurrency: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Requests at once, as 1,4,16. By default 1,4; 1 for Transformers' own."),
    ] = None,
    rate: Annotated[str, typer.Option(help="Requests a second, as 0.5,2, too.")] = "",
    max_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often each cell is repeated.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests for each one at once.")] = 3,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = True,
    out: Annotated[Path, typer.Option(help="Where bench.json and bench.html are written.")] = Path(
        "outrider-bench"
    ),
    compare: Annotated[
        Optional[tuple[Path, Path]],  # noqa: UP045
        typer.Option(help="Measure nothing: compare two results, old and new."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document instead of a table.")
    ] = False,
) -> None:
    """Measure speculation against plain decoding, where answers agree; see docs/tools/bench.md."""
    from outrider.bench.run import run, run_compare

    if compare is not None:
        run_compare(*compare, json)
        return
    if not engines:
        raise typer.BadParameter("name an engine: http://host:port or transformers:MODEL")
    run(
        engines,
        workload,
        out,
        json,
        concurrency=_numbers(concurrency, int) if concurrency else None,
        rates=_numbers(rate, float),
        max_tokens=max_tokens,
        rounds=rounds,
        requests=requests,
        chat=chat,
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def tune(
    context: typer.Context,
    engine: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="A running Outrider server, http://host:port, or transformers:MODEL#draft=MODEL; "
            "else a server is started with SGLang's options: --model-path and so on."
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="code, edit, chat, prose, json, mixed, or a .jsonl or .txt file.")
    ] = "mixed",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    minutes: Annotated[
        float, typer.Option(min=0.1, callback=_finite, help="How long to search.")
    ] = 10,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = True,
    out: Annotated[
        Path, typer.Option(help="Where profile.yaml, tune.json and tune.html are written.")
    ] = Path("outrider-tune"),
    json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document instead of the profile.")
    ] = False,
) -> None:
    """Find the settings for this model, machine and traffic; see docs/tools/tune.md."""
    from outrider.tune.run import Wanted, run

    _refuse_typos(context)
    run(Wanted(engine, context.args, workload, concurrency, minutes, chat, out), json)


def _refuse_typos(context: typer.Context) -> None:
    """Refuse what is meant to be passed on to SGLang, but looks like an option of ours."""
    ours = [name for option in context.command.params for name in option.opts]
    for argument in context.args:
        name = argument.partition("=")[0]
        close = get_close_matches(name, ours, 1, 0.8) if name.startswith("--") else []
        if close:
            raise typer.BadParameter(f"No such option: {name}. Did you mean {close[0]}?")


Number = TypeVar("Number", int, float)


def _numbers(text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: write numbers, as 1,4,16") from error
    if not all(0 < number < math.inf for number in found):
        raise typer.BadParameter(f"{text!r}: numbers must be above 0")
    return found
