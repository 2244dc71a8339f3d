"""Write the tables of README.md and docs/ from benchmarks/results/, and check figures in sentences.

    python scripts/figures.py          # fill the tables, and list sentences that are out of date
    python scripts/figures.py --check  # change nothing; exit 1 if anything is out of date

A table that follows `<!-- figures: name -->` is made by the function of that name below. A sentence
with measured figures stands in SENTENCES as it should read today: it must be in its page, whatever
its line breaks. Every other number with a decimal point in these pages is listed in STATED.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "SECURITY.md",
    *(
        f"docs/{name}.md"
        for name in (
            "guarantee",
            "control",
            "heads",
            "ahead",
            "scaling",
            "kernels",
            "paced",
            "tuning",
            "comparison",
            "sglang",
            "sglang-settings",
            "sglang-internals",
            "sglang-findings",
            "transformers",
        )
    ),
]
NEW = "paced_sglang_0_5_23"
NAMES = {"edit": "code edit", "json": "JSON extraction"}
Row = list[str]

_TABLE = re.compile(r"(?<=<!-- figures: )(\w+)( -->\n)((?:\|[^\n]*\n)*)")
_FENCED = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
# no measurements: versions, names of models, code, addresses, tables that are filled
_NAMED = re.compile(
    r"\d+\.\d+\.\d[\w.]*|(?:Transformers|Triton|Python|Llama|Apache|arXiv|vLLM|CUDA)[- ][\d.]*\d"
    r"|(?:EAGLE|GLM|SpecForge|speculators)[- ][\d.]*\d"
    r"|Qwen[\d.]+|Llama-[\d.]+|\d\.\d+[BM]\b|`[^`]*`|\]\([^)]*\)"
)
_DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")


@cache
def result(name: str) -> dict[str, Any]:
    """Return one file of benchmarks/results/."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    return found


def two(value: float) -> str:
    return f"{value:.2f}"


def spread(value: dict[str, float]) -> str:
    """Return a median, with the smallest and largest where there were several rounds."""
    if value["min"] == value["max"]:
        return two(value["median"])
    return "{median:.2f} ({min:.2f}-{max:.2f})".format(**value)


# -- tables: a header and its rows


def adaptive_cells() -> Iterator[Row]:
    """Adaptive beside bare SGLang, our backend without drafts, and fixed choices."""
    yield [
        *("text", "B", "bare, tokens/s", "plain, our backend", "best fixed", "x bare", "tiers"),
        *("adaptive", "adaptive / best fixed", "adaptive / plain, our backend"),
    ]
    for c in result("adaptive_sglang")["cells"]:
        times = ("best_fixed_times_bare", "adaptive_times_bare", "adaptive_times_best_fixed")
        fixed, adaptive, ratio = (spread(c[key]) for key in times)
        plain = spread(c["methods"]["plain"]["times_bare"])
        speed = f"{c['bare_tokens_per_second']['median']:.1f}"
        tiers = two(c["tiers_times_bare"]["median"])
        yield [
            *(c["kind"], str(c["batch"]), speed, plain, c["best_fixed"], fixed, tiers),
            *(adaptive, ratio, two(same_backend(c["kind"], c["batch"]))),
        ]


def heads() -> Iterator[Row]:
    """Tokens a step and acceptance by depth, of heads and others."""
    yield from _accepted(result("heads"))


def heads_domain() -> Iterator[Row]:
    """Tokens a step of a head for a real model on narrow text, and of lookups."""
    yield from _accepted(result("heads_domain"))


def _accepted(found: dict[str, Any]) -> Iterator[Row]:
    depths = [f"at {depth}" for depth in range(1, found["max_drafts"] + 1)]
    yield ["drafter", "sampling", "tokens a step", *depths]
    for run in found["runs"]:
        row = [run["drafter"], run["sampling"], two(run["tokens_per_step"])]
        yield [*row, *map(two, run["accepted_at"][: found["max_drafts"]])]


def heads_paced() -> Iterator[Row]:
    """Heads on the paced device beside others, times bare SGLang."""
    cells = result("heads_paced")["cells"]
    names = [name for name in cells[0]["contenders"] if name != "bare"]
    yield ["B", *(f"`{name}`" for name in names)]
    for cell in cells:
        own = [cell["contenders"][name] for name in names]
        said = [f"{spread(one['times_bare'])}, {two(one['times_bare_ideal'])}" for one in own]
        yield [str(cell["batch"]), *said]


def heads_sglang() -> Iterator[Row]:
    """A head for a real model on the real CPU server beside lookups, times bare SGLang."""
    cells = result("heads_sglang")["cells"]
    names = list(cells[0]["times_bare"])
    yield ["B", "bare SGLang, tokens/s", *(f"`{name}`" for name in names)]
    for cell in cells:
        said = [spread(cell["times_bare"][name]) for name in names]
        yield [str(cell["batch"]), spread(cell["bare_tokens_per_second"]), *said]


def pool() -> Iterator[Row]:
    """Control over a pool of drafters, and each of them alone, times plain decoding."""
    cells = result("pool")["cells"]
    names = [name for name in cells[0]["times_plain"] if name != "plain"]
    yield ["text", "B", *(f"`{name}`" for name in names)]
    for cell in cells:
        yield [
            cell["kind"],
            str(cell["batch"]),
            *(two(cell["times_plain"][name]) for name in names),
        ]


def ahead_counted() -> Iterator[Row]:
    """Drafting ahead beside ordinary speculation, by counted time."""
    yield from _ahead("counted")


def ahead_paced() -> Iterator[Row]:
    """The same in real servers on paced devices."""
    yield from _ahead("paced")


def _ahead(part: str) -> Iterator[Row]:
    yield ["text", "B", "plain", "ordinary (K)", "ahead", "ahead / ordinary", "hits"]
    for cell in result("ahead")[part]["cells"]:
        ordinary = f"{cell['ordinary']:.0f} ({cell['ordinary_drafts']})"
        speeds = [f"{cell['plain']:.0f}", ordinary, f"{cell['ahead']:.0f}"]
        yield [
            cell["kind"],
            str(cell["batch"]),
            *speeds,
            two(cell["ratio"]),
            f"{cell['hit_rate']:.0%}".replace("%", " %"),
        ]


def ahead_real() -> Iterator[Row]:
    """Drafting ahead with real processes on two cores, tokens a second."""
    measured = result("ahead")["real"]
    kinds = list(next(iter(measured["speeds"].values())))
    yield ["", *kinds]
    for name, speeds in measured["speeds"].items():
        yield [name, *(spread(speeds[kind]) for kind in kinds)]


def ahead_coins() -> Iterator[Row]:
    """How often the next token was foreseen, with the target's coins and with others."""
    cells = result("ahead")["coins"]["cells"]
    found = {(c["temperature"], c["shared_coins"], c["fan_out"]): c["foreseen"] for c in cells}
    sizes = sorted({c["fan_out"] for c in cells})
    yield ["temperature", "random numbers", *map(str, sizes)]
    for temperature, shared in dict.fromkeys((t, s) for t, s, _ in found):
        who = "the target's" if shared else "others"
        shown = [two(found[temperature, shared, size]) for size in sizes]
        yield [f"{temperature:g}", "none" if temperature == 0 else who, *shown]


def regimes() -> Iterator[Row]:
    """How fast adaptive follows a change of traffic."""
    yield ["phase", "settles at, tokens/s", "steps to 90 % of that", "seconds"]
    for phase in result("regimes_sglang")["phases"]:
        speed, seconds = phase["settled_tokens_per_second"], phase["seconds_to_adapt"]
        yield [phase["name"], f"{speed:.1f}", str(phase["steps_to_adapt"]), f"{seconds:.1f}"]


def deciding() -> Iterator[Row]:
    """Host time of drafters and control for a request and step."""
    yield ["requests", "context", "suffix", "ngram", "adaptive: suffix, and control"]
    found = {(f["requests"], f["context"], f["drafter"]): f for f in result("deciding")["figures"]}
    for requests, context in sorted({key[:2] for key in found}):
        times = (found[requests, context, name] for name in ("suffix", "ngram", "adaptive"))
        medians = (f"{f['step_us']['median']:.0f}" for f in times)
        yield [str(requests), f"{context:,}", *medians]


def speed_transformers() -> Iterator[Row]:
    """Tokens a second beside Transformers' own generation."""
    labels = {
        "transformers plain": "Transformers {transformers}, plain",
        "transformers assisted": "Transformers, assisted",
        "transformers prompt lookup": "Transformers, prompt lookup",
        "outrider ngram": 'Outrider, `drafter="ngram"`',
        "outrider model": "Outrider, `drafter=draft`",
        "outrider model int8": "Outrider, `drafter=outrider.quantized_copy(draft, 8)`",
    }
    kinds = ("code", "chat", "prose")
    measured = result("speed_transformers")
    versions = {"transformers": measured["provenance"]["versions"]["transformers"][:4]}
    found = {(row["method"], row["kind"]): row for row in measured["summary"]}
    yield ["tokens/s", *kinds]
    for method, label in labels.items():
        speeds = (found[method, kind]["tokens_per_second"]["median"] for kind in kinds)
        yield [label.format(**versions), *(f"{speed:.1f}" for speed in speeds)]
    ratios = (found["outrider model int8", kind]["times_best_of_transformers"] for kind in kinds)
    last = "the last row / the best of Transformers, within a round"
    yield [last, *("{median:.2f} ({min:.2f}-{max:.2f})".format(**ratio) for ratio in ratios)]


def paced_by_batch_0_5_23() -> Iterator[Row]:
    """Adaptive without a draft model on the paced device, SGLang 0.5.23."""
    return _paced_by_batch(("mixed", "edit", "code", "json", "chat", "prose"), "`adaptive`")


def paced_with_model_0_5_23() -> Iterator[Row]:
    """The same with a draft model."""
    kinds = ("mixed", "edit", "code", "json", "chat", "prose")
    return _paced_by_batch(kinds, "with a draft model", "adaptive + model")


def _paced_by_batch(
    kinds: tuple[str, ...], corner: str, contender: str = "adaptive"
) -> Iterator[Row]:
    sizes = [1, 4, 16, 64, 256]
    yield [corner, *by_batch_header(sizes)]
    for kind in kinds:
        cells = (paced(kind, size, contender, NEW) for size in sizes)
        times = (c and two(c["times_overlap"]["median"]) for c in cells)
        yield [NAMES.get(kind, kind), *(value or "" for value in times)]


def paced_cells() -> Iterator[Row]:
    """All contenders on the paced device, times bare SGLang with (and without) overlap."""
    shown = {
        "none": "`none`",
        "suffix 4": "`suffix` K = 4",
        "adaptive": "`adaptive`",
        "adaptive + model": "`adaptive` with a draft model",
    }
    *others, last = shown.values()
    yield ["text", "B", *others, "tokens a step", "idle ms", last]
    for c in result("paced_sglang")["cells"]:
        found = (c["contenders"].get(name) for name in shown)
        times = (
            f and f"{two(f['times_overlap']['median'])} ({two(f['times_no_overlap']['median'])})"
            for f in found
        )
        *rest, model = (value or "" for value in times)
        own = c["contenders"]["adaptive"]
        idle = f"{own['idle_ms_median']:.1f}"
        yield [c["kind"], str(c["batch"]), *rest, two(own["tokens_per_step"]), idle, model]


def paced_context() -> Iterator[Row]:
    """Adaptive on the paced device by context: our attention backend and SGLang's."""
    names = ("own backend", "stock backend, rows", "stock backend, auto")
    headers = ("`outrider` backend", "SGLang's, `rows`", "SGLang's, `auto`")
    yield ["text", "B", "context", *headers]
    for c in result("paced_context")["cells"]:
        times = (spread(c["by"][name]["times_bare"]) for name in names)
        yield [c["kind"], str(c["batch"]), f"{c['context']:,}", *times]


def paced_parts() -> Iterator[Row]:
    """Milliseconds of a step by part, before and after steps became one array program."""
    before = {"adaptive": ["3.7", "9.7", "42-53"], "none": ["4.5-5.2", "7-8", "17-18"]}
    sizes = [1, 64, 256]
    yield ["", *by_batch_header(sizes)]
    found = {(p["contender"], p["batch"]): p for p in result("paced_sglang_parts")["parts"]}
    for name in ("adaptive", "none"):
        yield [f"`{name}`, before: all host work", *before[name]]
        parts = ("scheduler", "draft", "verify", "host")
        cells = (" / ".join(f"{found[name, size][p]:.1f}" for p in parts) for size in sizes)
        yield [f"`{name}`, after: {' / '.join(parts)}", *cells]


def _device_work(show: Callable[[dict[str, Any]], str]) -> Iterator[Row]:
    """A line for each contender of the paced device's work, a column for each batch."""
    cells = {(c["contender"], c["batch"]): c for c in result("paced_device_work")["cells"]}
    sizes = list(dict.fromkeys(size for _, size in cells))
    yield ["", *by_batch_header(sizes)]
    for name in dict.fromkeys(name for name, _ in cells):
        yield [f"`{name}`", *(show(cells[name, size]) for size in sizes)]


def paced_device_work() -> Iterator[Row]:
    """Milliseconds of a step's work between passes: excused, and charged."""

    def show(cell: dict[str, Any]) -> str:
        parts = (cell["all"][f] / 1000 for f in ("real_us", "launching_us", "device_us"))
        return "{:.1f} -> {:.2f} + {:.2f}".format(*parts)

    return _device_work(show)


def paced_device_steps() -> Iterator[Row]:
    """Milliseconds of a step beyond its pass, with the device's work as the CPU's and priced."""

    def show(cell: dict[str, Any]) -> str:
        steps = cell["step_ms_as_cpu_work"], cell["step_ms"]
        return " -> ".join(f"{step - cell['pass_ms']:.1f}" for step in steps)

    return _device_work(show)


def paced_device_parts() -> Iterator[Row]:
    """The same by part at B = 64: milliseconds excused, and launches."""
    cells = {c["contender"]: c for c in result("paced_device_work")["cells"] if c["batch"] == 64}
    yield ["", *(f"`{name}`" for name in cells)]
    for part in dict.fromkeys(part for cell in cells.values() for part in cell["parts"]):
        found = (cell["parts"].get(part) for cell in cells.values())
        shown = (f and f"{f['real_us'] / 1000:.2f}, {f['launches']:.0f}" for f in found)
        yield [part, *(each or "" for each in shown)]


def kernels_static() -> Iterator[Row]:
    """What the machine code of our kernels and SGLang's says."""
    columns = {
        "registers": "registers", "scratch": "scratch", "LDS": "local", "waves": "waves",
        "instr/key": "instructions", "bytes/key": "bytes_loaded", "cycles/key": "cycles",
    }  # fmt: skip
    yield ["GPU", "D", "work", *columns]
    rows = {(row["target"], row["variant"]): row for row in result("kernels_static")["figures"]}
    for target in ("gfx942", "gfx950", "sm_80", "sm_90"):
        for dim in (64, 96, 128, 256):
            pairs = {
                "decode": (f"paged D{dim} rows16", f"SGLang decode D{dim}"),
                "verify": (f"paged D{dim} rows64", f"SGLang verify D{dim}"),
                "prefill": (
                    f"prefill D{dim} rows{64 if dim <= 128 else 32}", f"SGLang extend D{dim}",
                ),
            }  # fmt: skip
            for work, names in pairs.items():
                both = [rows[target, name] for name in names]
                cells = (" / ".join(_static(row[key]) for row in both) for key in columns.values())
                yield [target, str(dim), work, *cells]


def _static(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def sanitizer() -> Iterator[Row]:
    """After how many answers the KV sanitizer finds each planted fault, and false alarms."""
    versions = result("sanitizer")["versions"]
    found = list(versions.values())
    yield ["planted fault", *(f"SGLang {version}" for version in versions)]
    for fault in found[0]["planted"]:
        counts = [one["planted"][fault]["requests"] for one in found]
        yield [fault, *(f"after {n} answers" if n else "in the first answer" for n in counts)]
    for name, title in (("bare", "none, SGLang alone"), ("ours", "none, with Outrider")):
        alarms = [one["alarms"][name] for one in found]
        yield [title, *(f"{one['violations']} in {one['requests']:,} requests" for one in alarms)]


def soak() -> Iterator[Row]:
    """What a long run of mixed traffic amid faults found."""
    runs = [result("soak_sglang"), result("soak_sglang_0_5_11")]

    def row(name: str, value: Callable[[dict[str, Any]], str]) -> Row:
        return [name, *(value(run) for run in runs)]

    def share(run: dict[str, Any], *drafters: str) -> str:
        accepted, drafts = run["accepted_drafts"], run["drafts"]
        chosen = drafters or tuple(drafts)
        right = sum(accepted.get(one, 0) for one in chosen)
        return f"{right / sum(drafts[one] for one in chosen):.0%}"

    def servers(run: dict[str, Any], word: str) -> str:
        asked = run["requests_by_server"]
        return f"{sum(n for mode, n in asked.items() if word in mode):,}"

    def memory(run: dict[str, Any]) -> str:
        megabytes = [sample["rss_mb"] for sample in run["samples"]]
        return f"{min(megabytes):.0f} to {max(megabytes):.0f}"

    yield row("", lambda run: f"SGLang {run['sglang']}")
    yield row("requests", lambda run: f"{run['requests']:,}")
    yield row("distinct, beside conversations", lambda run: f"{run['distinct']:,}")
    yield row("turns of conversations", lambda run: f"{run['conversation_turns']:,}")
    yield row("in the default mode", lambda run: servers(run, "default"))
    yield row("with the KV sanitizer", lambda run: servers(run, "sanitizer"))
    yield row("answers compared", lambda run: f"{run['compared']:,} ({run['tokens']:,} tokens)")
    for name in ("wrong", "lost"):
        yield row(f"**{name} answers**", lambda run, name=name: str(run[name]))
    yield row("**cache slots leaked**", lambda run: str(run["leaked_slots"]))
    yield row("drafts accepted", share)
    for name in ("suffix", "eagle3", "ahead", "model"):
        yield row(f"of `{name}`", lambda run, name=name: share(run, name))
    yield row("steps with drafts of the device", lambda run: f"{run['device_steps']:,}")
    yield row("retractions from a full cache", lambda run: f"{run['retractions']:,}")
    for name in ("hung up", "timed out", "refused"):
        yield row(f"clients: {name}", lambda run, name=name: f"{run['clients'][name]:,}")
    yield row("troubles, of 13 kinds", lambda run: f"{sum(run['troubles'].values()):,}")
    yield row("memory of the scheduler after a round, MB", memory)


def fuzz() -> Iterator[Row]:
    """Hostile input by door, and what broke."""
    found, counts = result("fuzz"), ("inputs", "crashes", "hangs", "heavy")
    seconds, megabytes = found["limit_seconds"], found["limit_megabytes"]
    yield ["door", "inputs", "crashes", f"over {seconds:g} s", f"over {megabytes} MB"]
    for name, door in found["doors"].items():
        yield [f"`{name}`", *(f"{door[key]:,}" for key in counts)]
    yield ["all", *(f"{found[key]:,}" for key in counts)]


def side_channel() -> Iterator[Row]:
    """How often an observer guesses the prompt, by way to serve and by what is looked at."""
    ways = result("side_channel")["ways"]
    features = list(ways["open"])
    yield ["way to serve", *features]
    for name, found in ways.items():
        cells = (found[feature] for feature in features)
        yield [
            f"`{name}`",
            *(
                f"{cell['accuracy']:.0%} ({cell['interval'][0]:.0%}-{cell['interval'][1]:.0%})"
                for cell in cells
            ),
        ]


def compatibility() -> Iterator[Row]:
    """What CI installs, and what it runs there: from requirements/ and .ci/run."""
    ci = (ROOT / ".ci/run").read_text()
    pythons = re.search(r"for version in ([\d. ]+);", ci)
    assert pythons
    yield ["", "version", "what runs on it", "stage of `.ci/run`"]
    yield ["Python", pythons[1].strip().replace(" ", ", "), "the wheel", "`versions`"]
    yield ["", "3.11", "everything else", "all"]
    yield ["torch", pin("torch", "ci"), "everything", "all"]
    parity = "servers beside bare SGLang: parity, requests, later turns, faults, parallelism"
    for package, name, file, what, stages in (
        ("transformers", "Transformers", "ci", "all tests of the host", "`fast`, `models`"),
        ("transformers", "", "transformers-lowest", "generation, README's example", "`versions`"),
        ("sglang", "SGLang", "sglang23-cpu", parity, "`sglang23`"),
        (
            "sglang",
            "",
            "sglang-cpu",
            "parity, requests, later turns, kernels, memory, metrics, tools",
            "`sglang`",
        ),
        ("sglang", "", "sglang18-cpu", "OUTRIDER is refused, bare is unchanged", "`sglang23`"),
        ("triton", "Triton", "ci", "kernels in the interpreter, and compiled", "`kernels`"),
    ):
        yield [name, pin(package, file), what, stages]


def pin(package: str, file: str) -> str:
    """Return the version of a package that a file of requirements/ installs."""
    text = (ROOT / "requirements" / f"{file}.txt").read_text()
    found = re.search(rf"\b{package}==([\w.]+)", text)
    assert found, f"{package} in {file}.txt"
    return found[1]


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    make.__name__: make
    for make in (
        adaptive_cells, regimes, deciding, speed_transformers, paced_by_batch_0_5_23,
        paced_with_model_0_5_23, paced_cells, paced_context, paced_parts,
        paced_device_work, paced_device_parts, paced_device_steps,
        kernels_static, compatibility, heads, heads_domain, heads_paced, heads_sglang, pool,
        ahead_counted, ahead_paced, ahead_real, ahead_coins, sanitizer, soak, fuzz, side_channel,
    )
}  # fmt: skip


def by_batch_header(sizes: list[int]) -> Row:
    return [f"B = {sizes[0]}", *map(str, sizes[1:])]


def table(name: str) -> str:
    """Return a table as Markdown."""
    header, *rows = TABLES[name]()
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(page: str) -> str:
    """Return a page with its marked tables as they should be."""
    return _TABLE.sub(lambda match: match[1] + match[2] + table(match[1]), page)


# -- figures in sentences


def cell(kind: str, batch: int) -> dict[str, Any] | None:
    """Return a cell of adaptive_sglang.json."""
    cells = result("adaptive_sglang")["cells"]
    return next((c for c in cells if (c["kind"], c["batch"]) == (kind, batch)), None)


def in_round_0(kind: str, batch: int, method: str) -> float:
    """Return the speed of a method in round 0 of adaptive_sglang.json, which has all methods."""
    runs = result("adaptive_sglang")["runs"]
    wanted = (kind, batch, method, 0)
    found = (r for r in runs if (r["kind"], r["batch"], r["method"], r["round"]) == wanted)
    return float(next(found)["tokens_per_second"])


def same_backend(kind: str, batch: int) -> float:
    """Return adaptive / plain decoding, both through our backend."""
    return in_round_0(kind, batch, "adaptive") / in_round_0(kind, batch, "plain")


def paced(kind: str, batch: int, contender: str, name: str = "paced_sglang") -> Any:
    """Return what a contender did in a cell on the paced device."""
    cells = result(name)["cells"]
    found = (c for c in cells if (c["kind"], c["batch"]) == (kind, batch))
    return next((c["contenders"][contender] for c in found), None)


def sentences() -> dict[str, list[str]]:
    """Return, for each page, sentences (or pieces of them) as they should read."""
    cells = result("adaptive_sglang")["cells"]
    bare = {(c["kind"], c["batch"]): c["adaptive_times_bare"] for c in cells}
    fixed = {(c["kind"], c["batch"]): c["adaptive_times_best_fixed"]["median"] for c in cells}
    plain = [c["methods"]["plain"]["times_bare"]["median"] for c in cells]
    same = {key: same_backend(*key) for key in bare}
    least = min(bare, key=lambda key: bare[key]["median"])
    below = sorted((key for key in same if same[key] < 1), key=same.__getitem__)
    backend = f"{two(min(plain))} to {two(max(plain))}"
    backend_mean = two(geometric_mean(plain))
    tiers = [c["tiers_times_bare"]["median"] for c in cells]

    def mean_of_fixed(batch: int, without: str = "") -> str:
        own = (v for (kind, b), v in fixed.items() if b == batch and kind != without)
        return two(geometric_mean(own))

    *means, last_mean = (mean_of_fixed(batch) for batch in (1, 2, 4, 8, 16))
    over_tiers = [in_round_0(*key, "adaptive") / in_round_0(*key, "tiers") for key in bare]
    within = sum(v >= 0.97 for v in fixed.values())

    regret = result("regret")
    hardest = min(regret["cells"], key=lambda c: c["of_oracle"])
    large = [c["of_oracle"] for c in regret["cells"] if c["batch"] == 16]
    above = sum(c["of_best_fixed"] > 1 for c in regret["cells"])
    replayed = {(c["kind"], c["batch"]): c["of_best_fixed"] for c in regret["cells"]}
    short = [key for key, value in fixed.items() if value < 0.97]
    slow = max(result("deciding")["figures"], key=lambda f: f.get("slowest_step_ms", 0))
    static = {(f["target"], f["variant"]): f["cycles"] for f in result("kernels_static")["figures"]}
    same_text = {"assisted": 0, "prompt lookup": 0, "model int8": 0}
    for row in result("speed_transformers")["summary"]:
        method = row["method"].partition(" ")[2]
        if method in same_text:
            same_text[method] += int(row["same_tokens_as_transformers_plain"].partition("/")[0])
    same_tokens, heads_parity = result("same_tokens"), result("heads_parity")
    curve = result("heads")["learning_curve"]["points"]
    edit, paced_edit = paced("edit", 1, "adaptive"), paced("edit", 1, "adaptive", NEW)
    best = {key: two(bare[key]["median"]) for key in bare}
    return {
        "README.md": [
            f"has {same_tokens['tokens_compared']:,} tokens of the Qwen pair above: "
            f"{same_tokens['tokens_different']} differ",
        ],
        "docs/transformers.md": [
            f"in {same_text['model int8']} of 12 runs (Transformers' assisted: "
            f"{same_text['assisted']} of 12, prompt lookup: {same_text['prompt lookup']} of 12)",
        ],
        "docs/control.md": [
            f"the lowest cell is {best[least]} {place(least)}",
            f"were at {two(bare['chat', 16]['min'])} (chat) and "
            f"{two(bare['json', 16]['min'])} (JSON)",
            f"falls to {two(min(tiers))}",
            f"below 1 in {len(below)} of {len(cells)} cells, "
            + " and ".join(f"{two(same[key])} {place(key)}" for key in below),
            f"within 3 % in {within} of {len(cells)} cells",
            f"over texts is {', '.join(means)} and {last_mean} of it for B = 1 to 16",
            f"the mean at B = 1 is {mean_of_fixed(1, 'edit')}",
            f"JSON at B = 16 ({two(fixed['json', 16])}) and 4 ({two(fixed['json', 4])}), "
            f"code at B = 8 ({two(fixed['code', 8])}), edit at B = 16 ({two(fixed['edit', 16])})",
            f"adaptive is at {two(min(replayed[key] for key in short))} of the best fixed choice "
            "or above",
            f"in round 0: {two(geometric_mean(over_tiers))} times as fast (geometric mean), "
            f"ahead in {sum(v > 1 for v in over_tiers)} of {len(cells)} cells",
            f"was at {backend} of bare SGLang, {backend_mean} on average",
            f"Over {len(regret['cells'])} cells adaptive reaches "
            f"{two(regret['of_oracle']['mean'])} of the oracle's speed on average, and at least "
            f"{two(regret['of_oracle']['lowest'])} {place((hardest['kind'], hardest['batch']))}",
            f"At B = 16 adaptive reaches {two(sum(large) / len(large))}. "
            f"It is at least at {two(regret['lowest_of_best_fixed'])} of the best fixed choice, "
            f"and above it in {above} of {len(regret['cells'])} cells",
            f"took {slow['slowest_step_ms']:.0f} ms ({slow['requests']} requests of "
            f"{slow['context']:,} tokens; their hash tables grew in that step), the median one "
            f"{slow['step_us']['median'] * slow['requests'] / 1e3:.1f} ms",
        ],
        "docs/scaling.md": [
            f"gave {best['edit', 1]} times plain speed on code edits and {best['prose', 1]} on "
            "prose",
        ],
        "docs/tuning.md": [
            f"above the best fixed choice or within 3 % of it in {within} of {len(cells)} cells",
        ],
        "docs/comparison.md": [
            f"came out of {same_text['assisted']} of 12 assisted runs, "
            f"{same_text['prompt lookup']} of 12 prompt lookups, and "
            f"{same_text['model int8']} of 12 of ours",
            f"it reaches {two(regret['of_oracle']['mean'])} of an oracle",
        ],
        "docs/kernels.md": [
            f"({two(static['gfx942', 'SGLang extend D64'])} against "
            f"{two(static['gfx942', 'prefill D64 rows64'])})",
        ],
        "docs/heads.md": [
            f"compares {heads_parity['tokens_compared']:,} tokens with plain decoding's "
            f'(`exactness="bitwise"`): {heads_parity["tokens_different"]} differ',
            f"{two(curve[0]['tokens_per_step'])} tokens a step after "
            f"{curve[0]['trained_tokens']:,} tokens of training, and "
            f"{two(curve[-1]['tokens_per_step'])} after {curve[-1]['trained_tokens']:,}",
        ],
        "docs/paced.md": [
            f"up to {edit['times_overlap']['median']:.1f} times as fast (edits)",
            f"edits at B = 1 reach {two(edit['share_of_ideal'])} of the ideal",
            f"{edit['times_overlap']['median']:.1f} times bare SGLang, not 4",
            f"edits at B = 1 are {paced_edit['times_overlap']['median']:.1f} times as fast, "
            f"{two(paced_edit['share_of_ideal'])} of the ideal",
        ],
    }


def place(key: tuple[str, int]) -> str:
    return f"({key[0]}, B = {key[1]})"


STATED = {
    "docs/ahead.md": ["1.4", "1.25", "2.1", "18.2", "3.2", "13.0"],
    "README.md": [],
    "docs/heads.md": ["1.5"],  # a temperature
    "docs/scaling.md": ["5.9", "1.2", "2.1"],  # SpecDecode-Bench's fit
    "docs/comparison.md": ["0.1"],  # our version
    "docs/paced.md": [
        *("0.2",),  # the busy loop
        # published costs, and what was derived from them
        *("5.9", "2.1", "1.2", "24.0", "3.0", "41.5", "6.3", "6.7", "10.4", "20.1", "4.1", "4.3"),
        *("6.5", "12.4", "20.5", "13.0", "14.2", "15.6", "46.2", "18.9", "22.5", "27.8", "38.8"),
        *("25.6", "51.2", "102.4", "7.2", "11.3", "16.7", "27.4", "0.5", "0.44", "9.2", "18.3"),
        *("2.50",),  # the clock of the processor
        *("0.0", "3.4", "0.85", "1.15", "1.6", "1.00", "1.5"),  # rounded from the tables beside
        *("0.64", "3.25", "0.65", "0.85"),  # of a worker that is gone
        *("1.5", "2.5", "3.35", "5.3"),  # prices of the device's work
    ],
}
"""Numbers with a decimal point that are no results of ours, or repeat a table beside them."""


def unmet(name: str, page: str) -> list[str]:
    """Return what is wrong with the figures in a page's sentences."""
    prose = " ".join(_NAMED.sub("", _FENCED.sub("", _TABLE.sub(r"\1\2", page))).split())
    wrong = []
    for sentence in sentences().get(name, ()):
        piece = " ".join(_NAMED.sub("", sentence).split())
        if piece not in prose:
            wrong.append(f"{name} should say: {sentence}")
        prose = prose.replace(piece, "")
    for number in _DECIMAL.findall(prose):
        if number not in STATED.get(name, ()):
            wrong.append(f"{name}: where does {number} come from?")
    return wrong


def main() -> None:
    wrong = []
    for name in PAGES:
        page = (ROOT / name).read_text()
        new = filled(page)
        if new != page and "--check" in sys.argv:
            wrong.append(f"{name}: a table is out of date")
        elif new != page:
            (ROOT / name).write_text(new)
            print(f"{name}: filled")
        wrong += unmet(name, new)
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
