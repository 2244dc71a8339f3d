"""A view of a model: its modules and weights, with a configuration of its own.

The attention of a Transformers model is chosen by its configuration. Outrider runs a view whose
configuration names Outrider's attention, so the model itself stays as it is: other threads may use
it meanwhile, plainly or with views of their own.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outrider.core import Unsupported

_OWN = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Tables of a module that Transformers writes to while the model runs: a view has copies."""


def unwrapped(model: Any) -> Any:
    """Return the Transformers model within what torch.compile or PEFT put around it."""
    while True:
        if "_orig_mod" in getattr(model, "_modules", {}):  # torch.compile
            model = model._orig_mod
        # a model of Transformers has its adapters in itself
        elif hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel):
            prompts = [
                kind
                for kind, config in model.peft_config.items()
                if getattr(config, "is_prompt_learning", False)
            ]
            if prompts:
                raise Unsupported(
                    f"{type(model).__name__} with the prompt adapter {prompts[0]!r}",
                    fix="use adapters that change the weights, such as LoRA",
                )
            model = model.get_base_model()
        else:
            return model


def model_view(model: PreTrainedModel, attention: str | None = None) -> PreTrainedModel:
    """Return a view of the model: running it changes nothing that the model's other users see.

    Weights and buffers are the model's own, so a view is small and is never out of date for them.
    It runs modules as their classes define them, without torch.compile.

    attention: the implementation to use, or None for the model's own
    """
    _check_devices(model)
    modules = list(model.modules())
    copies: dict[int, Any] = {}  # of configurations, by the id of what they were made from
    for module in modules:
        config = module.__dict__.get("config")
        if isinstance(config, PretrainedConfig) and id(config) not in copies:
            copies[id(config)] = copy.deepcopy(config, copies)
    if attention is not None:
        for made in list(copies.values()):
            if isinstance(made, PretrainedConfig):
                made._attn_implementation = attention
    views = {id(module): object.__new__(type(module)) for module in modules}
    for module in modules:
        views[id(module)].__dict__.update(_attributes(module, views, copies))
    return views[id(model)]


def _attributes(module: nn.Module, views: dict[int, Any], copies: dict[int, Any]) -> dict[str, Any]:
    """Return what a module's view has in place of the module's attributes."""
    found = dict(module.__dict__)
    if "forward" in found:
        _restore_forward(module, found)
    for name, value in found.items():
        if isinstance(value, PretrainedConfig):
            found[name] = copies.get(id(value), value)
        elif isinstance(value, MethodType) and id(value.__self__) in views:
            found[name] = MethodType(value.__func__, views[id(value.__self__)])
    found["_modules"] = {
        name: None if child is None else views[id(child)] for name, child in module._modules.items()
    }
    found["_compiled_call_impl"] = None
    found |= {name: copy.copy(found[name]) for name in _OWN if name in found}
    if hasattr(module, "rope_type"):  # some write their frequencies while they run
        found["_buffers"] = dict(module._buffers)
    return found


def _restore_forward(module: nn.Module, found: dict[str, Any]) -> None:
    """Leave out a forward that was put around that of the module's class, or refuse it."""
    forward = found["forward"]
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)  # torch.compile
    if "_hf_hook" in found:  # accelerate; all weights are on one device: nothing is to be moved
        forward = found.pop("_old_forward", None)
        del found["_hf_hook"]
    if isinstance(forward, MethodType) and forward.__self__ is module:
        found["forward"] = forward
    elif forward is None:
        del found["forward"]
    else:
        raise Unsupported(
            f"{type(module).__name__} whose forward was replaced by {type(forward).__name__}",
            fix="replace it in the class, or by a method of the module",
        )


def _check_devices(model: PreTrainedModel) -> None:
    devices = {tensor.device for tensor in model.parameters()}
    if torch.device("meta") in devices:
        raise Unsupported(
            f"{type(model).__name__} with weights that are offloaded, or not loaded",
            fix="load the whole model to one device: leave device_map and offloading out",
        )
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(
            f"{type(model).__name__} on several devices ({names})",
            fix="load the whole model to one device",
        )
