"""Makes docs/sglang-support.md from what the tests test.

python tests/engines/sglang/support_matrix.py > docs/sglang-support.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import tiny_models
import workload

from outrider.engines.sglang.arguments import flags

HEAD = """# What works in SGLang

Made from the tests by `python tests/engines/sglang/support_matrix.py`; a test compares the two. All
of it was run on CPU with SGLang's unmodified wheels, of the versions that a table says. Both have
the same worker. Nothing here was run on a GPU yet.
"""


def versions(files: str) -> str:
    """Return the versions of SGLang that these test files are run with: see `.ci/run`."""
    stages = (Path(__file__).parents[3] / ".ci" / "run").read_text()

    def listed(name: str) -> set[str]:
        return {*stages.partition(f"{name}=(")[2].partition(")")[0].split()}

    names = {"test_parity.py"} if files == "all of them" else {*files.split(", ")}
    found = ["0.5.11"] if not names <= listed("sglang_skips") else []
    found += ["0.5.23"] if names <= listed("sglang23_tests") else []
    return ", ".join(found)


FORMS = {
    "plain": "`/generate`",
    "logprobs": "`/generate` with logprobs: input, output, top 3, given ids",
    "stream": "`/generate`, streamed",
    "n": "`/generate` with `n=2`",
    "chat": "`/v1/chat/completions`, streamed, with usage",
    "completions": "`/v1/completions` with logprobs",
    "processor": "custom logit processor that looks at the output so far",
}
SAME = "the same ids, text, finish reason and counts as bare SGLang"
TRAFFIC = {
    "concurrency 1 to 16, shared prefixes (radix cache), chunked prefill": "test_parity.py",
    "retraction (cache too small), clients that hang up and come again": "test_parity.py",
    "no slot lost: SGLang's strict idle check": "test_parity.py, test_faults.py",
    "tensor parallelism (`--tp-size 2`), data parallelism (`--dp-size 2`)": "test_parallel.py",
    "drafts by a model (SGLang's own `TpModelWorker`) and by n-grams": "all of them",
    "drafts by heads (EAGLE-3, MTP, DFlash), chains, trees, several in a server": "test_heads.py",
    "attention backends `torch_native` and `outrider`": "test_parity.py",
    "attention backend `outrider` as Triton kernels, in the interpreter": "test_triton.py",
    "SGLang's own speculation on ROCm, repaired (`OUTRIDER_REPAIR`)": "test_rocm.py",
    "`return_hidden_states`": "test_requests.py",
    "streams in chunks of a fixed size, answers without acceptance": "test_side_channel.py",
    "records of each step (`explain`)": "test_explain.py",
    "several tokenizer workers (`--tokenizer-worker-num 2`)": "test_front_door.py",
    "requests that generate nothing (`max_new_tokens: 0`), with logprobs": "test_front_door.py",
    "`/update_weights_from_tensor`, `/update_weights_from_disk`": "test_front_door.py",
    "unseeded sampling (temperature, top-k, top-p, min-p): the distribution, by chi-square": (
        "test_distribution.py"
    ),
}
NOT_SERVED = (
    (
        "pipeline parallelism",
        "SGLang itself refuses it with any speculation: `server_args.py:6786`",
        "drafts would have to be at the first stage before the last one has sampled",
    ),
    (
        "DP attention",
        "ranks whose passes differ in rows run in step, padded for SGLang's own algorithms only",
        "tell all ranks the rows of each pass before its launch, idle ones too",
    ),
    (
        "disaggregation",
        "the cache is sent by RDMA or between GPUs",
        "the decode server sees no prompt pass: its draft model and heads would read prompts anew",
    ),
    (
        "hierarchical cache",
        "copies are kernels for a GPU: `mem_cache/memory_pool_host.py:47`",
        "what a draft model and heads keep in a slot is not copied: it must be marked as unread",
    ),
    (
        "windows in a cache of their own (gpt-oss, Llama 4, Gemma 4)",
        "gpt-oss asks for attention backends of GPUs: `server_args.py:1911`",
        "free what left the window before slots are reserved; our own attention lacks sinks and "
        "the second table of slots",
    ),
    (
        "MLA with `--attention-backend outrider`",
        "SGLang's other backends without AMX read prompts with keys that the cache does not have, "
        "outside the deterministic mode: `attention_backend_handler.py:164`",
        "rows are decode rows, which any MLA backend of SGLang takes; our own kernels have no tile "
        "for 576 dimensions",
    ),
    (
        "LoRA adapters",
        "memory is pinned, which asks for a GPU: `lora/lora.py:427`; the test leaves that out",
        "served in 0.5.23: each row has its request's adapter. No draft model beside them. "
        "0.5.11 allows adapters with NGRAM only: `server_args.py:7003`",
    ),
    (
        "quantized targets (FP8, INT8)",
        "needs AMX: `layers/quantization/fp8.py:466`, `w8a8_int8.py:162`",
        "served, with the kernels of plain decoding; whether those give a row the same bits beside "
        "others is for `outrider audit` to find",
    ),
    (
        "8-bit cache (`--kv-cache-dtype fp8_e4m3`)",
        "0.5.23 asks for AMX: `mem_cache/kv_cache_configurator.py:463`",
        "served: rows are written and read as in plain decoding",
    ),
    (
        "images and audio",
        "not tried",
        "a row needs its request's offset of positions (M-RoPE), and prompts are more than tokens",
    ),
)
"""What does not run here: what, why not on CPU (lines are 0.5.11's), and what a GPU takes."""

REQUESTS = {
    "`custom_params.outrider` that is not `{max_drafts, drafter, explain}`": (
        "says what is wrong with it"
    ),
    "a drafter that the server does not have": "names those it has",
    "`min_p` with `--enable-deterministic-inference`": "SGLang's seeded sampler lacks it",
    "`explain` where the profile says `report_acceptance: false`": "it would tell",
    "a number that is not finite or out of range, half of a surrogate pair, an unknown parameter": (
        "it would raise in the scheduler, and stop the server for all"
    ),
    "a list that is not as long as the list of prompts, a field of another type": "the same",
    "`n` above 4,096, or more than 65,536 answers to one call": "each has a place in the queue",
    "`stop_regex` with repeats within repeats, several without bounds, or one in a long answer": (
        "Python tries every way to match, after every step; bound the repeats: `\\s{0,8}`"
    ),
    "a grammar with more than 200 brackets within each other, or more than 4,000 levels by way of "
    "its definitions or rules": "its compiler recurses",
    "a grammar with a null character": "SGLang 0.5.11's compiler ends the process at some",
    "a value of more than 32 lists and mappings within each other": (
        "what sends it to the scheduler recurses"
    ),
    "a `logit_bias` beyond 1e10, a `repetition_penalty` below 1e-10": (
        "a temperature makes infinities of them, and the sampler raises"
    ),
    "a prompt without tokens: an empty text, where the tokenizer begins with no token of its own": (
        "the scheduler would stop at it"
    ),
    "`session_params` with `replace` and no `rid`": "the scheduler would stop at it",
    "`input_embeds`": (
        "drafts come from tokens; beside a request with tokens they stop SGLang's scheduler"
    ),
    "`custom_labels` that the server was not started with": "the metrics would raise",
    "`lora_id`, `http_worker_ipc`, `encoder_urls` and others that SGLang sets itself": (
        "they steer what is between its processes"
    ),
    "`beam_width` above 1 (0.5.23)": "SGLang refuses it beside any speculation",
    "`return_sampling_mask` (0.5.23)": "SGLang refuses it beside any algorithm but its DFLASH",
    "`/set_internal_state` with `speculative_accept_threshold_single` or `_acc`": (
        "Outrider accepts no draft that plain decoding would not emit"
    ),
}
FALLBACKS = {
    "`error`, `timeout`, `garbage`": "a drafter raised, took too long, or returned no drafts",
    "`resting`": "a drafter that failed is left alone for a while",
    "`device`": "drafts could not be made on the device: from then on the host makes them",
    "`prefill`": "the draft model could not read a prompt",
    "`catching_up`": (
        "the draft model reads what it missed of a request, at most 512 tokens a step; not a fault"
    ),
    "`grammar`": "a grammar backend that cannot go back (xgrammar can)",
    "`rows`": (
        "more rows than a pass may have: fewer drafts for each request, or none "
        "([limits](sglang-settings.md#how-many-rows-a-pass-may-have))"
    ),
    "`slots`": "the KV pool is nearly full: each request holds what plain decoding holds",
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def shown(params: dict) -> str:
    return ", ".join(f"`{key}`" for key in params) or "defaults"


def page() -> str:
    """Return the page."""
    kinds = [
        *((name, params, "greedy") for name, params in workload.GREEDY.items()),
        *((name, params, "seeded") for name, params in workload.SEEDED.items()),
        *((name, params, "seeded") for name, params in workload.FILTERED.items()),
    ]
    parts = [HEAD, f"## Compared with bare SGLang: {SAME}\n"]
    parts.append(
        table(
            ("kind", "parameters", "compared", "SGLang"),
            [
                (name, shown(params), f"{compared}, `test_parity.py`", versions("test_parity.py"))
                for name, params, compared in kinds
            ],
        )
    )
    parts.append("Each of these in every form:\n")
    parts.append(table(("form",), [(FORMS[form],) for form in dict.fromkeys(workload.FORMS)]))
    parts.append("## Compared with K = 0 on the same server\n")
    parts.append(
        "Bare SGLang on CPU cannot do these: a grammar ends its scheduler with `RuntimeError: "
        "Unsupported device: cpu`.\n"
    )
    parts.append(
        table(
            ("kind", "parameters", "compared", "SGLang"),
            [
                (name, shown(params), "`test_requests.py`", versions("test_requests.py"))
                for name, params in workload.GRAMMAR.items()
            ],
        )
    )
    parts.append("## Models and flags\n")
    parts.append(
        "Compared with bare SGLang in its deterministic mode, token for token, on tiny models of "
        "these architectures with random weights. With pages, drafts are chains: a tree's slots "
        "change places, and those of a page must not.\n"
    )
    files = "test_coverage.py"
    rows = [
        (
            case.what,
            f"`{files}`",
            ", ".join(one for one in versions(files).split(", ") if one >= case.since),
        )
        for case in tiny_models.CASES.values()
    ]
    parts.append(table(("what", "tested in", "SGLang"), rows))
    parts.append("## Under traffic\n")
    rows = [(what, f"`{files}`", versions(files)) for what, files in TRAFFIC.items()]
    parts.append(table(("what", "tested in", "SGLang"), rows))
    parts.append("## Refused when the server starts\n")
    fixes: dict[str, list[str]] = {}
    for refusal in flags.REFUSED:
        fixes.setdefault(refusal.fix, []).append(refusal.what)
    rows = [(", ".join(what), fix) for fix, what in fixes.items()]
    parts.append(table(("asked for", "instead"), rows))
    names = ", ".join(refusal.what for refusal in flags.WITH_DRAFT_MODEL)
    parts.append(f"Without a draft model, or with a head in its place: {names}.\n")
    parts.append(
        "Also models with sliding-window layers in a cache of their own, state-space layers, an "
        "encoder, multimodal input or n-gram embeddings; a draft model with another tokenizer; and "
        "any other version of SGLang. On 0.5.11 `--disable-overlap-schedule` and LoRA, on 0.5.23 "
        "`OUTRIDER_REPAIR`.\n"
    )
    parts.append("### What keeps the rest from running\n")
    parts.append("Found by reading SGLang; lines are those of 0.5.11.\n")
    parts.append(table(("what", "on CPU", "on a GPU"), list(NOT_SERVED)))
    parts.append("## Refused with 400\n")
    parts.append(table(("request", "why"), list(REQUESTS.items())))
    parts.append("## Served without drafts, and counted\n")
    parts.append("`outrider:fallbacks_total{reason=...}`:\n")
    parts.append(table(("reason", "when"), list(FALLBACKS.items())))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
