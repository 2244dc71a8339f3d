"""Whether Outrider's forward is the model's own: compared before a model is first used.

A model is refused, with the layer at which the difference begins, unless our passes give what its
own `generate` gives, up to rounding, on a probe of random tokens.

What the probe shows: texts of different lengths side by side, of which some end just before the
model's windows and rotary limits and go beyond them in decode and verify rows, have the logits and
hidden states of plain decoding, one text at a time. The masks that the model defines are compared
with ours at all distances, so windows longer than the probe are covered, too.

What it does not show: that other tokens have no effect of their own (image tokens, for example),
nor numeric effects that begin beyond `MAX_LENGTH` tokens and are not in the model's masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from outrider.core import Unsupported
from outrider.engines.transformers.identity import Verdicts
from outrider.engines.transformers.passes import Segment
from outrider.engines.transformers.runner import Runner
from outrider.engines.transformers.view import model_view

MAX_LENGTH = 320
"""Tokens of the longest text of the probe."""

MAX_TEXTS = 4
FOLLOWING = 4
"""Tokens after each prompt: one is decoded, the others are verified together."""

_PASSED = Verdicts.none()


def check_forward(runner: Runner) -> None:
    """Raise Unsupported unless the runner computes what its model does. Once for each model.

    A model that is changed, by a hook for example, is another one: see `identity`.
    """
    model = runner.model
    if _PASSED.hold(model, runner.exactness):
        return
    try:
        _check_masks(runner)
        _check_values(runner)
    except Unsupported:
        raise
    except Exception as error:  # of any model's code
        what = f"{type(model).__name__}, whose forward fails with several texts in a row"
        raise Unsupported(f"{what} ({error!r:.200})", fix="use another model") from error
    _PASSED.add(model, runner.exactness)


def _check_masks(runner: Runner) -> None:
    """Compare the masks that the model defines with those that our attention applies."""
    length = min(runner.max_length, 1 << 20)
    keys = torch.arange(length)
    traced = runner.trace_masks()
    for layer, (definition, window) in sorted(traced.layers.items()):
        if definition is None:
            _check_own_mask(runner, layer)
            continue
        for row in {0, min(1, length - 1), length // 2, length - 1}:
            seen = keys <= row
            if window is not None:
                seen &= keys > row - window
            zero = torch.tensor(0)
            try:
                wanted = definition(zero, zero, torch.tensor(row), keys)
            except (IndexError, RuntimeError):
                break  # it depends on the tokens of the pass: the values tell
            if not torch.equal(wanted.expand_as(seen), seen):
                at = int((wanted != seen).nonzero()[-1])
                what = "hides" if seen[at] else "shows"
                raise _refused(runner, f"layer {layer}: its mask {what} position {at} to {row}")


def _check_own_mask(runner: Runner, layer: int) -> None:
    """Refuse a mask that is made by the model itself, if the probe is too short to see its end."""
    longest = max(_windows(runner), default=0)
    if longest > _longest_text(runner):
        raise _refused(
            runner, f"layer {layer}: it makes a mask of its own, with a window of {longest}"
        )


def _windows(runner: Runner) -> list[int]:
    """Return the lengths at which attention may change, by what the configuration calls them."""
    names = ("window", "chunk_size", "original_max_position")
    config = runner.model.config.get_text_config(decoder=True)
    values = {
        value
        for name, value in config.to_dict().items()
        if any(part in name for part in names) and type(value) is int and value > 0
    }
    limits = {runner.recompute_limit, *runner.row_limits}
    return sorted(v for v in values | limits if v is not None and v < runner.max_length)


def _longest_text(runner: Runner) -> int:
    return max(1, min(MAX_LENGTH, runner.max_length) - FOLLOWING - 1)


def _texts(runner: Runner) -> list[list[int]]:
    """Return a short text, and others that end near the limits of the model, and far beyond."""
    longest = _longest_text(runner)
    limits = [limit for limit in _windows(runner) if limit + 8 <= longest]
    # a text that is read again there is two texts, of which each is in the probe
    crossed = [limit for limit in limits if limit != runner.recompute_limit]
    lengths = [5, *(limit - 1 for limit in crossed[: MAX_TEXTS - 2])]
    lengths.append(max([48, *(limit + 8 for limit in limits)]))
    special = set(_special_tokens(runner))
    usual = torch.tensor([t for t in range(runner.vocab_size) if t not in special] or [0])
    generator = torch.Generator().manual_seed(0)
    counts = [max(1, min(length, longest)) + FOLLOWING for length in dict.fromkeys(lengths)]
    chosen = [torch.randint(len(usual), (count,), generator=generator) for count in counts]
    return [usual[places].tolist() for places in chosen]


def _special_tokens(runner: Runner) -> Iterator[int]:
    for name, value in runner.model.config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            yield from value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class _Found:
    """What a text's rows have: logits from the prompt's last on, and all hidden states.

    logits: [1 + FOLLOWING, V]
    hidden: [tokens, layers, H], or nothing if the model does not give it
    """

    logits: Tensor
    hidden: Tensor | None


def _check_values(runner: Runner) -> None:
    texts = _texts(runner)
    plain = [_plain(runner, text) for text in texts]
    ours = _ours(runner, texts, with_hidden=plain[0].hidden is not None)
    tolerance = _Tolerance.of(runner.model.dtype)
    for text, own, found in zip(texts, plain, ours, strict=True):
        prompt = len(text) - FOLLOWING
        spans = {"prompt": (0, prompt), "decode": (prompt, prompt + 1)}
        spans["verify"] = (prompt + 1, len(text))
        if tolerance.quantile < 1:  # most rows of a few say more than a single one
            spans = {"prompt": (0, prompt), "decode and verify": (prompt, len(text))}
        for kind, (start, end) in spans.items():
            where = f"in {kind} rows of a text of {len(text)} tokens"
            if own.hidden is not None and found.hidden is not None:
                off = tolerance.excess(found.hidden[start:end], own.hidden[start:end], first=0)
                if off:
                    begins = f"layer {off[0] - 1}" if off[0] else "the embedding"
                    raise _refused(runner, f"{begins}: hidden states {where} differ by {off[1]}")
            rows = slice(max(0, start - prompt + 1), end - prompt + 1)
            off = tolerance.excess(
                found.logits[rows, None], own.logits[rows, None], first=runner.num_layers + 1
            )
            if off:
                raise _refused(runner, f"its logits {where} differ by {off[1]}")


@dataclass(frozen=True)
class _Tolerance:
    """How far values may differ by rounding, as a part of the row's norm.

    In 32 bits every row counts. With fewer bits a mixture may choose another expert for a row,
    which is then far off: the median of the rows counts.
    """

    eps: float
    quantile: float

    @staticmethod
    def of(dtype: torch.dtype) -> _Tolerance:
        eps = torch.finfo(dtype).eps
        if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            eps = torch.finfo(torch.float16).eps
        return _Tolerance(eps, 1.0 if eps < 1e-5 else 0.5)

    def excess(self, ours: Tensor, own: Tensor, first: int) -> tuple[int, str] | None:
        """Return the first layer that is off by more than rounding, and how far it is, if any is.

        ours, own: [rows, layers, values] of the layers from `first` on
        """
        if ours.shape != own.shape or not torch.equal(ours.isfinite(), own.isfinite()):
            return first, "their form, or NaN"
        ours, own = ours.float().nan_to_num(0, 0, 0), own.float().nan_to_num(0, 0, 0)
        off = (ours - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-30)
        for layer, worst in enumerate(
            off.quantile(self.quantile, dim=0, interpolation="lower").tolist(), first
        ):
            if worst > max(1e-3, 4 * self.eps * (layer + 1) ** 0.5):
                return layer, f"{worst:.2g} of their size"
        return None


class _Forced(LogitsProcessor):
    """Makes `generate` emit a given text."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.text[length] if length < len(self.text) else 0] = 0
        return forced


@torch.inference_mode()
def _plain(runner: Runner, text: list[int]) -> _Found:
    """Return what the model's own `generate` computes for a text, alone."""
    config = GenerationConfig(
        max_new_tokens=FOLLOWING + 1,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=True,
        disable_compile=True,
    )
    ids = torch.tensor([text[: len(text) - FOLLOWING]], device=runner.model.device)
    view = model_view(runner.model)
    view.generation_config = config
    try:
        out: Any = view.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=[_Forced(text)],
        )
    except Exception as error:  # of any model
        what = f"{type(runner.model).__name__}, whose own generate fails ({error!r:.200})"
        raise Unsupported(what, fix="check the model: call generate without Outrider") from error
    logits = torch.cat(list(out.logits))
    steps = out.hidden_states
    # some models give none, or states of another form
    if not steps or not all(
        step and all(state is not None and state.dim() == 3 for state in step) for step in steps
    ):
        return _Found(logits, None)
    hidden = torch.cat([torch.stack([state[0] for state in step], 1) for step in steps])
    complete = hidden.shape[1] == runner.num_layers + 1 and len(hidden) == len(text)
    return _Found(logits, hidden if complete else None)


def _ours(runner: Runner, texts: list[list[int]], with_hidden: bool) -> list[_Found]:
    """Return what our passes compute: all prompts together, a decoded token each, the others."""
    layers = range(runner.num_layers + 1) if with_hidden else ()
    sequences = [runner.open() for _ in texts]
    logits: list[list[Tensor]] = [[] for _ in texts]
    hidden: list[list[Tensor]] = [[] for _ in texts]
    for start, end in pairwise([0, -FOLLOWING, 1 - FOLLOWING, None]):
        segments = []
        for sequence, text in zip(sequences, texts, strict=True):
            tokens = text[start:end]
            first = len(tokens) - 1 if start == 0 else 0
            segments.append(Segment(sequence, tokens, logits_from=first))
        found, states = runner.run_with_hidden(segments, layers)
        counts = [len(segment.tokens) - segment.logits_from for segment in segments]
        for i, part in enumerate(found.split(counts)):
            logits[i].append(part)
            hidden[i].append(states[i])
            runner.pool.keep(sequences[i], range(len(segments[i].tokens)))
    for sequence in sequences:
        runner.close(sequence)
    return [
        _Found(torch.cat(own), torch.cat(states) if with_hidden else None)
        for own, states in zip(logits, hidden, strict=True)
    ]


def _refused(runner: Runner, what: str) -> Unsupported:
    return Unsupported(
        f"{type(runner.model).__name__}, which computes something else than Outrider from {what}",
        fix="use another model, or call generate without Outrider",
    )
