"""What a verdict about a model rests on: it is out of date as soon as this changes.

Weights may take other values, as in training: what a model computes of its rows stays the same. But
what weights of zero would do, such as the gates of a new adapter, could not be seen. So a verdict
also names these, and is out of date when one of them is no longer zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers import PreTrainedModel as Model
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_TABLES = ("_forward_hooks", "_forward_pre_hooks")
_METHODS = ("forward", "prepare_inputs_for_generation")


@dataclass
class Verdicts:
    """The models that passed a test, each in the state in which it did."""

    _passed: WeakKeyDictionary[Model, dict[tuple[object, ...], list[Tensor]]]

    @staticmethod
    def none() -> Verdicts:
        """Return no verdict about any model."""
        return Verdicts(WeakKeyDictionary())

    def hold(self, model: Model, *of: str) -> bool:
        """Say whether the model passed as it is now, and in these other circumstances."""
        zeros = self._passed.get(model, {}).get((*of, identity(model)))
        return zeros is not None and not any(bool(tensor.any()) for tensor in zeros)

    def add(self, model: Model, *of: str) -> None:
        """Note that the model passed."""
        key = (*of, identity(model))
        self._passed.setdefault(model, {})[key] = [p for p in model.parameters() if _is_zero(p)]


def _is_zero(parameter: Tensor) -> bool:
    # quantized weights are of other types, and cannot all be looked at
    plain = type(parameter) is nn.Parameter and parameter.dtype.itemsize > 1
    return plain and not bool(parameter.any())


def identity(model: Model) -> tuple[object, ...]:
    """Return what decides which function of its weights a model computes.

    Modules count by their classes, and hooks by the numbers that torch gives them, which are
    never given again.
    """
    device = model.device.type
    tables = [getattr(nn.modules.module, f"_global{table}") for table in _TABLES]
    modules = list(model.modules())
    configs = {id(c): c for c in map(_config, modules) if c is not None}
    return (
        model.device,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.get_float32_matmul_precision(),
        *map(tuple, tables),
        *(part for config in configs.values() for part in _parts_of_config(config)),
        *(part for module in modules for part in _parts(module)),
    )


def _config(module: nn.Module) -> Any:
    config = vars(module).get("config")
    return config if isinstance(config, PretrainedConfig) else None


def _parts_of_config(config: Any) -> Iterator[object]:
    yield config.to_json_string(use_diff=False)
    name = config._attn_implementation
    yield name
    # functions may be registered anew under the same name
    yield ALL_ATTENTION_FUNCTIONS.get(name)
    yield ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def _parts(module: nn.Module) -> Iterator[object]:
    own, kind = vars(module), type(module)
    yield kind
    for name in _METHODS:  # in the class, or put before it
        yield getattr(own.get(name), "__func__", own.get(name))
        yield getattr(kind, name, None)
    for table in _TABLES:
        yield tuple(own[table])
    for parameter in module._parameters.values():
        yield parameter is not None and (type(parameter), parameter.dtype)
