"""Several ranks take the same decisions: tensor parallelism and data parallelism, on CPU."""

from __future__ import annotations

import functools
from pathlib import Path

import parity
import pytest
import sglang
import workload
from server import accepted

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
TINY_TEXTS = [
    "The outrider rides ahead of the",
    "Look twice at the water and once at the sky, and then",
]
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "1024", "--max-running-requests", "8", "--enable-metrics"),
    *("--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", "4"),
]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
PARALLEL = {
    "tp": (["--tp-size", "2"], CORES),
    # to 0.5.11 these would be the cores of one replica
    "dp": (
        ["--dp-size", "2", "--load-balance-method", "round_robin"],
        {} if sglang.__version__ == "0.5.11" else CORES,
    ),
}


def first_difference(orders):
    """Return where ranks differ in the order of their collective calls; None if they do not.

    What some have not come to yet is no difference.
    """
    calls = zip(*orders, strict=False)
    return next((n for n, same in enumerate(calls) if len(set(same)) > 1), None)


def check_collectives(folder):
    """All ranks of a server must have made the same collective calls in the same order."""
    # a rank may be writing its last line
    orders = [file.read_text().splitlines()[:-1] for file in sorted(folder.iterdir())]
    assert len(orders) == 2
    assert min(map(len, orders)) > 1000
    assert first_difference(orders) is None


def test_a_call_out_of_order_is_found():
    calls = ["broadcast [2]", "all_reduce [1]", "broadcast [2]"]
    assert first_difference([calls, calls[:2]]) is None
    assert first_difference([calls, [calls[0], calls[2], calls[1]]]) == 1


@pytest.fixture(scope="module")
def start(launch, model_dir, noisy, tmp_path_factory):
    """Return a function that returns the server of a kind, with all drafters."""
    model, folder = model_dir("stories260k"), tmp_path_factory.mktemp("profile")
    draft = ["--speculative-draft-model-path", str(noisy(model))]

    @functools.cache
    def find(kind):
        flags, environment = PARALLEL[kind]
        environment = environment | parity.profile(folder)
        return launch(kind, model, *FLAGS, *flags, *draft, **environment).wait()

    return find


@pytest.mark.parametrize("kind", PARALLEL)
def test_two_ranks(kind, start):
    """Greedy and sampled, with each drafter: the answers of K = 0, no rank lost."""
    server = start(kind)
    texts = workload.OPENINGS

    def ask(**wishes):
        params = {"temperature": 0, "max_new_tokens": 32, "repetition_penalty": 1.1}
        params["custom_params"] = {"outrider": wishes}
        bodies = [{"text": text, "sampling_params": params} for text in texts]
        return server.ask_all([("/generate", body) for body in bodies], 6)

    plain = [a["output_ids"] for a in ask(max_drafts=0)]
    for drafter in parity.DRAFTERS:
        answers = ask(drafter=drafter)
        assert [a["output_ids"] for a in answers] == plain
        hits = sum(accepted(a["meta_info"]) for a in answers)
        # suffix finds nothing to copy here, and adaptive may choose none
        assert hits > 0 or drafter in ("adaptive", "suffix")
    hot = [
        ("/generate", {"text": text, "sampling_params": {"temperature": 1.0, "top_p": 0.9}})
        for text in texts
    ]
    assert len(server.ask_all(hot, 6)) == len(texts)
    if kind == "dp":
        ranks = {a["meta_info"]["dp_rank"] for a in answers}
        assert ranks == {0, 1}
    server.settle_down()


@pytest.fixture(scope="module")
def two_ranks(launch, model_dir, noisy, profile, tmp_path_factory):
    """Return a function that starts a server of two ranks, and where their calls are noted.

    It takes the server's name and environment.
    """
    model = model_dir("stories260k")
    flags, cores = PARALLEL["tp"]
    flags = [*FLAGS, *flags, "--speculative-draft-model-path", str(noisy(model))]
    # with the KV sanitizer control is not calibrated
    cores = cores | profile(drafter="adaptive", sanitize=False)

    def begin(name, **environment):
        folder = tmp_path_factory.mktemp(name)
        environment |= cores | {"OUTRIDER_TEST_COLLECTIVES": str(folder)}
        return launch(name, model, *flags, **environment), folder

    return begin


def ask_greedy(server, **wishes):
    """Return the tokens of the answers, and how many drafts were accepted."""
    params = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    params["custom_params"] = {"outrider": wishes}
    bodies = [{"text": text, "sampling_params": params} for text in workload.OPENINGS]
    answers = server.ask_all([("/generate", body) for body in bodies], 6)
    hits = sum(accepted(answer["meta_info"]) for answer in answers)
    return [answer["output_ids"] for answer in answers], hits


@pytest.fixture(scope="module")
def plain(start):
    """What ranks that do not misbehave answer, without drafts."""
    return ask_greedy(start("tp"), max_drafts=0)[0]


def test_rank_0_has_the_head(launch):
    """It has the target's states, and its embedding put together. It alone drafts."""
    flags, environment = PARALLEL["tp"]
    flags = [*FLAGS, *flags, "--speculative-draft-model-path", str(TINY / "head")]
    with launch("heads-tp", TINY / "target", *flags, **environment) as server:

        def ask(**wishes):
            params = {"temperature": 0, "max_new_tokens": 40}
            params["custom_params"] = {"outrider": wishes}
            bodies = [{"text": text, "sampling_params": params} for text in TINY_TEXTS]
            return server.ask_all([("/generate", body) for body in bodies], 3)

        plain, drafted = ask(max_drafts=0), ask(drafter="eagle3")
        assert [a["output_ids"] for a in drafted] == [a["output_ids"] for a in plain]
        steps = sum(a["meta_info"]["spec_verify_ct"] for a in drafted)
        assert sum(accepted(a["meta_info"]) for a in drafted) > 2 * steps
        server.settle_down()


@pytest.mark.parametrize("what", ["raising", "perturbed"])
def test_rank_1_alone_misbehaves(what, two_ranks, plain):
    """Its passes of the draft model raise, or its sampler emits other tokens: nobody hangs.

    Nor does a rank make another collective call than the other, at any time.
    """
    server, calls = two_ranks(f"tp-{what}", OUTRIDER_TEST_RANK_1=what)
    with server:
        asked = [ask_greedy(server, drafter=drafter) for drafter in ("adaptive", "model", "model")]
        server.settle_down()
        log = server.log.read_text()
        metrics = server.metrics()
        check_collectives(calls)
    assert [ids for ids, _ in asked] == [plain] * 3
    assert asked[-1][1] > 0
    if what == "raising":
        for place in ("passes", "prefills", "run"):
            assert f"{place} of rank 1" in log
        for reason in ("prefill", "error"):
            found = [v for k, v in metrics.items() if f'reason="{reason}"' in k]
            assert sum(found) > 0, reason
