"""The same answers as bare SGLang for other models than Llama, and with other flags.

Each case is asked requests of every kind, greedy and seeded, alone and beside others, in a cache
that is too small for all of them. Drafts must be accepted.
"""

from __future__ import annotations

import dataclasses

import parity
import pytest
import tiny_models
from outrider_test_site import no_repeat_processor
from server import unused_models

from outrider.engines.sglang.plugin import installed_hooks

DRAFTERS = {"ngram": {"min_n": 1}, "suffix": {"min_vote": 0.0}, "adaptive": {}}
TIGHT = [
    *parity.COMMON,
    *("--max-total-tokens", "512", "--max-running-requests", "12", "--enable-metrics"),
    *("--schedule-conservativeness", "0.05", "--chunked-prefill-size", "64"),
]


def environment_of(case):
    """Return the environment of a server. All cases read the same model files: one fork server."""
    needed = {file for each in tiny_models.CASES.values() for file in each.files}
    unused = {*unused_models().split(",")} - needed
    # on CPU, SGLang 0.5.11 has no other way to allocate pages than its Triton kernels
    found = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(unused)), "TRITON_INTERPRET": "1"}
    return {**found, "OUTRIDER_TEST_UNPINNED": "1"} if case.adapters else found


def with_adapters(wishes, names):
    """Let each request that can say so choose an adapter or none, one after the other."""
    chosen = []
    for i, wish in enumerate(wishes):
        name = [None, *names][i % (len(names) + 1)]
        body = {**wish.body, "lora_path": name} if wish.path == "/generate" else wish.body
        chosen.append(dataclasses.replace(wish, body=body))
    return chosen


@pytest.mark.parametrize("name", tiny_models.CASES)
def test_the_answers_are_those_of_bare_sglang(name, launch, tmp_path, record_property):
    case = tiny_models.CASES[name]
    if case.since > installed_hooks().version.contract.VERSION:
        pytest.skip(f"SGLang {case.since} is the first that has it")
    model = tiny_models.make(case.model_type, tmp_path / "model")
    environment, mode = environment_of(case), [*parity.DETERMINISTIC, *case.flags]
    adapters = [f"adapter{i}" for i in range(case.adapters)]
    for i, adapter in enumerate(adapters):
        path = tiny_models.make_adapter(model, tmp_path / adapter, i)
        mode += [*([] if i else ["--lora-paths"]), f"{adapter}={path}"]
    bare = launch(f"{name}-bare", model, *parity.BARE, *mode, **environment)
    drafters = DRAFTERS
    if case.draft is not None:
        drafters = {**DRAFTERS, "model": {"min_survival": 0.0}}
        mode += ["--speculative-draft-model-path", str(case.draft)]
    environment |= parity.profile(tmp_path, drafters, max_drafts=6)
    ours = launch(name, model, *TIGHT, *parity.OUTRIDER, *mode, **environment)
    phases = parity.seeded_phases("stories260k", 36, 32, no_repeat_processor())
    phases = [with_adapters(phase, adapters) for phase in phases]
    with bare, ours:
        comparison = parity.compare_seeded(bare, ours, phases, (1, 12), drafters)
        counters = ours.metrics().items()
        body = {"text": "The dog", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        bodies = [{**body, "lora_path": adapter} for adapter in adapters] + [body]
        texts = {ours.ask("/generate", one)["text"] for one in bodies}
        assert len(texts) == len(bodies), "adapters change what is said"
    comparison.conclude(0.0)
    record_property("tokens compared", comparison.tokens)
    for drafter in ("ngram", "suffix"):
        key = "outrider:accepted_draft_tokens_total"
        assert sum(v for k, v in counters if key in k and f'"{drafter}"' in k) > 0, drafter
