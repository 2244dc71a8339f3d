"""One model, several threads: plain `generate` and ours at once, and two of ours."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tiny_models import ids, plain, tiny

import outrider
from outrider.engines.transformers import NAME, runner

ROUNDS = 100
TOKENS = 6


def together(*works) -> list[str]:
    """Run each work ROUNDS times, all at once. Return what went wrong."""
    wrong: list[str] = []

    def repeat(work):
        for number in range(ROUNDS):
            try:
                if problem := work(number):
                    wrong.append(problem)
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def works(model, exactness="lossless"):
    prompts = [ids(6, seed) for seed in range(4)]
    expected = plain(model, prompts, TOKENS)

    def ours(number):
        found = outrider.generate(
            model,
            [prompts[number % 4]],
            drafter=model if number % 3 else "ngram",
            sampling={"max_tokens": TOKENS},
            exactness=exactness,
        )
        return "" if found.outputs[0] == expected[number % 4] else "ours is wrong"

    def bare(number):
        found = plain(model, [prompts[number % 4]], TOKENS)
        return "" if found[0] == expected[number % 4] else "plain is wrong"

    return ours, bare


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("pair", ["ours and plain", "ours and ours", "ours and bitwise"])
def test_threads_share_a_model(attention, pair):
    model = tiny("Llama", num_hidden_layers=2)
    model.set_attn_implementation(attention)
    ours, bare = works(model)
    second = {"plain": bare, "ours": ours, "bitwise": works(model, "bitwise")[0]}
    assert together(ours, second[pair.split()[-1]]) == []
    assert model.config._attn_implementation == attention


def test_twin_a_model_that_is_changed(monkeypatch):
    """The comparison can fail: with our attention named in the model's own configuration."""

    @contextmanager
    def named(config):
        config._attn_implementation = NAME
        time.sleep(0.001)  # the other thread's turn
        yield
        config._attn_implementation = "eager"

    def forward(model, view, *args, **kwargs):
        with named(model.config):
            return type(model).forward(model, *args, **kwargs)

    model = tiny("Llama", num_hidden_layers=2)
    model.set_attn_implementation("eager")
    ours, _ = works(model)
    make = runner.model_view

    def no_view(given, attention):
        view = make(given, attention)
        view.forward = partial(forward, given, view)
        return view

    monkeypatch.setattr(runner, "model_view", no_view)
    assert together(ours, ours)


def test_running_leaves_nothing_behind():
    """Not in the configuration, the modules, their hooks or buffers; hidden states are plain's."""
    model = tiny("Llama", num_hidden_layers=2)
    given = torch.tensor([ids(6)])

    def state():
        attributes = {
            name: {key: repr(value) for key, value in vars(module).items() if key != "_modules"}
            for name, module in model.named_modules()
        }
        return attributes, model.config.to_dict()

    before = state()
    outrider.generate(model, given, drafter=model, sampling={"max_tokens": 4})
    assert state() == before
    assert len(model(given, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize("change", ["weights", "dtype", "a parameter"])
def test_a_model_that_is_changed_between_calls(change):
    model, prompts = tiny("Llama"), [ids(6), ids(12, 2)]
    drafter = outrider.adaptive(model, model)
    outrider.generate(model, prompts, drafter=drafter, sampling={"max_tokens": 4})
    if change == "weights":
        model.load_state_dict(tiny("Llama", seed=1).state_dict())
    elif change == "dtype":
        model.to(torch.float64)
    else:
        model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(32, 48))
    found = outrider.generate(model, prompts, drafter=drafter, sampling={"max_tokens": 24})
    assert found.outputs == plain(model, prompts, 24)
