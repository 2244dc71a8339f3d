"""A server whose drafts are chosen by goodput: the answers stay those of plain decoding."""

from __future__ import annotations

import pytest
import workload

from outrider.control import Limits
from outrider.core import Unsupported
from outrider.serving.make_pool import make_pool
from outrider.serving.profile import Profile

FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--enable-metrics"),
    *("--enable-deterministic-inference", "--speculative-algorithm", "OUTRIDER"),
    *("--speculative-num-steps", "6"),
]


@pytest.fixture(scope="module")
def server(launch, model_dir, noisy, tmp_path_factory):
    model = model_dir("stories260k")
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    # whatever drafts cost on this machine, they are worth it here: they are to be verified
    options = "drafters: {adaptive: {margin: -0.9}}\n"
    path.write_text(f"drafter: adaptive\ndraft_bits: 4\n{options}")
    draft = ["--speculative-draft-model-path", str(noisy(model))]
    return launch("adaptive", model, *FLAGS, *draft, OUTRIDER_CONFIG=str(path)).wait()


def wish(i: int, **options):
    params = {"temperature": 0.7 * (i % 2), "sampling_seed": i, "max_new_tokens": 40}
    params |= {"ignore_eos": True, "custom_params": {"outrider": options}}
    text = workload.OPENINGS[i % len(workload.OPENINGS)]
    return "/generate", {"text": text, "sampling_params": params, "return_logprob": True}


def test_the_answers_are_those_of_plain_decoding(server):
    """One by one, then eight at a time: tokens and logprobs, bit for bit."""

    def logprobs(answers):
        return [answer["meta_info"]["output_token_logprobs"] for answer in answers]

    plain = server.ask_all([wish(i, max_drafts=0) for i in range(16)], 8)
    for concurrency in (1, 8):
        found = server.ask_all([wish(i) for i in range(16)], concurrency)
        assert logprobs(found) == logprobs(plain)
    counters = server.metrics()
    drafted = counters["outrider:draft_tokens_total"]
    assert 0 < counters["outrider:accepted_draft_tokens_total"] < drafted
    assert not counters.get("outrider:fallbacks_total")


def test_options_are_checked():
    with pytest.raises(Unsupported, match="no_such"):
        make_pool(Profile(drafters={"adaptive": {"no_such": 1}}), ["adaptive"], vocab_size=9)


def test_row_buckets_of_the_profile_go_before_those_of_captured_graphs():
    def bucket(options):
        profile = Profile(drafters={"adaptive": options})
        made = make_pool(profile, ["adaptive"], 9, limits=Limits(graph_sizes=(8, 16)))
        return made.control.cost.verify.row_bucket(9)

    assert bucket({}) == 16
    assert bucket({"row_buckets": [12, 24]}) == 12
