"""SGLang's own verification as on ROCm: without the repair it ignores the temperature, with it not.

A GPU is not needed to see it. On CPU SGLang's modules lack the same functions as on ROCm; the flags
are set as ROCm sets them, and `verify_tree_greedy`, which ROCm has, is written out below.
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sgl_kernel
import torch
from scipy.stats import chisquare
from server import ENVIRONMENT
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import (
    dflash_utils,
    eagle_info,
    eagle_info_v2,
    eagle_utils,
    ngram_info,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils import common

from outrider.core import Unsupported
from outrider.engines.sglang import plugin, rocm
from outrider.engines.sglang.arguments import settings
from outrider.engines.sglang.versions import contract_0_5_11 as contract
from outrider.engines.sglang.versions.contract import hook_target, rocm_differences

hooks = plugin.installed_hooks()
V, T = 6, 4
TOKENS = torch.tensor([5, 1, 3, 2])
"""The drafts: 1 or 3 after the root, then 2 after the 1."""
CHILD = torch.tensor([1, 3, -1, -1])
SIBLING = torch.tensor([-1, 2, -1, -1])
LOGITS = torch.tensor([0.4, 2.0, 0.1, 1.5, 1.0, -30.0])
TEMPERATURE = 0.8


def verify_tree_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow the most likely token while it was drafted."""
    for b in range(len(candidates)):
        node, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        while True:
            best = target_predict[b, node]
            predicts[int(retrive_index[b, node])] = best
            child = int(retrive_next_token[b, node])
            while child != -1 and candidates[b, child] != best:
                child = int(retrive_next_sibling[b, child])
            if child == -1 or accepted + 1 >= accept_index.shape[1]:
                break
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = retrive_index[b, node]
        accept_token_num[b] = accepted


@pytest.fixture(autouse=True)
def on_rocm(monkeypatch):
    like_rocm(monkeypatch)


def like_rocm(monkeypatch):
    """SGLang as it is on ROCm; what the repair sets is taken back."""
    for name, switches in contract.ROCM_SWITCHES.items():
        module = sys.modules[hook_target(name)]
        for flag in switches:
            monkeypatch.setattr(module, flag, flag == "_is_hip")
        for function in rocm.FUNCTIONS:
            monkeypatch.setattr(module, function.__name__, None, raising=False)
    monkeypatch.setattr(common, "is_hip", lambda: True)
    monkeypatch.setattr(eagle_utils, "_is_hip", True)
    for home in (sgl_kernel, ngram_info):
        monkeypatch.setattr(home, "verify_tree_greedy", verify_tree_greedy, raising=False)
    # one rank, no options, and none of SGLang's Triton kernels, which need a GPU
    thresholds = SimpleNamespace(
        speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=1.0
    )
    for module in (eagle_info, eagle_info_v2):
        monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(world_size=1))
        monkeypatch.setattr(module, "is_dp_attention_enabled", lambda: False)
    for module in (eagle_info, eagle_info_v2, ngram_info):
        monkeypatch.setattr(module, "get_global_server_args", lambda: thresholds)
    monkeypatch.setattr(eagle_info, "assign_req_to_token_pool_func", lambda *args: None)
    monkeypatch.setattr(ngram_info, "assign_req_to_token_pool", {(N,): lambda *args: None})


N = 1200


class Request(SimpleNamespace):
    def check_finished(self):
        pass

    def finished(self):
        return False

    def update_spec_acceptance_histogram(self, count):
        self.accepted = count


def sampling(greedy=False, mixed=False, top_k=2**30, top_p=1.0):
    """What SGLang's scheduler makes of N requests; a greedy one has top_k 1."""
    top_ks = torch.full((N,), 1 if greedy else top_k, dtype=torch.int32)
    if mixed:
        top_ks[::2] = 1
    return SamplingBatchInfo(
        temperatures=torch.full((N, 1), 1.0 if greedy else TEMPERATURE),
        top_ps=torch.full((N,), top_p),
        top_ks=top_ks,
        min_ps=torch.zeros(N),
        is_all_greedy=greedy,
        need_top_p_sampling=top_p < 1,
        need_top_k_sampling=top_k < 2**30,
        need_min_p_sampling=False,
        vocab_size=V,
        penalizer_orchestrator=SimpleNamespace(is_required=False),
    )


def tree():
    places = torch.arange(N * T).view(N, T)
    every = {"retrieve_next_token": CHILD, "retrieve_next_sibling": SIBLING}
    every = {name: row.expand(N, -1).contiguous() for name, row in every.items()}
    return {"draft_token": TOKENS.repeat(N), "retrieve_index": places, **every}


def batch(info):
    return SimpleNamespace(
        sampling_info=info,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        device="cpu",
        input_ids=TOKENS.repeat(N),
        reqs=[
            Request(
                output_ids=[],
                require_reasoning=False,
                grammar=None,
                kv_committed_len=0,
                kv_allocated_len=0,
                spec_verify_ct=0,
                spec_accepted_drafts=0,
            )
            for _ in range(N)
        ],
        model_config=SimpleNamespace(think_end_id=None),
        seq_lens=torch.full((N,), 9),
        seq_lens_cpu=torch.full((N,), 9),
        out_cache_loc=torch.arange(N * T),
        req_pool_indices=torch.arange(N),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(N, 16, dtype=torch.int32)),
        token_to_kv_pool_allocator=SimpleNamespace(free=lambda slots: None),
        spec_info=SimpleNamespace(hidden_states=torch.zeros(N * T, 1)),
        batch_size=lambda: N,
    )


def output(rows):
    return SimpleNamespace(next_token_logits=rows, hidden_states=None)


def eagle(**more):
    return eagle_info.EagleVerifyInput(
        custom_mask=None,
        positions=None,
        retrieve_cum_len=None,
        spec_steps=2,
        topk=2,
        draft_token_num=T,
        capture_hidden_mode=None,
        seq_lens_sum=0,
        seq_lens_cpu=None,
        **tree(),
        **more,
    )


# Each runs one of SGLang's functions and returns the tokens emitted for each request.


def eagle_v1(info, rows):
    work = batch(info)
    eagle().verify(work, output(rows), work.token_to_kv_pool_allocator, page_size=1)
    return [request.output_ids for request in work.reqs]


def eagle_v2(info, rows):
    predict, lengths, index = eagle().sample(batch(info), output(rows))
    return [
        [int(predict[place]) for place in path[:count]]
        for path, count in zip(index.tolist(), lengths.tolist(), strict=True)
    ]


def ngram(info, rows):
    work = batch(info)
    mask = torch.zeros(1)
    ngram_info.NgramVerifyInput(tree_mask=mask, positions=None, draft_token_num=T, **tree()).verify(
        work, output(rows), page_size=1
    )
    return [request.output_ids for request in work.reqs]


VERIFY = {"EAGLE, spec v1": eagle_v1, "EAGLE, spec v2": eagle_v2, "NGRAM": ngram}


@pytest.fixture(params=VERIFY)
def verify(request):
    """One of SGLang's own verifications, with the same distribution after every node."""
    torch.manual_seed(0)
    return lambda info: VERIFY[request.param](info, LOGITS.repeat(N * T, 1))


def plain_distribution(top_k=V, top_p=1.0):
    """Return what plain decoding would draw from."""
    p = (LOGITS / TEMPERATURE).softmax(-1)
    order = p.argsort(descending=True)[:top_k]
    p = torch.zeros(V).index_copy(0, order, p[order]) / p[order].sum()
    kept = order[(p[order].cumsum(0) - p[order]) < top_p]
    return torch.zeros(V).index_copy(0, kept, p[kept]) / p[kept].sum()


def pvalue(tokens, expected):
    """Chi-square of the tokens; 0 if one of them cannot be."""
    counts = torch.bincount(torch.tensor(tokens), minlength=V)
    likely = expected > 1e-6
    if counts[~likely].any():
        return 0.0
    expected = expected[likely].double()
    expected = (expected / expected.sum() * len(tokens)).tolist()
    return chisquare(counts[likely].tolist(), expected).pvalue


def test_without_the_repair_the_temperature_does_not_count(verify):
    out = verify(sampling())
    assert out == [[1, 1]] * N  # the most likely token, for every request
    assert pvalue([y[0] for y in out], plain_distribution()) < 1e-6


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.8}], ids=str
)
def test_with_the_repair_every_token_has_the_plain_distribution(verify, limits):
    rocm.repair()
    out = verify(sampling(**limits))
    assert pvalue([y[0] for y in out], plain_distribution(**limits)) > 1e-3
    assert pvalue([y[1] for y in out if len(y) > 1], plain_distribution(**limits)) > 1e-3
    assert {len(y) for y in out} >= {1, 2}


def test_greedy_requests_are_as_before(verify):
    before = verify(sampling(greedy=True))
    rocm.repair()
    assert verify(sampling(greedy=True)) == before == [[1, 1]] * N


def test_greedy_and_sampled_requests_in_one_batch(verify):
    rocm.repair()
    out = verify(sampling(mixed=True))
    assert out[::2] == [[1, 1]] * (N // 2)
    assert pvalue([y[0] for y in out[1::2]], plain_distribution()) > 1e-3


@pytest.mark.parametrize("sparse", [True, False])
def test_dflash(sparse):
    def run():
        return dflash_utils.compute_dflash_sampling_accept_len_and_bonus(
            candidates=TOKENS[:2].repeat(N, 1),
            next_token_logits=LOGITS.repeat(N * 2, 1),
            sampling_info=sampling(top_k=4),
            threshold_single=1.0,
            threshold_acc=1.0,
            use_sparse_topk=sparse,
        )

    assert not dflash_utils.is_dflash_sampling_verify_available()
    with pytest.raises(RuntimeError, match="unavailable"):
        run()
    rocm.repair()
    assert dflash_utils.is_dflash_sampling_verify_available()
    torch.manual_seed(0)
    accepted, bonus = run()
    first = torch.where(accepted > 0, TOKENS[1], bonus)
    assert pvalue(first.tolist(), plain_distribution(top_k=4)) > 1e-3
    assert pvalue(bonus[accepted > 0].tolist(), plain_distribution(top_k=4)) > 1e-3


def test_what_else_looks_at_the_flags_answers_as_before():
    """In eagle_info_v2, `assign_extend_cache_locs_func` asks for CUDA or HIP."""
    rocm.repair()
    assert eagle_info_v2._is_cuda or eagle_info_v2._is_hip or eagle_info_v2._is_musa
    assert eagle_utils._is_hip


# -- when it happens


def arguments(algorithm="EAGLE"):
    return SimpleNamespace(
        speculative_algorithm=algorithm,
        disable_overlap_schedule=True,
        enable_multi_layer_eagle=False,
    )


@pytest.fixture
def wanted(monkeypatch):
    load_plugins()
    monkeypatch.setenv("OUTRIDER_REPAIR", "rocm-sampling")
    plugin.check_hooks()


def test_off_unless_asked_for(monkeypatch):
    load_plugins()
    monkeypatch.delenv("OUTRIDER_REPAIR", raising=False)
    hooks._handle_speculative_decoding(None, arguments())
    hooks._create_worker(object, None, arguments())
    assert not eagle_info.TREE_SPEC_KERNEL_AVAILABLE


def test_asked_for(wanted, caplog):
    """By the hooks: the launcher checks, and the scheduler's process repairs, once."""
    hooks._handle_speculative_decoding(None, arguments())
    assert not eagle_info.TREE_SPEC_KERNEL_AVAILABLE
    with caplog.at_level(logging.INFO, logger="outrider"):
        worker = SpeculativeAlgorithm.EAGLE.create_worker(arguments())
    assert worker.__name__ == "EAGLEWorker"
    assert eagle_info.TREE_SPEC_KERNEL_AVAILABLE
    assert [r.message for r in caplog.records if "now samples on ROCm" in r.message]


def test_refused_without_rocm(wanted, monkeypatch):
    monkeypatch.setattr(common, "is_hip", lambda: False)
    with pytest.raises(SystemExit, match=r"outrider: OUTRIDER_REPAIR without ROCm.*unset it"):
        hooks._handle_speculative_decoding(None, arguments())
    with pytest.raises(Unsupported, match="without ROCm"):
        hooks._create_worker(object, None, arguments())


def test_the_server_itself_stops_without_rocm(model_dir):
    """The real command line, in a process where nothing is set up."""
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        f"prepare_server_args(['--model-path', '{model_dir('tiny-target')}', '--device', 'cpu'])"
    )
    env = {**os.environ, **ENVIRONMENT, "OUTRIDER_REPAIR": "rocm-sampling"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "outrider: OUTRIDER_REPAIR without ROCm" in done.stderr


def test_an_unknown_repair_is_refused(wanted, monkeypatch):
    monkeypatch.setenv("OUTRIDER_REPAIR", "rocm")
    with pytest.raises(SystemExit, match=r"OUTRIDER_REPAIR=rocm.*rocm-sampling"):
        hooks._handle_speculative_decoding(None, arguments())


@pytest.mark.parametrize("algorithm", [None, "OTHER"])
def test_nothing_to_repair_is_said(algorithm, wanted, caplog):
    assert not settings.repairs(arguments(algorithm))
    assert "nothing to repair" in caplog.text


def test_the_contract_holds():
    assert rocm_differences(contract) == []
    assert {f.__name__ for f in rocm.FUNCTIONS} == contract.ROCM_CALLS.keys()


@pytest.mark.parametrize(
    ("table", "name", "value", "said"),
    [
        ("ROCM_SWITCHES", "speculative.no_such_module", {}, "no_such_module is missing"),
        (
            "ROCM_SWITCHES",
            "speculative.eagle_info_v2",
            {"_is_hip": (False, "sample")},
            "_is_hip is looked at by assign_extend_cache_locs_func, sample",
        ),
        ("ROCM_CALLS", "top_k_renorm_prob", "1 top_k", "is called otherwise: 2"),
    ],
)
def test_twin_a_changed_host_stops_the_server(table, name, value, said, wanted, monkeypatch):
    monkeypatch.setattr(contract, table, copy.copy(getattr(contract, table)))
    monkeypatch.setitem(getattr(contract, table), name, value)
    message = rf"(?s)differs from the 0.5.11.*{said}.*unset OUTRIDER_REPAIR"
    with pytest.raises(SystemExit, match=message):
        hooks._handle_speculative_decoding(None, arguments())
    with pytest.raises(SystemExit, match=message):
        hooks._create_worker(object, None, arguments())
    assert not eagle_info.TREE_SPEC_KERNEL_AVAILABLE


KERNELS = """
import sys
sys.path.insert(0, {here!r})
import test_rocm as t, torch
from outrider.engines.sglang import rocm
from outrider.kernels.renorm_prob import triton as renorm
from outrider.kernels.tree_sampling import triton as tree
t.N = 12
with t.pytest.MonkeyPatch.context() as patch:
    t.like_rocm(patch)
    emitted = []
    for kernels in (False, True):
        rocm.repair()
        if kernels:
            for name in ("top_k_renorm_prob", "top_p_renorm_prob"):
                setattr(t.eagle_info_v2, name, getattr(renorm, name))
            name = "tree_speculative_sampling_target_only"
            setattr(t.eagle_info_v2, name, getattr(tree, name))
        torch.manual_seed(0)
        rows = t.LOGITS.repeat(t.N * t.T, 1)
        emitted.append(t.eagle_v2(t.sampling(top_k=4, top_p=0.8), rows))
    assert emitted[0] == emitted[1], emitted
    assert len({{tuple(y) for y in emitted[1]}}) > 2
print("equal")
"""


def test_the_kernels_emit_what_the_references_emit():
    """SGLang's code with our kernels, in Triton's interpreter."""
    script = KERNELS.format(here=os.path.dirname(__file__))
    env = {**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
