"""What SGLang would emit at each row, asked of SGLang's own parts; each with a twin."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from outrider.core import Proposal, chain
from outrider.engines.sglang.batches import kind_groups
from outrider.engines.sglang.plugin import installed_hooks
from outrider.engines.sglang.sampling import sampler as sampling
from outrider.engines.sglang.sampling.grammars import RowGrammar, can_roll_back
from outrider.engines.sglang.sampling.penalties import Penalties
from outrider.engines.sglang.sampling.sampler import row_sampling, sample, sampling_kind
from outrider.serving.values import Members

V = 64
VERSION = installed_hooks().version


@pytest.fixture(autouse=True)
def arguments(monkeypatch):
    load_plugins()
    args = SimpleNamespace(
        enable_deterministic_inference=True,
        enable_custom_logit_processor=True,
        sampling_backend="pytorch",
        speculative_algorithm="OUTRIDER",
        device="cpu",
    )
    if VERSION.contract.VERSION == "0.5.11":
        monkeypatch.setattr("sglang.srt.server_args._global_server_args", args)
        return
    from sglang.srt.runtime_context import RuntimeContext

    args.deterministic = args.kernel = args.features = args  # what groups settings there
    monkeypatch.setattr(RuntimeContext, "server_args", args)
    monkeypatch.setattr(RuntimeContext, "config_bag", lambda self, name: args)
    monkeypatch.setattr(type(VERSION), "arguments", lambda self, given: given)


class Req:
    """As much of a request as SGLang's sampling parts look at."""

    def __init__(self, rid, output, grammar=None, **params):
        self.rid, self.output_ids, self.grammar = rid, list(output), grammar
        self.sampling_params = SamplingParams(**{"temperature": 0, **params})
        self.custom_logit_processor = None
        self.eos_token_ids, self.return_sampling_mask = {2}, False  # 0.5.23 has these
        self.tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)

    @property
    def live(self):
        """Return the request as drafters see it."""
        return SimpleNamespace(req=self, output=self.output_ids)


def everyone(batch):
    """Return all requests of a batch."""
    requests = [req.live for req in batch.reqs]
    size = len(requests)
    return Members(requests, np.arange(size), np.zeros(size, np.int64), None)


class Batch:
    """A decode batch, its sampling parameters made by SGLang."""

    def __init__(self, reqs):
        self.reqs, self.device = reqs, "cpu"
        self.has_grammar = any(req.grammar for req in reqs)
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, V)
        self.penalties = Penalties()
        self.penalties.renew(self)


PARAMS = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.6},
    {"presence_penalty": -0.4},
    {"min_new_tokens": 5},
    {},
]
OUTPUTS = [[3, 4, 3], [5], [], [7, 8], [9]]
DRAFTS = [[3, 6], [5, 5, 5], [1], [11, 12, 13], []]


def biased(info, logits):
    """Return the logits after SGLang's penalties and bias."""
    logits = logits.clone()
    info.apply_logits_bias(logits)
    return logits


def alone(r, path, logits):
    """Return what plain decoding makes of a row: one request, its tokens counted one by one."""
    batch = Batch([Req("x", [], **PARAMS[r])])
    batch.reqs[0].output_ids = [*OUTPUTS[r], *path]
    batch.penalties.catch_up(batch, [req.live for req in batch.reqs])
    return biased(batch.sampling_info, logits[None])[0]


def row_logits(advance=True, monkeypatch=None):
    batch = Batch([Req(str(r), OUTPUTS[r], **params) for r, params in enumerate(PARAMS)])
    proposal = Proposal.of([chain(draft) for draft in DRAFTS])
    logits = torch.randn(proposal.num_rows, V, generator=torch.Generator().manual_seed(0))
    if not advance:
        monkeypatch.setattr(sampling, "advance", lambda *args: None)
    owner = torch.from_numpy(proposal.row_owners)
    info = row_sampling(VERSION, batch, everyone(batch), proposal, owner)
    expected = [
        alone(r, path, logits[i])
        for i, (r, path) in enumerate(zip(proposal.row_owners, proposal.paths(), strict=True))
    ]
    return biased(info, logits), torch.stack(expected), batch, logits


def test_penalties_count_the_drafts_on_the_path():
    found, expected, batch, logits = row_logits()
    assert torch.equal(found, expected)
    before = biased(batch.sampling_info, logits[: len(PARAMS)])
    again = biased(Batch(batch.reqs).sampling_info, logits[: len(PARAMS)])
    assert torch.equal(before, again), "asking about drafts changed the batch itself"


def test_twin_penalties_that_stand_still_are_seen(monkeypatch):
    """SGLang's own speculation keeps them constant across a block."""
    found, expected, *_ = row_logits(advance=False, monkeypatch=monkeypatch)
    assert not torch.equal(found, expected)


def test_a_retracted_request_keeps_its_penalties():
    req = Req("x", [3, 4, 5], repetition_penalty=1.5)
    first = Batch([req])
    req.output_ids += [6, 7]
    first.penalties.catch_up(first, [req.live for req in first.reqs])
    again = Batch([req])  # SGLang makes penalties anew, as for a new request
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    assert torch.equal(biased(first.sampling_info, logits), biased(again.sampling_info, logits))
    forgotten = SamplingBatchInfo.from_schedule_batch(again, V)
    assert not torch.equal(biased(forgotten, logits), biased(again.sampling_info, logits))


class Alone(Sampler):
    """SGLang's sampler without the process groups that its constructor asks for."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.use_nan_detection = self.use_log_softmax_logprob = self.use_ascend_backend = False
        self.rl_on_policy_target, self.enable_deterministic = None, True
        self.tp_sync_group = self.cp_sync_group = None
        self.sampling_mask_max_tokens = 0


MIXED = [
    {"temperature": 0.9, "sampling_seed": 1},
    {},
    {"temperature": 1.1, "top_k": 9, "sampling_seed": 2},
    {"temperature": 1.3, "sampling_seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "sampling_seed": 4},
]


def sampled(reqs, logits, positions, together=False):
    batch = Batch(reqs)
    runner = SimpleNamespace(
        sampler=Alone(), _preprocess_logits=lambda output, info: info.apply_logits_bias(logits)
    )
    forward = SimpleNamespace(
        sampling_info=batch.sampling_info,
        reqs=reqs,
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    if together:
        return runner.sampler(output, batch.sampling_info, False, None, None, positions).tolist()
    forward = _dataclass(forward)
    groups = kind_groups([sampling_kind(req.sampling_params) for req in reqs], "cpu")
    return sample(VERSION, runner, output, forward, positions, groups).tolist()


def _dataclass(namespace):
    from dataclasses import make_dataclass

    fields = vars(namespace)
    return make_dataclass("Forward", fields)(**fields)


def test_a_request_is_sampled_as_if_alone():
    generator = torch.Generator().manual_seed(2)
    differs = 0
    for _ in range(20):
        logits = torch.randn(len(MIXED), V, generator=generator) * 2
        positions = torch.randint(0, 1000, (len(MIXED),), generator=generator)
        reqs = [Req(str(r), [], **params) for r, params in enumerate(MIXED)]
        found = sampled(reqs, logits, positions)
        for r, req in enumerate(reqs):
            single = slice(r, r + 1)
            assert sampled([req], logits[single], positions[single], together=True) == found[single]
        differs += sampled(reqs, logits, positions, together=True) != found
    assert differs, "the twin: SGLang's own batch depends on the company"


@pytest.fixture(scope="module")
def grammars(model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir("stories15m"))
    backend = XGrammarGrammarBackend(tokenizer, vocab_size=len(tokenizer), model_eos_token_ids=[2])
    return tokenizer, lambda: backend.dispatch_regex(" ?(cat|dog) (ran|sat)\\.").copy()


def mask(grammar):
    found = grammar.allocate_vocab_mask(32000, 1, "cpu")
    grammar.fill_vocab_mask(found, 0)
    return found


def test_grammar_along_the_path(grammars):
    tokenizer, make = grammars
    path = tokenizer.encode("cat ran", add_special_tokens=False)
    shared, fresh = make(), make()
    assert can_roll_back(shared)
    for depth in range(len(path) + 1):
        assert torch.equal(mask(RowGrammar(shared, path[:depth])), mask(fresh))
        if depth < len(path):
            fresh.accept_token(path[depth])
    assert torch.equal(mask(shared), mask(make())), "asking about drafts moved the grammar"
    forbidden = RowGrammar(shared, tokenizer.encode("zebra", add_special_tokens=False))
    everything = shared.allocate_vocab_mask(32000, 1, "cpu")
    assert torch.equal(mask(forbidden), everything)
    assert not torch.equal(mask(shared), everything)
    assert torch.equal(mask(shared), mask(make()))


def test_rows_beside_a_grammar_that_has_ended(grammars):
    """SGLang's mask takes one of the grammars: there must be one, or no list."""
    batch = Batch([Req("ended", [], grammars[1]()), Req("other", [5])])
    both = everyone(batch)
    for members, has in ((both, True), (both.take(np.array([1])), False)):
        proposal = Proposal.empty(len(members.requests))
        info = row_sampling(VERSION, batch, members, proposal, torch.from_numpy(members.places))
        assert (info.grammars is not None) == has
    info.update_regex_vocab_mask()


def test_mask_on_cpu(grammars):
    tokenizer, make = grammars
    grammar = make()
    logits = torch.zeros(1, 32000)
    grammar.apply_vocab_mask(logits=logits, vocab_mask=mask(grammar))
    allowed = {tokenizer.decode([i]).strip() for i in logits[0].isfinite().nonzero()[:, 0].tolist()}
    assert allowed <= {"c", "ca", "cat", "d", "do", "dog", ""}
    assert {"cat", "dog"} <= allowed


def test_penalties_are_counted_for_those_that_have_them_alone():
    """A request without penalties may have written much before one with penalties joins it."""
    reqs = [Req("long", range(4000)), Req("x", [3, 4], repetition_penalty=1.5)]
    batch = Batch(reqs)
    steps = []
    orchestrator = batch.sampling_info.penalizer_orchestrator
    count = orchestrator.cumulate_output_tokens
    orchestrator.cumulate_output_tokens = lambda ids: (steps.append(ids), count(ids))
    for req in reqs:
        req.output_ids.append(5)
    batch.penalties.catch_up(batch, [req.live for req in batch.reqs])
    assert [ids.tolist() for ids in steps] == [[0, 5]]
