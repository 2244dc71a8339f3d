"""Whatever goes wrong around drafting costs speed only: no wrong token, no lost request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import workload
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server import accepted, proposed

MODEL = "stories260k"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--enable-metrics"),
    *("--speculative-algorithm", "OUTRIDER"),
]
BROKEN = {
    "raising": "error",
    "hanging": "timeout",
    "out_of_range": "garbage",
    "floats": "garbage",
}


def body(text, max_drafts=None, drafter=None, tokens=24, **params):
    wishes = {"max_drafts": max_drafts, "drafter": drafter}
    wishes = {k: v for k, v in wishes.items() if v is not None}
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
    return {"text": text, "sampling_params": {**params, "custom_params": {"outrider": wishes}}}


@pytest.fixture(scope="module")
def plain(server):
    """What plain decoding answers: the same server, without drafts."""
    return {
        text: server.ask("/generate", body(text, max_drafts=0))["output_ids"]
        for text in workload.OPENINGS
    }


@pytest.fixture(scope="module")
def server(launch, model_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    drafters = "".join(f"  {name}: {{}}\n" for name in [*BROKEN, "wrong", "writing"])
    path.write_text(f"drafter: ngram\ndraft_timeout: 0.5\ndrafters:\n{drafters}")
    return launch("faults", model_dir(MODEL), *FLAGS, OUTRIDER_CONFIG=str(path)).wait()


@pytest.mark.parametrize("drafter", BROKEN)
def test_broken_drafter(drafter, server, plain):
    before = server.metrics()
    wishes = [("/generate", body(t, drafter=drafter)) for t in workload.OPENINGS]
    for concurrency in (1, 6):
        answers = server.ask_all(wishes, concurrency)
        assert [a["output_ids"] for a in answers] == list(plain.values())
    key = f'reason="{BROKEN[drafter]}"'
    assert counted(server.metrics(), key) > counted(before, key)
    server.settle_down()


def counted(metrics, key):
    return sum(v for k, v in metrics.items() if k.startswith("outrider:fallbacks") and key in k)


def test_drafts_that_are_never_right(server, plain):
    answers = server.ask_all(
        [("/generate", body(t, drafter="wrong")) for t in workload.OPENINGS], 6
    )
    assert [a["output_ids"] for a in answers] == list(plain.values())
    assert all(proposed(a["meta_info"]) > 20 for a in answers)
    assert all(a["meta_info"]["spec_accept_rate"] < 0.1 for a in answers)


def test_a_drafter_that_writes_into_its_requests(server, plain):
    wishes = [("/generate", body(t, drafter="writing")) for t in workload.OPENINGS]
    for concurrency in (1, 6):
        answers = server.ask_all(wishes, concurrency)
        assert [a["output_ids"] for a in answers] == list(plain.values())


def test_storm_of_aborts(server, plain):
    """200 requests in flight are given up, while others must be answered as ever."""

    def give_up(i):
        text = workload.OPENINGS[i % len(workload.OPENINGS)]
        server.cancel("/generate", body(text, tokens=60), after=i % 7)

    with ThreadPoolExecutor(32) as pool:
        aborts = [pool.submit(give_up, i) for i in range(200)]
        answers = server.ask_all([("/generate", body(t)) for t in workload.OPENINGS], 6)
        for abort in aborts:
            abort.result()
    assert [a["output_ids"] for a in answers] == list(plain.values())
    server.settle_down()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
sensible = st.fixed_dictionaries(
    {},
    optional={
        "max_drafts": st.integers(-3, 100) | json_values,
        "drafter": st.sampled_from(["ngram", "none", "NGRAM", "", "model"]) | json_values,
        "temperature": json_values,
    },
)


def test_malformed_custom_params(server, plain):
    """1,000 random wishes: each is granted, with the right answer, or refused with 400."""
    text, expected = next(iter(plain.items()))
    seen = {200: 0, 400: 0}

    @settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(sensible | json_values)
    def ask(wishes):
        params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        params["custom_params"] = {"outrider": wishes}
        try:
            answer = server.post("/generate", {"text": text, "sampling_params": params})
        except requests.exceptions.InvalidJSONError:
            return  # NaN and infinity cannot be sent
        assert answer.status_code in seen, answer.text
        seen[answer.status_code] += 1
        if answer.ok:
            assert answer.json()["output_ids"] == expected[:1]
        else:
            assert "outrider" in answer.json()["error"]["message"]

    ask()
    assert seen[200] > 20, seen
    assert seen[400] > 300, seen
    server.settle_down()


def _use(server):
    server.ask("/generate", body(workload.OPENINGS[0]))
    server.settle_down()


def test_twin_a_lost_slot_is_found(launch, model_dir, profile, tmp_path):
    """SGLang counts its slots when it is idle, and `settle_down` waits for that."""
    environment = {"OUTRIDER_TEST_FAULT": "leak", "OUTRIDER_TEST_PASSES": str(tmp_path / "on")}
    environment |= profile(drafter="wrong")
    with launch("leak", model_dir(MODEL), *FLAGS, **environment) as server:
        (tmp_path / "on").touch()
        with pytest.raises((AssertionError, requests.RequestException)):
            _use(server)
    assert "memory leak detected" in server.log.read_text()


def test_broken_draft_model(launch, model_dir, profile, plain, tmp_path):
    """The draft model runs out of memory, or computes what is not a number, now and then."""
    model, fault = model_dir(MODEL), tmp_path / "fault"
    flags = [*FLAGS, "--speculative-draft-model-path", str(model)]
    environment = {"OUTRIDER_TEST_FAULT": str(fault), **profile(drafter="model")}
    fault.write_text("")
    wishes, accepted = [("/generate", body(text)) for text in plain], 0
    with launch("draft", model, *flags, **environment) as server:
        for name, reason in {"oom": "error", "nan": "garbage"}.items():
            fault.write_text(name)
            answers = server.ask_all(wishes, 1) + server.ask_all(wishes, 6)
            assert [a["output_ids"] for a in answers] == [*plain.values()] * 2
            metrics = server.metrics()
            assert counted(metrics, f'reason="{reason}"') > 0
            before, accepted = accepted, metrics["outrider:accepted_draft_tokens_total"]
            assert accepted > before
        server.settle_down()


@pytest.mark.parametrize("fault", ["once", "prefill"])
def test_no_pass_of_the_draft_model_reads_whole_contexts(
    fault, launch, model_dir, noisy, profile, tmp_path
):
    """Six long contexts at once. After a fault what was read stays known.

    Prompts that the draft model could not read are read in bounded chunks, beside the steps.
    """
    model, passes = model_dir("stories260k"), tmp_path / "passes"
    flags = [*FLAGS, "--max-total-tokens", "4096"]
    flags += ["--speculative-draft-model-path", str(noisy(model))]
    texts = [f"{i}. " + workload.OPENINGS[i] * 8 for i in range(6)]
    environment = {"OUTRIDER_TEST_FAULT": fault, "OUTRIDER_TEST_PASSES": str(passes)}
    environment |= profile(drafter="model")  # control would run passes of its own
    with launch(f"passes-{fault}", model, *flags, **environment) as server:

        def ask(**wishes):
            bodies = [body(text, tokens=64, drafter="model", **wishes) for text in texts]
            return server.ask_all([("/generate", each) for each in bodies], 6)

        plain = ask(max_drafts=0)
        assert min(a["meta_info"]["prompt_tokens"] for a in plain) > 100
        server.settle_down()  # flushes the cache: the prompts are read again
        passes.write_text("")
        answers = ask()
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in plain]
        prompts = sum(a["meta_info"]["prompt_tokens"] for a in answers)
        assert prompts > 1000
        assert all(accepted(a["meta_info"]) > 0 for a in answers)
        metrics = server.metrics()
        seen = [line.split() for line in passes.read_text().splitlines()]
        rows = {mode: [int(n) for m, n in seen if m == mode] for mode in ("DECODE", "EXTEND")}
        assert 0 < max(rows["DECODE"]) <= 6 * 8
        if fault == "once":
            assert counted(metrics, 'reason="error"') > 0
            # the prompts once, and nothing again
            assert sum(rows["EXTEND"]) <= prompts
            assert counted(metrics, 'reason="catching_up"') == 0
        else:
            assert max(rows["EXTEND"]) <= 512
            assert prompts - 6 <= sum(rows["EXTEND"]) <= prompts + 6 * 64
            assert counted(metrics, 'reason="catching_up"') > 0
        server.settle_down()
