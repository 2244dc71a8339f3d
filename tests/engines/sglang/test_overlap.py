"""What the worker does under SGLang's overlap scheduler, and the traps that lie there."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import workload
from server import proposed
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_STR
from sglang.srt.sampling.sampling_params import SamplingParams

from outrider.control.decision import CpuDrafts, Plain
from outrider.core import FinishReason, Outcome, Outcomes, Proposal, chain
from outrider.engines.sglang import finish, slots
from outrider.engines.sglang.carried import Carried
from outrider.engines.sglang.finish import (
    attach_hidden,
    order_logprobs,
    order_slots,
    would_keep,
)
from outrider.engines.sglang.plugin import installed_hooks
from outrider.engines.sglang.slots import Slots
from outrider.engines.sglang.workers.sglang_0_5_11 import mend_prompt_logprobs
from outrider.serving.clock import StepClock
from outrider.serving.values import Launched, Members, Settled

HOOKS = installed_hooks()
VERSION = HOOKS.version

# -- what SGLang will keep of a step's tokens


class Tokenizer:
    """Token 97 is "a", 98 is "b", ..."""

    eos_token_id, additional_stop_token_ids = 0, None

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def encode(self, text, **_):
        return [ord(c) for c in text]


def sglang_request(output="", grammar=None, **params):
    """Return a request of SGLang's."""
    params = SamplingParams(**{"temperature": 0, "max_new_tokens": 100, **params})
    params.normalize(Tokenizer())
    req = schedule_batch.Req("rid", "", [1, 2], params, vocab_size=1000)
    req.tokenizer, req.output_ids, req.grammar = Tokenizer(), [ord(c) for c in output], grammar
    return req


def kept(req, text):
    before = list(req.output_ids)
    found = would_keep(VERSION, req, [ord(c) for c in text])
    assert req.output_ids == before  # it was a copy that was asked
    assert not req.finished()
    return found


def test_all_is_kept_if_nothing_ends():
    assert kept(sglang_request("xy", stop=["no"]), "abc") == (3, None)


def test_the_stop_string_that_comes_first_ends_a_request():
    """Of two in one step SGLang would take the one that is listed first, and keep both."""
    req = sglang_request("x", stop=["d", "b"])
    assert kept(req, "abcde") == (2, FinishReason.STOP)
    # the twin: SGLang's own look at all tokens of the step
    req.output_ids += [ord(c) for c in "abcde"]
    if hasattr(req, "check_finished"):
        req.check_finished(5)
    else:
        req.update_finish_state(5)
    assert isinstance(req.finished_reason, FINISH_MATCHED_STR)
    assert req.finished_reason.matched == "d"


def test_a_stop_string_may_begin_in_the_step_before():
    assert kept(sglang_request("xa", stop=["abc"]), "bcd") == (2, FinishReason.STOP)


def test_length_and_end_of_text():
    assert kept(sglang_request("abcd", max_new_tokens=6), "xyz") == (2, FinishReason.LENGTH)
    assert kept(sglang_request(), "ab\0cd") == (3, FinishReason.STOP)


def test_requests_without_a_token_send_nothing(monkeypatch):
    """Retracted while its prompt was read: SGLang would count its first logprob as sent."""
    speaks, waits, ended = sglang_request("ab"), sglang_request(), sglang_request()
    ended.finished_reason = FINISH_LENGTH(0)
    reqs, sent = [speaks, waits, ended], []

    def stream():
        HOOKS.stream_output(lambda their, reqs, *_: sent.append(reqs), None, reqs, True)
        return sent.pop()

    monkeypatch.setattr(type(HOOKS), "chosen_args", lambda self: None)
    assert stream() == reqs  # not chosen: SGLang's own way
    monkeypatch.setattr(type(HOOKS), "chosen_args", lambda self: object())
    assert stream() == [speaks, ended]


def test_prompt_logprobs_go_to_their_requests(monkeypatch):
    """Three prompts of 2, 3 and 2 tokens. The second request was retracted while they were read."""
    monkeypatch.setattr(type(HOOKS), "chosen_args", lambda self: object())
    reqs = [sglang_request(), sglang_request(), sglang_request()]
    batch = SimpleNamespace(reqs=reqs, return_logprob=True)

    def kept():
        output = SimpleNamespace(input_token_logprobs=torch.arange(7.0))
        result = SimpleNamespace(logits_output=output, copy_done=None)
        result.extend_input_len_per_req = [2, 5, 2]
        result.extend_logprob_start_len_per_req = [0, 2, 0]
        HOOKS.keep_prompt_logprobs(None, batch, result)
        return output.input_token_logprobs.tolist()

    assert kept() == [0, 1, 2, 3, 4, 5, 6]
    reqs[1].is_retracted = True
    assert kept() == [0, 1, 5, 6]  # SGLang gives the third what follows the first
    reqs[0].finished_reason = FINISH_LENGTH(0)
    assert kept() == [5, 6]


class Grammar:
    """Allows "ab" and ends with it."""

    def __init__(self):
        self.read, self.finished = "", False

    def accept_token(self, token):
        if not "ab".startswith(self.read + chr(token)):
            raise ValueError(token)
        self.read += chr(token)

    def rollback(self, count):
        self.read = self.read[: len(self.read) - count]

    def is_terminated(self):
        return self.read == "ab"


def test_a_grammar_is_asked_and_put_back():
    req = sglang_request(grammar=Grammar())
    # the next token would end the request: in a step of its own, as in plain decoding
    assert kept(req, "abc") == (2, None)
    assert kept(req, "axc") == (2, None)  # SGLang will meet the same
    assert req.grammar.read == ""


# -- a step in flight


def request(number, length=4, **req):
    fields = {"finished": lambda: False, "is_retracted": False, "output_ids": []}
    made = SimpleNamespace(**fields | req)
    made.kv = made  # where 0.5.23 has what 0.5.11 has in the request
    return SimpleNamespace(id=number, length=length, finish_reason=None, output=[], req=made)


def launched(drafts, *requests):
    """Return a launched step. drafts: of each request"""
    proposal = Proposal.of([chain(draft) for draft in drafts])
    return launched_with(proposal, *requests)


def launched_with(proposal, *requests):
    lens = np.array([request.length - 1 for request in requests])
    members = Members(list(requests), np.arange(len(lens)), lens, None)
    decision = Plain()
    if len(proposal.parents):
        decision = CpuDrafts(proposal, ["ngram"] * len(requests))
    return Launched(members, decision, early=False, ticket=None, clock=StepClock(None))


def settled(step, outcomes):
    """Return a settled step; requests that ended before it have no outcome."""
    running = step.running()
    tokens = torch.zeros(len(step.requests) + int(step.num_drafts().sum()), dtype=torch.int64)
    return Settled(step, running, step.read(tokens, running)[1], Outcomes.of(outcomes))


def test_what_is_emitted_for_ended_requests_is_discarded():
    a, b, c = request(0), request(1), request(2)
    step, fetched = launched([[], [], []], a, b, c), torch.tensor([7, 8, 9])

    def emitted():
        """Return the requests that still run, and what was emitted for them."""
        running = step.running()
        tokens, proposal, _ = step.read(fetched, running)
        assert proposal.num_rows == len(running)
        return step.members.take(running), tokens.tolist()

    assert emitted()[1] == [7, 8, 9]
    b.finish_reason = FinishReason.STOP
    members, tokens = emitted()
    assert members.requests == [a, c]
    assert members.places.tolist() == [0, 2]
    assert tokens == [7, 9]
    assert emitted()[1] == [7, 9]
    a.finish_reason = FinishReason.LENGTH
    assert emitted()[1] == [9]


def test_logprobs_stand_where_sglang_looks():
    a, b = request(0), request(1)
    done = [Outcome(a, (5, 9), (0, 1), 2, 1, None), Outcome(b, (8,), (0,), 0, 0, None)]
    output = SimpleNamespace(**dict.fromkeys(finish.LOGPROB_LISTS))
    output.next_token_logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    output.next_token_top_logprobs_val = [torch.tensor([float(i)]) for i in range(4)]
    order_logprobs(settled(launched([[5, 6], []], a, b), done), output, 3)
    assert output.next_token_logprobs.tolist() == [[-1, -2], [-4, 0], [0, 0]]
    found = [v.tolist() for v in output.next_token_top_logprobs_val]
    assert found == [[0.0], [1.0], [3.0], [], [], []]


def test_a_retracted_prompt_forgets_its_first_attempt():
    def req(done):
        kept = {f"temp_input_token_ids_logprobs_{name}": [1.0] for name in ("val", "idx")}
        return SimpleNamespace(input_token_logprobs=done, **kept)

    begins, goes_on = req(None), req([-1.0])
    named = [[1, 13], None]
    plain = SimpleNamespace(token_ids_logprobs=named[:], reqs=[begins, goes_on])
    mend_prompt_logprobs(plain)
    assert plain.token_ids_logprobs == [[1, 13], []]
    assert begins.temp_input_token_ids_logprobs_val is None
    assert goes_on.temp_input_token_ids_logprobs_val == [1.0]
    nobody = SimpleNamespace(token_ids_logprobs=[None, None], reqs=[begins, goes_on])
    mend_prompt_logprobs(nobody)
    assert nobody.token_ids_logprobs == [None, None]


def test_hidden_states_are_those_of_the_request_after_others_ended():
    a, b = request(0), request(1, return_hidden_states=True, hidden_states=[])
    step = launched([[], []], a, b)
    a.finish_reason = FinishReason.STOP
    found = settled(step, [Outcome(b, (8,), (0,), 0, 0, None)])
    assert found.kept_rows().tolist() == [1]
    output = SimpleNamespace(hidden_states=torch.tensor([[1.0], [2.0]]))
    b.req.is_retracted = True
    attach_hidden(found, output)
    assert b.req.hidden_states == []  # it has left
    b.req.is_retracted = False
    attach_hidden(found, output)
    assert b.req.hidden_states == [[2.0]]
    b.req.return_hidden_states = "last"  # 0.5.23: no more than that of the last token
    b.req.hidden_states = [[7.0]]
    attach_hidden(found, output)
    assert b.req.hidden_states == [[2.0]]


def test_a_trees_path_is_put_in_order():
    """Rows 0, 2 were kept: the slot of row 2 moves to the place of row 1, and none is lost."""
    table = torch.zeros(2, 16, dtype=torch.int32)
    table[1, 3:6] = torch.tensor([10, 11, 12])

    class Pool:
        req_to_token = table

        def write(self, index, values):
            table[index] = values

    runner = SimpleNamespace(device="cpu", req_to_token_pool=Pool())
    a = request(0, req_pool_idx=1)
    gone = request(1, req_pool_idx=0, is_retracted=True)
    proposal = Proposal.unclaimed([5, 6, 5, 6], [2, 2], [-1, -1, -1, -1])
    assert not proposal.is_chain
    done = [Outcome(r, (6, 9), (0, 2), 2, 1, None) for r in (a, gone)]
    order_slots(settled(launched_with(proposal, a, gone), done), VERSION, runner, None)
    assert table[1, 3:6].tolist() == [10, 12, 11]
    assert not table[0].any()


class Table:
    """A table of 3 requests with so many cached tokens, and an allocator of pages."""

    def __init__(self, monkeypatch, page_size, lengths, width, slots_ahead=0):
        monkeypatch.setattr(slots, "SLOTS_AHEAD", slots_ahead)
        self.page_size, self.taken, self.left = page_size, 0, 10_000
        cached = lambda reqs: np.array([req.kv_committed_len for req in reqs])  # noqa: E731
        self.slots = Slots(VERSION, cached)
        self.req_to_token = torch.zeros(3, width, dtype=torch.int32)
        monkeypatch.setattr(type(VERSION), "alloc_slots", lambda _, cache, count: self.take(count))
        for row, length in enumerate(lengths):
            pages = self.take(-(-length // page_size) * page_size)
            self.req_to_token[row, :length] = pages[:length]
        monkeypatch.setattr(type(VERSION), "slots_per_step", lambda self: 13)
        params = SimpleNamespace(max_new_tokens=1000)
        self.reqs = [
            request(
                n,
                kv_allocated_len=n,
                kv_committed_len=n,
                decode_batch_idx=0,
                origin_input_ids=[0] * n,
                sampling_params=params,
            ).req
            for n in lengths
        ]

    def available_size(self):
        return self.left

    def evictable_size(self):
        return 0

    def free(self, slots):
        self.left += len(slots)

    def take(self, count):
        assert count % self.page_size == 0
        assert count <= self.left
        self.taken, self.left = self.taken + count, self.left - count
        return torch.arange(self.taken - count, self.taken) + self.page_size

    def write(self, index, values):
        self.req_to_token[index] = values

    def batch(self):
        return SimpleNamespace(
            reqs=self.reqs, req_to_token_pool=self, token_to_kv_pool_allocator=self, device="cpu",
            tree_cache=self, req_pool_indices=torch.arange(3),
        )  # fmt: skip

    def prepare(self):
        lens = torch.tensor([req.kv_committed_len for req in self.reqs])
        Carried(self.slots, lens, lens).prepare_for_decode(self.batch())
        return [req.kv_allocated_len for req in self.reqs]


@pytest.mark.parametrize("size", [1, 4])
def test_slots_are_allocated_for_several_steps_while_the_pool_has_many(size, monkeypatch):
    table = Table(monkeypatch, size, (10, 30, 40), 400, slots_ahead=slots.SLOTS_AHEAD)
    allocations = 0
    for _ in range(40):
        before = table.taken
        lens = table.prepare()
        allocations += table.taken > before
        for req, held in zip(table.reqs, lens, strict=True):
            assert req.kv_committed_len + 2 * 13 <= held
            req.kv_committed_len += 1
    assert allocations <= 40 // slots.SLOTS_AHEAD + 1
    table.left = 100
    table.reqs[0].kv_committed_len = table.reqs[0].kv_allocated_len - 26 + 1
    held = table.reqs[0].kv_allocated_len
    assert table.prepare()[0] <= held + size, "no more than it needs from a pool with few"


@pytest.mark.parametrize(("size", "lens"), [(1, [36, 40, 40]), (4, [36, 40, 40]), (16, [40] * 3)])
def test_near_the_end_of_the_context_no_slot_lies_beyond_the_row(size, lens, monkeypatch):
    """Slots of two steps are 2 (K + 1), and a row of the table has 4 + K behind the context."""
    table = Table(monkeypatch, size, (10, 30, 40), 40)
    assert table.prepare() == lens
    assert [req.kv_committed_len for req in table.reqs] == [10, 30, 40]
    assert [int((row > 0).sum()) for row in table.req_to_token] == lens


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_a_page_holds_positions_of_one_request_in_their_order(size, monkeypatch):
    table, seen = Table(monkeypatch, size, (7, 16, 33), 256), {}
    for _ in range(8):
        lens = table.prepare()
        for req in table.reqs:
            req.kv_committed_len += 5
    assert table.taken == sum(-(-n // size) * size for n in lens), "as many pages as it takes"
    for row, length in enumerate(lens):
        for position, slot in enumerate(table.req_to_token[row, :length].tolist()):
            assert slot % size == position % size
            assert seen.setdefault(slot // size, (row, position // size)) == (row, position // size)


@pytest.mark.parametrize("size", [1, 4])
def test_a_pool_without_room_for_drafts_serves_what_plain_decoding_serves(size, monkeypatch):
    """Slots are shared out, given back where another request needs them, and never written past."""
    table = Table(monkeypatch, size, (8, 16, 32), 256)
    table.prepare()
    table.left = 0
    for req in table.reqs[:2]:
        req.kv_committed_len = req.kv_allocated_len
    needed = table.slots.required(table.batch(), table.reqs)
    assert needed == 0, "the third request holds more than it needs"
    room = table.slots.take(table.batch())
    assert room is not None
    cached = np.array([req.kv_committed_len for req in table.reqs])
    assert (room > cached).all()
    assert table.left >= 0
    for row, length in enumerate(room.tolist()):
        assert (table.req_to_token[row, :length] > 0).all()
        assert not table.req_to_token[row, length : length + 26].any(), "these go to padding"
    assert room[2] < 32 + 26


def test_a_request_that_cannot_have_one_more_slot_is_retracted(monkeypatch):
    table = Table(monkeypatch, 1, (8, 16, 32), 256)
    table.left = 3
    assert table.slots.required(table.batch(), table.reqs) == 3
    table.left = 2
    assert table.slots.required(table.batch(), table.reqs) > table.available_size()


# -- on a real server

TIGHT = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--context-length", "96"),
    *("--enable-deterministic-inference", "--speculative-algorithm", "OUTRIDER"),
    *("--speculative-num-steps", "12", "--allow-auto-truncate"),
]


IN_TURN = ["--disable-overlap-schedule"]
"""SGLang 0.5.23 runs the same worker in turn; 0.5.11 has another contract for that."""


@pytest.fixture(
    scope="module", params=[[], IN_TURN] if VERSION.contract.VERSION > "0.5.11" else [[]]
)
def server(request, launch, model_dir, profile):
    flags, drafts = request.param, profile(drafter="ngram")
    model = model_dir("stories260k")
    return launch(f"overlap{len(flags)}", model, *TIGHT, *flags, **drafts).wait()


def test_at_the_end_of_the_context(server):
    """K = 12, and a text that repeats itself, up to the last token that fits."""
    text = "The dog saw a cat. The cat saw a dog. The dog saw a cat. The cat saw a dog. The"
    answers = []
    for wishes in ({"max_drafts": 0}, {}):
        params = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
        bodies = [
            {"text": text[i:], "sampling_params": params | {"custom_params": {"outrider": wishes}}}
            for i in range(4)
        ]
        found = server.ask_all([("/generate", body) for body in bodies], 4)
        answers.append([workload.essence(a) for a in found])
        drafted = sum(proposed(a["meta_info"]) for a in found)
        assert (drafted > 0) == (wishes == {})
        assert all(a["meta_info"]["finish_reason"]["type"] == "length" for a in found)
    assert answers[0] == answers[1]


def test_length_is_what_sglang_calls_it():
    assert issubclass(FINISH_LENGTH, schedule_batch.BaseFinishReason)
