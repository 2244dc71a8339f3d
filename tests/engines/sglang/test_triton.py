"""A real server on our Triton kernels, in the interpreter: verified rows are decoded rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import workload
from server import accepted
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from outrider.core import Unsupported
from outrider.engines.sglang.attention import triton as attention_triton
from outrider.engines.sglang.plugin import installed_hooks

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "1024", "--max-running-requests", "4", "--context-length", "256"),
    *("--enable-deterministic-inference", "--speculative-algorithm", "OUTRIDER"),
    *("--speculative-num-steps", "4", "--chunked-prefill-size", "8"),
]


@pytest.fixture(scope="module")
def server(launch, profile):
    draft = ["--speculative-draft-model-path", str(TINY / "draft")]
    kernels = {"OUTRIDER_KERNELS": "triton", "TRITON_INTERPRET": "1", **profile(drafter="model")}
    return launch("triton", TINY / "target", *FLAGS, *draft, **kernels).wait()


def ask(server, i: int, **wishes):
    params = {"temperature": 0.7 * (i % 2), "sampling_seed": i, "max_new_tokens": 6}
    params |= {"ignore_eos": True, "custom_params": {"outrider": wishes}}
    body = {"text": workload.OPENINGS[i], "sampling_params": params, "return_logprob": True}
    meta = server.ask("/generate", body)["meta_info"]
    return meta["output_token_logprobs"], accepted(meta)


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


@pytest.fixture
def backend(monkeypatch):
    """The backend on buffers of its own: no server, no kernel."""
    version = installed_hooks().version
    monkeypatch.setattr(type(version), "attention_tp_size", lambda self: 1)
    monkeypatch.setattr(type(version), "arguments", lambda self, args: args)
    config = SimpleNamespace(
        is_encoder_decoder=False,
        **{"is_multimodal": False, "hf_text_config": None},
        v_head_dim=64,
        head_dim=64,
        num_attention_heads=8,
        get_num_kv_heads=lambda tp: 2,
    )
    lines = torch.arange(6 * 512, dtype=torch.int32).view(6, 512)
    return attention_triton.TritonAttention(
        SimpleNamespace(
            server_args=SimpleNamespace(enable_deterministic_inference=True),
            use_mla_backend=False,
            model=torch.nn.Module(),
            model_config=config,
            token_to_kv_pool=None,
            req_to_token_pool=SimpleNamespace(req_to_token=lines),
        ),
        version,
    )


def test_a_captured_graph_reads_this_steps_rows(backend):
    """Capture for six rows; then a step of four rows of one request, one of another, padded."""
    ones = torch.ones(6, dtype=torch.int64)
    backend.init_cuda_graph_state(6, 6)
    backend.init_forward_metadata_capture_cuda_graph(
        6, 6, torch.zeros(6, dtype=torch.int64), ones, None, ForwardMode.DECODE, None
    )
    captured = backend._layout
    addresses = [x.data_ptr() for x in (captured.tiles, captured.lens, captured.parts)]
    lines = torch.tensor([3, 3, 3, 3, 5, 0])
    lens = torch.tensor([300, 301, 302, 303, 40, backend.get_cuda_graph_seq_len_fill_value()])
    backend.init_forward_metadata_replay_cuda_graph(
        6, lines, lens, int(lens.sum()), None, ForwardMode.DECODE, None, lens
    )
    assert captured.tiles[:, :3].tolist() == [
        *([0, 4, 3 * 512], [4, 1, 5 * 512], [5, 1, 0]),
        *([0, 0, 0] for _ in range(3 + 6)),  # room for a tree
    ]
    assert captured.lens.tolist() == lens.tolist()
    assert captured.parts.tolist() == [0, 2, 4, 6, 8, 9]
    assert addresses == [x.data_ptr() for x in (captured.tiles, captured.lens, captured.parts)]
    assert captured.num_parts >= 10


def test_other_graphs_are_refused(backend):
    with pytest.raises(Unsupported, match="disable-cuda-graph"):
        backend.init_forward_metadata_capture_cuda_graph(
            1, 4, torch.zeros(1), torch.ones(1), None, ForwardMode.TARGET_VERIFY, None
        )
