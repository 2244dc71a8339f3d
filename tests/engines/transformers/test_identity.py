"""A model that is changed after its first use is compared again."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ids, plain, tiny
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import outrider
from outrider.engines.transformers import probe

PROMPTS = [ids(9), ids(20, 2), ids(1, 3)]


def mean(module, given, out):
    """Depend on which rows are in the pass."""
    return out + 0.5 * out.mean(1, keepdim=True)


def last(module, given, out):
    """Steer the last position of each pass."""
    return torch.cat([out[:, :-1], 1.7 * out[:, -1:]], 1)


def louder(module, query, key, value, mask, **kwargs):
    """Attend, and change what is found."""
    out, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return 1.5 * out + 0.2, weights


AttentionInterface.register("louder", louder)
AttentionMaskInterface.register("louder", sdpa_mask)


def change_class(model):
    class Steered(type(model.model.layers[0])):
        def forward(self, hidden_states, *args, **kwargs):
            return mean(self, None, super().forward(hidden_states, *args, **kwargs))

    model.model.layers[0].__class__ = Steered


CHANGES = {
    "a hook on all rows": lambda model: model.model.layers[0].register_forward_hook(mean),
    "a hook on the last row": lambda model: model.model.layers[0].register_forward_hook(last),
    "another attention": lambda model: model.set_attn_implementation("louder"),
    "another class": change_class,
}


@pytest.mark.parametrize("exactness", ["lossless", "bitwise"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_compared_again(name, exactness):
    model = tiny("Llama")
    options = {"sampling": {"max_tokens": 4}, "exactness": exactness}
    outrider.generate(model, PROMPTS, **options)
    undo = CHANGES[name](model)
    with pytest.raises(outrider.Unsupported, match=r"something else than Outrider|rows beside it"):
        outrider.generate(model, PROMPTS, **options)
    if undo is not None:
        undo.remove()
        expected = plain(model, PROMPTS, 4)
        assert outrider.generate(model, PROMPTS, **options).outputs == expected


def test_what_zeros_would_do_is_compared_when_they_are_no_longer_zero():
    model = tiny("Doge")
    gates = [p for name, p in model.named_parameters() if name.endswith(".A")]
    values = [gate.detach().clone() for gate in gates]
    for gate in gates:
        gate.data.zero_()
    expected = plain(model, PROMPTS, 4)
    assert outrider.generate(model, PROMPTS, sampling={"max_tokens": 4}).outputs == expected
    for gate, value in zip(gates, values, strict=True):
        gate.data.copy_(value)
    with pytest.raises(outrider.Unsupported, match="layer 0"):
        outrider.generate(model, PROMPTS, sampling={"max_tokens": 4})


def test_training_does_not_compare_again(monkeypatch):
    model, calls = tiny("Llama"), []
    compare = probe._check_values
    monkeypatch.setattr(probe, "_check_values", lambda runner: calls.append(compare(runner)))
    for _ in range(3):
        outrider.generate(model, PROMPTS, sampling={"max_tokens": 2})
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
    assert len(calls) == 1


def test_bitwise_is_proven_again():
    """A layer that is replaced after the proof is in no proof."""
    model = tiny("Llama")
    outrider.generate(model, PROMPTS, exactness="bitwise", sampling={"max_tokens": 2})
    hook = model.lm_head.register_forward_hook(lambda module, given, out: out + 1e-5 * out.shape[1])
    with pytest.raises(outrider.Unsupported, match="rows beside it"):
        outrider.generate(model, PROMPTS, exactness="bitwise", sampling={"max_tokens": 2})
    hook.remove()
