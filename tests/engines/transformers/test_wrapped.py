"""Models in wrappings: compiled, offloaded, with adapters, with a forward of their own."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from tiny_models import ids, plain, tiny

import outrider

PROMPTS = [ids(6), ids(14, 2)]
SAMPLING = {"max_tokens": 40}


def whole(model):
    return torch.compile(model, backend="eager")


def its_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def in_place(model):
    model.compile(backend="eager")
    return model


def each_layer(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole, its_forward, in_place, each_layer])
def test_a_compiled_model_is_served(compiled):
    """Its own forward stays compiled; ours is not."""
    expected = plain(tiny("Llama"), PROMPTS, 40)
    model = compiled(tiny("Llama"))
    for drafter in ("ngram", model):
        found = outrider.generate(model, PROMPTS, drafter=drafter, sampling=SAMPLING)
        assert found.outputs == expected


def test_a_model_that_is_not_loaded_is_refused():
    with torch.device("meta"):
        model = tiny("Llama")
    with pytest.raises(outrider.Unsupported, match="offloaded, or not loaded"):
        outrider.generate(model, PROMPTS)


def test_offloaded_models_are_refused_and_hooks_on_one_device_are_served():
    accelerate = pytest.importorskip("accelerate")
    model = tiny("Llama")
    expected = plain(model, PROMPTS, 40)
    accelerate.cpu_offload(model, torch.device("cpu"))
    with pytest.raises(outrider.Unsupported, match="offloaded"):
        outrider.generate(model, PROMPTS)
    model = tiny("Llama")
    accelerate.hooks.attach_align_device_hook(model, torch.device("cpu"))
    found = outrider.generate(model, PROMPTS, drafter=model, sampling=SAMPLING)
    assert found.outputs == expected


def test_a_forward_of_the_module_is_used():
    """A method that a library put on a module counts as the module's; others are refused."""
    model = tiny("Llama")
    layer = model.model.layers[0].mlp
    layer.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), layer)
    found = outrider.generate(model, PROMPTS, drafter=model, sampling=SAMPLING)
    assert found.outputs == plain(model, PROMPTS, 40)
    layer.forward = lambda x: x
    with pytest.raises(outrider.Unsupported, match="LlamaMLP whose forward was replaced"):
        outrider.generate(model, PROMPTS)


def lora(model, **config):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    return adapted


def test_a_peft_model_is_a_target_and_a_drafter(tokenizer):
    base = tiny("Llama")
    expected = plain(base, PROMPTS, 40)
    model = lora(tiny("Llama"))
    adapted = plain(model, PROMPTS, 40)
    assert adapted != expected
    options = {"sampling": SAMPLING, "drafter": model}
    options |= dict.fromkeys(("tokenizer", "draft_tokenizer"), tokenizer("tiny-target"))
    assert outrider.generate(model, PROMPTS, **options).outputs == adapted
    assert outrider.generate(base, PROMPTS, **options).outputs == expected

    with model.disable_adapter():
        assert outrider.generate(model, PROMPTS, **options).outputs == expected


def test_a_prompt_adapter_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("Llama"), config)
    with pytest.raises(outrider.Unsupported, match="prompt adapter"):
        outrider.generate(model, PROMPTS)
