"""A real server on our Triton kernels, in the interpreter: verified rows are decoded rows."""

from __future__ import annotations

import pytest
import workload

FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "1024", "--max-running-requests", "4", "--context-length", "256"),
    *("--enable-deterministic-inference", "--speculative-algorithm", "OUTRIDER"),
    *("--speculative-num-steps", "4", "--chunked-prefill-size", "8"),
]


@pytest.fixture(scope="module")
def server(launch, model_dir, noisy):
    model = model_dir("stories15m")
    draft = ["--speculative-draft-model-path", str(noisy(model))]
    kernels = {"OUTRIDER_KERNELS": "triton", "TRITON_INTERPRET": "1"}
    return launch("triton", model, *FLAGS, *draft, **kernels).wait()


def ask(server, i: int, **wishes):
    params = {"temperature": 0.7 * (i % 2), "sampling_seed": i, "max_new_tokens": 6}
    params |= {"ignore_eos": True, "custom_params": {"outrider": wishes}}
    body = {"text": workload.OPENINGS[i], "sampling_params": params, "return_logprob": True}
    meta = server.ask("/generate", body)["meta_info"]
    return meta["output_token_logprobs"], meta["spec_accepted_drafts"]


def test_verified_rows_are_decoded_rows(server):
    """Tokens and logprobs, bit for bit, with drafts kept and without any."""
    kept = 0
    for i in range(2):
        plain, none = ask(server, i, max_drafts=0)
        found, accepted = ask(server, i)
        assert none == 0
        assert found == plain
        kept += accepted
    assert kept > 0
    assert "TritonAttention" in server.log.read_text()
