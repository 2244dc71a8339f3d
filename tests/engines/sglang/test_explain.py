"""Records of each step, for requests that ask: replayed, they are the answer.

The server has the default settings of test_side_channel.py's, and is its twin.
"""

from __future__ import annotations

import copy
import json

import parity
import pytest
import test_side_channel as quiet
import workload
from server import accepted, proposed

FLAGS = [
    *(*parity.COMMON, *parity.DETERMINISTIC, *parity.OUTRIDER, "--speculative-num-steps", "5"),
    *("--max-total-tokens", "1024", "--max-running-requests", "8"),
    *("--dp-size", "2", "--load-balance-method", "round_robin"),
]
USUAL = 3
WISHES = {
    "model": {"drafter": "model"},
    "ngram": {"drafter": "ngram"},
    "adaptive": {"drafter": "adaptive"},
    "none": {"max_drafts": 0},
}


@pytest.fixture(scope="module")
def server(launch, model_dir, noisy, tmp_path_factory):
    """Return a server of two ranks; its draft model drafts trees."""
    model = model_dir("stories260k")
    draft = ["--speculative-draft-model-path", str(noisy(model))]
    profile = {"drafter": "model", "drafters": parity.DRAFTERS, "max_drafts": USUAL}
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    path.write_text(json.dumps(profile))
    return launch("explain", model, *FLAGS, *draft, OUTRIDER_CONFIG=str(path)).wait()


def wish(i, explain=True, **wishes):
    params = {"temperature": 0.8 * (i % 2), "sampling_seed": i, "max_new_tokens": 20 + i}
    params["custom_params"] = {"outrider": {"explain": explain, **wishes}}
    return {"text": workload.OPENINGS[i % len(workload.OPENINGS)], "sampling_params": params}


def check(answer):
    """The records are trees with a path each, and together the answer and SGLang's counts."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    steps = meta["outrider_steps"]
    for step in steps:
        drafts, parents, kept = step["drafts"], step["parents"], step["kept"]
        assert len(drafts) == len(parents)
        assert all(-1 <= parent < i for i, parent in enumerate(parents))
        assert [parents[i] for i in kept] == [-1, *kept][: len(kept)]
        assert [drafts[i] for i in kept] == step["emitted"][: len(kept)]
        # a bonus or recovered token follows, unless the request ended with a draft
        ended = step is steps[-1] and len(kept) > 0
        assert len(step["emitted"]) - len(kept) in ((0, 1) if ended else (1,))
    # the first token is of the prompt's pass
    assert ids == ids[:1] + [token for step in steps for token in step["emitted"]]
    assert len(steps) == meta["spec_verify_ct"]
    assert sum(len(step["drafts"]) for step in steps) == proposed(meta)
    assert sum(len(step["kept"]) for step in steps) == accepted(meta)
    return steps


@pytest.mark.parametrize("kind", WISHES)
def test_replayed_they_are_the_answer(kind, server):
    wishes = [("/generate", wish(i, **WISHES[kind])) for i in range(12)]
    answers = server.ask_all(wishes, 4)
    steps = [step for answer in answers for step in check(answer)]
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
    drafters = {step["drafter"] for step in steps if step["drafts"]}
    if kind in ("model", "ngram"):
        assert drafters == {kind}
        assert any(step["kept"] for step in steps)
    if kind == "model":  # branches, and a path that is not the first
        assert any(len(set(s["parents"])) < len(s["parents"]) for s in steps)
        assert any(s["kept"] and s["kept"] != [*range(len(s["kept"]))] for s in steps)
    if kind == "none":
        assert not drafters


def test_the_profile_says_how_many_drafts_a_request_usually_has(server):
    def most(**wishes):
        answer = server.ask("/generate", wish(0, drafter="model", **wishes))
        return max(len(step["drafts"]) for step in check(answer))

    assert most() == USUAL
    assert most(max_drafts=9) == 5


def test_streamed(server):
    """The last chunk has all of them."""
    for i in range(4):
        body = wish(i, drafter="model")
        streamed = server.ask("/generate", {**body, "stream": True})
        assert check(streamed)
        assert streamed["output_ids"] == server.ask("/generate", body)["output_ids"]


def test_each_of_several_answers_has_its_own(server):
    body = wish(1, drafter="model")
    del body["sampling_params"]["sampling_seed"]
    body["sampling_params"]["n"] = 3
    answers = server.ask("/generate", body)
    assert len(answers) == 3
    for answer in answers:
        check(answer)


def test_only_those_who_ask_are_told(server):
    bodies = [("/generate", wish(i, explain=i % 2 == 0)) for i in range(8)]
    for i, answer in enumerate(server.ask_all(bodies, 8)):
        assert ("outrider_steps" in answer["meta_info"]) == (i % 2 == 0)
    refused = server.post("/generate", wish(0, explain="yes"))
    assert refused.status_code == 400
    assert "explain" in refused.json()["error"]["message"]


def test_twin_a_wrong_record_is_found(server):
    answer = server.ask("/generate", wish(0, drafter="model"))
    steps = check(answer)
    good = next(i for i, step in enumerate(steps) if step["kept"])
    for spoil in (
        lambda step: step["emitted"].append(1),
        lambda step: step["kept"].pop(),
        lambda step: step["parents"].__setitem__(0, 0),
        lambda step: step["drafts"].__setitem__(step["kept"][0], -1),
    ):
        wrong = copy.deepcopy(answer)
        spoil(wrong["meta_info"]["outrider_steps"][good])
        with pytest.raises(AssertionError):
            check(wrong)


def test_twin_streams_show_what_each_step_gave(server):
    for ask in (
        lambda text: quiet.generate("greedy", text),
        lambda text: quiet.complete(text, False),
        lambda text: quiet.complete(text, True),
    ):
        found = [quiet.sizes(quiet.stream(server, *ask(text))) for text in workload.OPENINGS[:3]]
        assert len({n for one in found for n in one[1:-1]}) > 2, found
        assert not any(quiet.are_flat(one) for one in found)


def test_twin_answers_tell_what_was_accepted(server):
    path, body = quiet.generate("greedy", workload.OPENINGS[0])
    for streams in (False, True):
        assert b'"spec_accept_length"' in quiet.raw(server, path, {**body, "stream": streams})


def test_the_tool_shows_what_the_server_did(server):
    from outrider.explain.recording import ExplainOptions
    from outrider.explain.server import record
    from outrider.explain.walk import make_walk

    options = ExplainOptions(workload.OPENINGS[0], drafter="model", max_drafts=3, max_tokens=24)
    walk = make_walk(*record(options, server.url, lambda count: None), {})
    assert walk.totals.accepted > 0
    assert len(walk.output_ids) == walk.totals.tokens == 24
