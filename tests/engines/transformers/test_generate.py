"""`generate` and `stream` as a user calls them, on the models in the repo."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from adversaries import RandomDrafter, shallow
from transformers import AutoModelForCausalLM

import outrider
from outrider.clients import Query, open_engine
from outrider.core import FinishReason
from outrider.drafters import ModelDrafter
from outrider.engines.transformers import NAME, Runner, TransformersHost

TINY = Path(outrider.__file__).parent / "assets" / "tiny"


def hf_greedy(model, prompt, length=60):
    out = model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
@pytest.mark.parametrize("which", ["none", "ngram", "suffix", "draft"])
def test_greedy_is_that_of_transformers(pair, which, exactness):
    target, draft, tok, prompts = pair
    done = outrider.generate(
        target,
        prompts,
        drafter=draft if which == "draft" else which,
        sampling={"max_tokens": 60},
        exactness=exactness,
    )
    assert done.outputs == [hf_greedy(target, prompt) for prompt in prompts]
    assert done.stats.accepted > 0 or which in ("none", "suffix")  # too short for a suffix
    assert not done.stats.fallbacks


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
def test_control_decides_how_much_and_nothing_else(pair, exactness):
    """Free drafters alone, and beside a draft model."""
    target, draft, tok, prompts = pair
    beside = outrider.adaptive(target, draft)
    for drafter in ("adaptive", beside):
        done = outrider.generate(
            target, prompts, drafter=drafter, sampling={"max_tokens": 60}, exactness=exactness
        )
        assert done.outputs == [hf_greedy(target, prompt) for prompt in prompts]
        assert not done.stats.fallbacks
        assert done.stats.drafted > 0
    assert beside.control.models["model"].cost.passes.seconds(1)


def test_control_brings_what_it_has_learnt(pair):
    """A drafter that is kept knows in the next call how long passes take, and what is accepted."""
    target, draft, tok, prompts = pair
    drafter = outrider.adaptive(target, draft)

    def chance():
        known = drafter.control.acceptance
        return known["model"].first.of(known.rows(["new"]), np.array([0.97])).item()

    fresh = chance()
    outrider.generate(target, prompts, drafter=drafter, sampling={"max_tokens": 40})
    assert drafter.control.cost.verify.has_seen(len(prompts))
    assert chance() != fresh
    again = outrider.generate(target, prompts, drafter=drafter, sampling={"max_tokens": 40})
    assert again.outputs == [hf_greedy(target, prompt)[:40] for prompt in prompts]


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_other_rules_run_and_accept(pair, rule):
    target, draft, tok, prompts = pair
    torch.manual_seed(0)
    sampling = {"temperature": 0.8, "max_tokens": 50, "ignore_eos": True}
    done = outrider.generate(target, prompts, drafter=draft, sampling=sampling, rule=rule)
    assert [len(output) for output in done.outputs] == [50] * 3
    assert done.stats.acceptance_rate > 0.3
    assert not done.stats.fallbacks


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_greedy_under_other_rules(pair, rule):
    target, draft, tok, prompts = pair
    done = outrider.generate(target, prompts, drafter=draft, sampling={"max_tokens": 60}, rule=rule)
    assert done.outputs == [hf_greedy(target, prompt) for prompt in prompts]


def test_shared_coins_beat_independent_drafts(pair, monkeypatch):
    """At T = 1 a draft drawn with the target's coins is accepted more often than without."""
    target, draft, tok, prompts = pair
    params = {"temperature": 1.0, "max_tokens": 80, "ignore_eos": True}
    sampling = [params | {"seed": seed} for seed in (1, 2, 3)]

    def run():
        drafter = ModelDrafter(Runner(draft), target.config.vocab_size, min_survival=0.0)
        return outrider.generate(target, prompts, drafter=drafter, sampling=sampling, max_drafts=3)

    shared = run()
    monkeypatch.setattr(outrider.core.Budget, "draft_seeds", lambda self, seeds, starts: seeds + 1)
    independent = run()
    assert shared.outputs == independent.outputs
    assert shared.stats.acceptance_rate > 1.2 * independent.stats.acceptance_rate


def test_seed(pair):
    target, draft, tok, prompts = pair
    sampling = {"temperature": 1.0, "max_tokens": 30}

    def run(**more):
        return outrider.generate(target, prompts[:1], sampling=sampling | more).outputs[0]

    assert run(seed=5) == run(seed=5) != run(seed=6)
    torch.manual_seed(1)
    first = run()
    torch.manual_seed(1)
    assert run() == first


def test_stop_string_and_reasons(pair):
    target, draft, tok, prompts = pair
    long = outrider.generate(target, prompts[:1], sampling={"max_tokens": 60})
    text = tok.decode(long.outputs[0])
    word = text.split()[6]
    done = outrider.generate(
        target, prompts[:1], drafter=draft, sampling={"max_tokens": 60, "stop": word}, tokenizer=tok
    )
    assert done.finish_reasons == [FinishReason.STOP]
    assert word in tok.decode(done.outputs[0])
    assert done.outputs[0] == long.outputs[0][: len(done.outputs[0])]
    assert word not in tok.decode(done.outputs[0][:-1])


def test_logprobs(pair):
    target, draft, tok, prompts = pair
    params = {"max_tokens": 20, "logprobs": 3}
    done = outrider.generate(target, prompts[:2], drafter=draft, sampling=params)
    for prompt, output, entries in zip(prompts, done.outputs, done.logprobs, strict=False):
        with torch.inference_mode():
            logits = target(torch.tensor([[*prompt, *output]])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert len(entries) == len(output)
        for entry, token, row in zip(entries, output, expected, strict=True):
            assert entry.token == pytest.approx(row[token].item(), abs=1e-4)
            assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
            assert entry.top[0][1] == pytest.approx(row.max().item(), abs=1e-4)
    assert outrider.generate(target, prompts[:1], sampling={"max_tokens": 3}).logprobs == [[]]


def test_stream_yields_what_generate_returns(pair):
    target, draft, tok, prompts = pair
    run = outrider.stream(target, prompts, drafter=draft, sampling={"max_tokens": 40})
    outputs: list[list[int]] = [[] for _ in prompts]
    for event in run:
        for i, outcome in zip(event.indices, event.outcomes, strict=True):
            outputs[i] += outcome.tokens
        assert run.result.outputs == outputs
    done = outrider.generate(target, prompts, drafter=draft, sampling={"max_tokens": 40})
    assert outputs == done.outputs
    assert done.sequences == [[*p, *o] for p, o in zip(prompts, outputs, strict=True)]
    with pytest.raises(StopIteration):
        next(run)


def test_abandoned_stream_gives_its_slots_back(pair, monkeypatch):
    target, draft, tok, prompts = pair
    hosts = []
    original = TransformersHost.__init__

    def spy(self, *args):
        original(self, *args)
        hosts.append(self)

    monkeypatch.setattr(TransformersHost, "__init__", spy)
    run = outrider.stream(target, prompts, drafter=draft, sampling={"max_tokens": 40})
    next(run)
    assert hosts[0].runner.pool.used_pages > 0
    run.close()
    assert hosts[0].runner.pool.used_pages == 0
    outrider.generate(target, prompts, sampling={"max_tokens": 300})  # grows, then gives all back
    assert hosts[1].runner.pool.used_pages == 0


ABANDONED = """
import sys, outrider
from transformers import AutoModelForCausalLM
target, draft = (AutoModelForCausalLM.from_pretrained(path).eval() for path in sys.argv[1:])
run = outrider.stream(target, [47, 78, 259], drafter=draft, sampling={"max_tokens": 20})
next(run)
"""


def test_a_program_may_end_in_the_middle_of_a_stream():
    """Python closes the stream when torch no longer works."""
    models = [str(TINY / name) for name in ("target", "draft")]
    done = subprocess.run([sys.executable, "-c", ABANDONED, *models], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_model_is_left_as_it_was(pair):
    target, draft, tok, prompts = pair
    before = target.config._attn_implementation
    expected = hf_greedy(target, prompts[0])
    outrider.generate(target, prompts, drafter=draft, sampling={"max_tokens": 5})
    assert target.config._attn_implementation == before
    assert hf_greedy(target, prompts[0]) == expected


def test_model_loaded_with_our_attention(pair):
    """`attn_implementation="outrider"` is `sdpa` outside our passes."""
    target, draft, tok, prompts = pair
    own = AutoModelForCausalLM.from_pretrained(
        target.config.name_or_path, dtype=torch.float32, attn_implementation=NAME
    ).eval()
    assert hf_greedy(own, prompts[0]) == hf_greedy(target, prompts[0])
    done = outrider.generate(own, prompts[:1], sampling={"max_tokens": 60})
    assert done.outputs[0] == hf_greedy(target, prompts[0])


def test_one_prompt_in_every_form(pair):
    target, draft, tok, prompts = pair
    one = prompts[0]
    forms = [one, [one], (tuple(one),), np.array(one), np.array([one]), [np.array(one)]]
    forms += [torch.tensor(one), torch.tensor([one]), [torch.tensor(one)]]
    outputs = [outrider.generate(target, f, sampling={"max_tokens": 9}).outputs for f in forms]
    assert outputs == [outputs[0]] * len(forms)


def test_draft_shorter_than_the_text(pair):
    """A draft model with a short context stops drafting; the request goes on."""
    target, draft, tok, prompts = pair
    runner = Runner(draft)
    runner.max_length = 20
    drafter = ModelDrafter(runner, target.config.vocab_size)
    done = outrider.generate(target, prompts, drafter=drafter, sampling={"max_tokens": 60})
    assert done.outputs == [hf_greedy(target, prompt) for prompt in prompts]
    assert 0 < done.stats.drafted < 60
    assert not done.stats.fallbacks


def test_draft_of_another_vocabulary_size(pair):
    """Padded-size twins are fine: more or fewer rows of logits than the target's."""
    target, draft, tok, prompts = pair
    for size in (target.config.vocab_size + 64, target.config.vocab_size - 8):
        small = shallow(target, 2)
        small.resize_token_embeddings(size, mean_resizing=False)
        done = outrider.generate(
            target,
            prompts,
            drafter=small.eval(),
            sampling={"max_tokens": 40},
            tokenizer=tok,
            draft_tokenizer=tok,
        )
        assert done.outputs == [hf_greedy(target, prompt, 40) for prompt in prompts]
        assert not done.stats.fallbacks
        assert done.stats.accepted > 0


def test_refusals(pair):
    target, draft, tok, prompts = pair
    refused = outrider.Unsupported
    with pytest.raises(refused, match="rule='residual'"):
        outrider.generate(target, prompts, rule="residual", exactness="bitwise")
    nameless = shallow(target, 2)
    nameless.config.name_or_path = ""
    with pytest.raises(refused, match="draft's tokenizer"):
        outrider.generate(target, prompts, drafter=nameless)
    try:
        target.train()
        with pytest.raises(refused, match=r"model\.eval"):
            outrider.generate(target, prompts)
    finally:
        target.eval()


@pytest.mark.parametrize("value", ["bitwize", "Lossless", "Law", "", None, True, 1])
@pytest.mark.parametrize("option", ["exactness", "rule"])
def test_an_option_with_few_values_takes_no_other(pair, option, value):
    target, draft, tok, prompts = pair
    with pytest.raises(outrider.Unsupported, match=f"{option}={value!r}; choose one of "):
        outrider.stream(target, prompts, **{option: value})
    if option == "exactness":
        for edge in (Runner, TransformersHost):
            with pytest.raises(outrider.Unsupported, match="choose one of lossless, bitwise"):
                edge(target, value)


def test_law_is_the_old_name_of_lossless(pair, model_dir):
    """Wherever a user may give it: in calls, in `custom_generate`, among an engine's options."""
    target, draft, tok, prompts = pair
    assert Runner(target).exactness == Runner(target, "law").exactness == "lossless"
    plain = hf_greedy(target, prompts[0], 12)
    done = outrider.generate(target, prompts[0], sampling={"max_tokens": 12}, exactness="law")
    assert done.outputs == [plain]
    own = {"custom_generate": outrider.custom_generate, "exactness": "law"}
    ids = torch.tensor([prompts[0]])
    found = target.generate(ids, max_new_tokens=12, do_sample=False, **own)
    assert found[0, len(prompts[0]) :].tolist() == plain
    spec = f"transformers:{model_dir('tiny-target')}#drafter=ngram,exactness="
    answers = []
    for name in ("law", "lossless"):
        engine = open_engine(spec + name)
        answers += engine.ask([Query("The outrider of Dale was", chat=False, max_tokens=12)])
        engine.close()
    assert answers[0].text == answers[1].text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafter": "eagle"}, outrider.Unsupported, "'eagle'; choose one of adaptive, .*ngram"),
        ({"drafter": ""}, outrider.Unsupported, "drafter ''; choose one of adaptive"),
        ({"drafter": 5}, TypeError, "drafter is int: pass a name, a Transformers model, or"),
        ({"drafter": outrider.SuffixDrafter}, TypeError, "drafter is the class SuffixDrafter"),
        ({"max_drafts": -1}, ValueError, "max_drafts must be a whole number >= 0, not -1"),
        ({"max_drafts": 2.5}, ValueError, "max_drafts must be a whole number >= 0, not 2.5"),
        ({"max_drafts": "8"}, ValueError, "max_drafts must be a whole number >= 0, not '8'"),
        ({"draft_timeout": 0}, ValueError, "> 0 seconds"),
        ({"draft_timeout": -1.0}, ValueError, "> 0 seconds"),
        ({"sampling": [{}, {}]}, ValueError, "2 sampling parameters for 3 prompts"),
        ({"sampling": "greedy"}, TypeError, "sampling is of type str: pass SamplingParams"),
        ({"sampling": 0.7}, TypeError, "sampling is of type float: pass SamplingParams"),
        ({"sampling": {"temprature": 1.0}}, TypeError, "temprature"),
        ({"sampling": {"max_tokens": 2.5}}, ValueError, "a whole number >= 1, not 2.5"),
        ({"sampling": {"logit_bias": {512: 1.0}}}, ValueError, "logit_bias has .* id 512, .* 511"),
        ({"sampling": {"stop_token_ids": (-0, 999)}}, ValueError, "stop_token_ids has .* id 999"),
        ({"sampling": {"logprobs": 513}}, ValueError, "logprobs=513 of a vocabulary of 512"),
        ({"sampling": {"stop": "x"}}, ValueError, "stop strings need a tokenizer"),
    ],
)
def test_wrong_options_are_refused_before_the_first_step(pair, options, error, message):
    target, draft, tok, prompts = pair
    with pytest.raises(error, match=message):
        outrider.stream(target, prompts, **options)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("The road", TypeError, r"input_ids is text: .* tokenizer\.encode\(text\)"),
        (["The road", "At"], TypeError, "prompt 0 has text at position 0: pass token ids"),
        ({"input_ids": [[1]]}, TypeError, r"is a dict: pass its ids, .* tokenizer\(texts\)\["),
        (torch.tensor([0.5, 1.0]), TypeError, "prompt 0 has float at position 0"),
        (torch.ones(1, 1, 2, dtype=torch.int64), TypeError, "prompt 0 has list at position 0"),
        ([[1, 2], [3, None]], TypeError, "prompt 1 has NoneType at position 1"),
        ([[5, 512]], ValueError, "prompt 0 has the token id 512, and the model's ids are 0 to 511"),
        ([[5], [-1]], ValueError, "prompt 1 has the token id -1"),
        ([[]], ValueError, "at least one token"),
        ([[5] * 500], outrider.Unsupported, "500 tokens .* lower max_tokens to 12 or less"),
        ([[5] * 512], outrider.Unsupported, "shorten the prompt to fewer than 512 tokens"),
        ([[5] * 600], outrider.Unsupported, "600 tokens .* 512 positions; shorten the prompt"),
    ],
)
def test_what_is_no_prompt_is_refused(pair, prompt, error, message):
    target, draft, tok, prompts = pair
    with pytest.raises(error, match=message):
        outrider.stream(target, prompt)


def test_other_mistakes_that_people_make(pair):
    target, draft, tok, prompts = pair
    with pytest.raises(TypeError, match="is a BatchEncoding: pass its ids"):
        outrider.generate(target, tok(["The road", "At"]))
    with pytest.raises(TypeError, match="model is of type str: load it"):
        outrider.generate("gpt2", prompts)
    with pytest.raises(ValueError, match="min_survival"):
        ModelDrafter(Runner(draft), 512, min_survival=2.0)
    with pytest.raises(ValueError, match="siblings"):
        ModelDrafter(Runner(draft), 512, siblings=-1)
    assert outrider.generate(target, []).outputs == []


@pytest.mark.models
def test_drafter_of_another_tokenizer_is_refused(pair, load):
    target, draft, tok, prompts = pair
    other = load("stories260k")
    with pytest.raises(outrider.Unsupported, match="tokenizer differs"):
        outrider.generate(target, prompts, drafter=other)


def test_adversary_costs_speed_only(pair):
    target, draft, tok, prompts = pair
    done = outrider.generate(
        target, prompts, drafter=RandomDrafter(512), sampling={"max_tokens": 30}, max_drafts=20
    )
    assert done.outputs == [hf_greedy(target, prompt, 30) for prompt in prompts]
    assert done.stats.acceptance_rate < 0.05


class Faulty(RandomDrafter):
    """Fails in its own way at every third step."""

    def __init__(self, fault):
        super().__init__(512)
        self.fault, self.steps = fault, 0

    def propose(self, requests, budget):
        self.steps += 1
        if self.steps % 3 == 0:
            self.fault()
        return super().propose(requests, budget)


def out_of_memory():
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(out_of_memory, "error"), (lambda: time.sleep(0.3), "timeout")],
    ids=["out of memory", "hanging"],
)
def test_faults_cost_speed_only(pair, fault, reason):
    target, draft, tok, prompts = pair
    drafter = Faulty(fault)
    sampling = {"max_tokens": 20}
    done = outrider.generate(target, prompts, drafter=drafter, sampling=sampling, draft_timeout=0.2)
    assert done.outputs == [hf_greedy(target, prompt, 20) for prompt in prompts]
    assert done.stats.fallbacks[reason] >= 3
    assert done.stats.drafted > 0


def test_garbage_costs_speed_only(pair):
    target, draft, tok, prompts = pair
    done = outrider.generate(
        target, prompts, drafter=RandomDrafter(10**6), sampling={"max_tokens": 20}
    )
    assert done.outputs == [hf_greedy(target, prompt, 20) for prompt in prompts]
    assert done.stats.fallbacks["garbage"] > 0


def test_control_takes_models_not_names(target):
    with pytest.raises(TypeError, match="draft is str: pass a Transformers model"):
        outrider.adaptive(target, "a/draft")
