"""Without seeds the tokens differ from run to run; how often each comes must not."""

from __future__ import annotations

from collections import Counter

import pytest
from scipy.stats import chi2_contingency
from server import accepted

FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "torch_native"),
    *("--max-total-tokens", "2048", "--max-running-requests", "16"),
    *("--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", "3"),
]
TEXT = "One day, a little girl named Lily went to the"
SAMPLING = {
    "temperature": {"temperature": 1.2},
    "top_k, top_p": {"temperature": 1.5, "top_k": 12, "top_p": 0.9},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
}
COUNT = 320


@pytest.fixture(scope="module")
def server(launch, model_dir, profile):
    model = model_dir("stories260k")
    draft = ["--speculative-draft-model-path", str(model)]
    return launch("distribution", model, *FLAGS, *draft, **profile(drafter="model")).wait()


def outcomes(server, drafts, params):
    """Return how often each text of 3 tokens came, and how many drafts were accepted."""
    wish = {"max_new_tokens": 4, "custom_params": {"outrider": {"max_drafts": drafts}}, **params}
    body = {"text": TEXT, "sampling_params": wish}
    answers = server.ask_all([("/generate", body)] * COUNT, 16)
    hits = sum(accepted(a["meta_info"]) for a in answers)
    return [Counter(tuple(a["output_ids"][i : i + 2]) for a in answers) for i in range(3)], hits


def p_value(a, b):
    """Return the chi-square test's: rare outcomes are counted together."""
    common = [k for k in a | b if a[k] + b[k] >= 20]
    rows = [[c[k] for k in common] + [sum(c.values()) - sum(c[k] for k in common)] for c in (a, b)]
    rows = [
        [n for n, other in zip(row, sums, strict=True) if other]
        for row, sums in ((row, [x + y for x, y in zip(*rows, strict=True)]) for row in rows)
    ]
    return chi2_contingency(rows).pvalue


@pytest.mark.parametrize("kind", SAMPLING)
def test_the_distribution_is_that_of_plain_decoding(kind, server):
    plain, _ = outcomes(server, 0, SAMPLING[kind])
    drafted, hits = outcomes(server, 3, SAMPLING[kind])
    assert hits > 50
    for a, b in zip(plain, drafted, strict=True):
        assert p_value(a, b) > 1e-4


def test_twin_another_temperature_is_seen(server):
    plain, _ = outcomes(server, 0, SAMPLING["temperature"])
    colder, _ = outcomes(server, 0, {"temperature": 0.9})
    assert min(p_value(a, b) for a, b in zip(plain, colder, strict=True)) < 1e-4
