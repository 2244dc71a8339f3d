"""Transformers' logits processors and stopping criteria, for each row on that row's own text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from outrider.core import Unsupported

_PROCESSORS = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""What our sampling parameters can express, in the order in which they are applied.

For each the attribute that holds its value, and the parameter."""

_PLAIN = {"filter_value": -math.inf, "min_tokens_to_keep": 1, "prompt_ignore_length": None}
"""Other attributes of these, and the value that our parameters assume."""

_REFUSED = {
    (MaxTimeCriteria, UnbatchedClassifierFreeGuidanceLogitsProcessor): "remembers its calls",
    (
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
    ): "is made for all rows of a batch at once",
}
"""What cannot run on one row, or on drafts that are not kept, and why."""


class OwnRows:
    """What a call's processors and criteria do to one row, as sampling parameters.

    Processors that parameters can express become parameters. If there are others, all of them run
    as they are, in their order, on the row's own text: its tokens as they were given, padding
    included, its output, and the drafts that lead to a position.
    """

    def __init__(
        self, processors: Sequence[Any], criteria: Sequence[Any], do_sample: bool | None
    ) -> None:
        self.processors, self.do_sample = processors, bool(do_sample)
        self.criteria = [
            c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        ]
        for given in (*processors, *self.criteria):
            for kinds, why in _REFUSED.items():
                if isinstance(given, kinds):
                    raise Unsupported(
                        f"{type(given).__name__} in custom_generate, which {why}",
                        fix="leave it out",
                    )

    def sampling(self, number: int, row: Tensor, length: int) -> dict[str, Any]:
        """Return the parameters of a row.

        number: of the row, among all
        row: [L] its input
        length: without padding
        """
        # Transformers' own counts padding tokens as part of the prompt
        looks_back = RepetitionPenaltyLogitsProcessor in map(type, self.processors)
        is_padded = length < len(row)
        found: dict[str, Any] = {"temperature": 1.0 if self.do_sample else 0.0}
        if self._expressible() and not (is_padded and looks_back):
            for processor in self.processors:
                attribute, parameter = _PROCESSORS[type(processor)]
                found[parameter] = getattr(processor, attribute)
            found["temperature"] *= self.do_sample
        else:
            own = LogitsProcessorList(self._for_row(p, number) for p in self.processors)

            def process(output: Sequence[int], logits: Tensor) -> Tensor:
                changed: Tensor = own(_text(row, output), logits[None].clone())
                return changed[0]

            found["process"] = process
        if self.criteria:
            criteria = self.criteria

            def ends(output: Sequence[int]) -> bool:
                text = _text(row, output)
                return any(bool(torch.as_tensor(c(text, None)).all()) for c in criteria)

            found["ends"] = ends
        return found

    def _expressible(self) -> bool:
        """Say whether sampling parameters do the same, in the same order."""
        order, kinds = list(_PROCESSORS), [type(processor) for processor in self.processors]
        if any(kind not in _PROCESSORS for kind in kinds):
            return False
        if any(order.index(b) <= order.index(a) for a, b in pairwise(kinds)):
            return False
        return all(
            getattr(processor, name, plain) == plain
            for processor in self.processors
            for name, plain in _PLAIN.items()
        )

    @staticmethod
    def _for_row(processor: Any, number: int) -> Any:
        """Return the processor; a function that takes the row's number is given this one."""
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, text: allowed(number, text), 1)


def _text(row: Tensor, output: Sequence[int]) -> Tensor:
    return torch.cat([row, torch.tensor(output, dtype=row.dtype, device=row.device)])[None]
