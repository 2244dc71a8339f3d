"""What a request can ask for, and what it is told; grammars, which bare SGLang lacks on CPU."""

from __future__ import annotations

import json
import re

import pytest
import workload
from server import accepted, histogram, proposed

MODEL = "stories260k"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--enable-metrics"),
    *("--enable-deterministic-inference", "--speculative-algorithm", "OUTRIDER"),
    *("--speculative-num-steps", "4", "--constrained-json-disable-any-whitespace"),
    "--enable-return-hidden-states",
]


@pytest.fixture(scope="module")
def server(launch, model_dir, noisy, profile):
    model = model_dir(MODEL)
    draft = ["--speculative-draft-model-path", str(noisy(model))]
    drafters = {"ngram": {"min_n": 1}}  # they find something in every text
    environment = profile(drafter="model", drafters=drafters)
    return launch("requests", model, *FLAGS, *draft, **environment).wait()


def body(text, wishes=None, **params):
    params = {"temperature": 0, "max_new_tokens": 32, **params}
    if wishes is not None:
        params["custom_params"] = {"outrider": wishes}
    return {"text": text, "sampling_params": params}


TEXT = workload.OPENINGS[0]


def test_a_request_can_opt_out(server):
    meta = server.ask("/generate", body(TEXT, {"max_drafts": 0}))["meta_info"]
    assert (proposed(meta), accepted(meta)) == (0, 0)
    assert meta["spec_verify_ct"] == meta["completion_tokens"] - 1
    none = server.ask("/generate", body(TEXT, {"drafter": "none"}))["meta_info"]
    assert proposed(none) == 0


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_request_can_cap_its_drafts(most, server):
    meta = server.ask("/generate", body(TEXT, {"max_drafts": most}))["meta_info"]
    assert 0 < proposed(meta) <= most * meta["spec_verify_ct"]
    assert len(histogram(meta)) <= most + 1


def test_logprobs_of_named_tokens_beside_others(server):
    """Prompts that are read together: 0.5.11 alone ends its scheduler, in two ways."""
    plain = {**body(TEXT), "return_logprob": True, "logprob_start_len": 0}
    named = {**plain, "token_ids_logprob": [1, 13, 29]}
    alone = [server.ask("/generate", one) for one in (plain, named)]
    server.settle_down()  # empties the cache: with its prompt cached, nothing would be read
    together = server.ask_all([("/generate", one) for one in [plain, named] * 6], 12)
    assert [workload.logprobs(one) for one in together] == [*map(workload.logprobs, alone)] * 6


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_sglangs_own_fields_are_true(drafter, server):
    before = server.metrics()
    meta = server.ask("/generate", body(TEXT, {"drafter": drafter}))["meta_info"]
    after = server.metrics()

    def new(name):
        key = f"outrider:{name}_total"
        return after.get(key, 0) - before.get(key, 0)

    assert new("draft_tokens") == proposed(meta) > 0
    assert new("accepted_draft_tokens") == accepted(meta)
    assert new("accepted_at") == accepted(meta)
    assert new("verify_steps") == meta["spec_verify_ct"]
    assert new("emitted_tokens") == meta["completion_tokens"] - 1
    assert new("verify_rows") == meta["spec_verify_ct"] + proposed(meta)
    assert sum(histogram(meta)) == meta["spec_verify_ct"]
    assert sum(i * n for i, n in enumerate(histogram(meta))) == accepted(meta)
    assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]
    rate = accepted(meta) / proposed(meta)
    assert meta["spec_accept_rate"] == pytest.approx(rate)


def test_over_openais_api(server):
    for path, what in (("/v1/completions", {"prompt": TEXT}),):
        wish = {"model": "default", "max_tokens": 16, "temperature": 0, **what}
        plain = server.ask(path, {**wish, "custom_params": {"outrider": {"max_drafts": 0}}})
        drafted = server.ask(path, {**wish, "custom_params": {"outrider": {"max_drafts": 4}}})
        assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
        refused = server.post(path, {**wish, "custom_params": {"outrider": {"max_drafts": "4"}}})
        assert refused.status_code == 400
        assert "max_drafts" in refused.text


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"custom_params": {"outrider": {"max_drafts": -1}}}, "max_drafts"),
        ({"custom_params": {"outrider": {"drafter": "oracle"}}}, "ngram"),
        ({"min_p": 0.1, "temperature": 1.0}, "min_p"),
    ],
)
def test_refused_with_400(params, said, server):
    answer = server.post("/generate", {"text": TEXT, "sampling_params": params})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", workload.GRAMMAR)
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_grammar(kind, drafter, server):
    """Drafts on or off: the same text, and it obeys. (Bare SGLang on CPU: "Unsupported device".)"""
    wishes = []
    for seed, text in enumerate(workload.OPENINGS):
        params = {**workload.GRAMMAR[kind], "sampling_seed": seed}
        wishes += [(text, {"max_drafts": k, "drafter": drafter}, params) for k in (0, 4)]
    answers = server.ask_all([("/generate", body(t, w, **p)) for t, w, p in wishes], 6)
    for plain, drafted in zip(answers[::2], answers[1::2], strict=True):
        assert workload.essence(plain) == workload.essence(drafted)
        if drafted["meta_info"]["finish_reason"]["type"] == "stop":
            assert obeys(kind, drafted["text"])
    assert any(proposed(a["meta_info"]) for a in answers[1::2])
    assert any(a["meta_info"]["finish_reason"]["type"] == "stop" for a in answers)


def obeys(kind, text):
    if kind.startswith("json"):
        found = json.loads(text)
        return isinstance(found["name"], str) and 1 <= found["age"] <= 99
    if kind == "regex":
        return re.fullmatch(workload.GRAMMAR[kind]["regex"], text)
    return re.fullmatch(r"(yes|no)(, (yes|no)){3,9}\.", text)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_hidden_states_are_those_of_plain_decoding(drafter, server):
    answers = []
    for k in (0, 4):
        wish = body(TEXT, {"max_drafts": k, "drafter": drafter}, max_new_tokens=24)
        answers.append(server.ask("/generate", {**wish, "return_hidden_states": True}))
    assert [proposed(a["meta_info"]) > 0 for a in answers] == [False, True]
    plain, drafted = (a["meta_info"]["hidden_states"] for a in answers)
    assert len(plain) == len(drafted) == 24
    assert plain[1:] == drafted[1:]
    # of the prompt, only what was not cached is given: its last token always is
    assert plain[0][-1] == drafted[0][-1]
