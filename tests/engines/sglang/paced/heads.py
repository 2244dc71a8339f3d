"""A head on the paced device: what a real one said of recorded texts, and when.

A state is no activation here. It says where in its text a token stands: the text's number, the
shift of its ids, the output token that comes next, and the depth: how many passes of the head lie
between it and a state of the target; -1 where drafts have left the text. So a head that is given
the wrong states, or reads them in the wrong order, drafts other tokens, as a real one does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.heads import head_layers, head_shape, read_config
from paced import work
from paced.clock import real
from paced.tensor import Timed
from paced.texts import VOCABULARY, texts

STATE = 4
"""Numbers of a state that mean something."""

_plain = torch._C.DisableTorchFunctionSubclass


class PacedHead:
    """Stands for a head that is loaded from a directory.

    enqueue: queues a pass of so many rows, and returns when it is done
    wait: how to wait for that
    note_launch: is told of a pass's end, and when it began, in real time
    """

    name = "eagle3"

    def __init__(
        self,
        folder: Path,
        num_layers: int,
        enqueue: Callable[[int], float],
        wait: Callable[[float], None],
        note_launch: Callable[[float], None],
    ) -> None:
        found = read_config(folder)
        self.config = head_shape(found, str(folder))
        self.hidden_layers = head_layers(found, num_layers)
        self._enqueue, self._wait, self._note_launch = enqueue, wait, note_launch
        self._tokens, self._logs, self._rest = _tables()
        longest = max(len(text.output) for text in texts())
        self._output = np.zeros((len(texts()), longest), np.int64)
        for own, text in zip(self._output, texts(), strict=True):
            own[: len(text.output)] = text.output

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights: their type is that of the states."""
        return {"fc.weight": torch.zeros(1)}

    def reduce(self, states: Tensor) -> Tensor:
        """Return what is kept of the target's states, [n, layers, H] -> [n, H]."""
        return states[:, 0].float()

    def __call__(self, tokens: Tensor, x: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """Queue a pass. Return the states that follow, [N, H]."""
        since, ready = real(), self._enqueue(len(tokens))
        with _plain():
            which, shift, place, depth = x.numpy()[:, :STATE].astype(np.int64).T
            at = np.minimum(np.maximum(place, 0), self._output.shape[1] - 1)
            expected = (self._output[which, at] + shift) % VOCABULARY
            on_text = (depth >= 0) & ((place < 0) | (tokens.numpy() == expected))
            states = np.zeros(x.shape, np.float32)
            states[:, 0], states[:, 1], states[:, 2] = which, shift, place + 1
            states[:, 3] = np.where(on_text, depth + 1, -1)
            made = Timed.of(torch.from_numpy(states), ready, self._wait)
        self._note_launch(since)
        return made

    def logits(self, states: Tensor) -> Tensor:
        """Return the logs of the likely tokens' chances; the others are alike, [N, V]."""
        since, books = real(), work.current()
        with _plain():
            which, shift, place, depth = states.numpy()[:, :STATE].astype(np.int64).T
            _, far, deep, count = self._tokens.shape
            known = (depth > 0) & (depth <= deep) & (place >= 0) & (place < far)
            at = np.where(known, (which * far + place) * deep + depth - 1, 0)
            ids = self._tokens.reshape(-1, count)[at]
            if not known.all():
                made_up = 97 * (31 * place + 7 * which)[:, None] + np.arange(count)
                ids = np.where(known[:, None], ids, made_up)
            logits = np.empty((len(at), VOCABULARY), np.float32)
            logits[:] = self._rest.ravel()[at][:, None]
            rows = np.arange(len(at))[:, None]
            logits[rows, (ids + shift[:, None]) % VOCABULARY] = self._logs.reshape(-1, count)[at]
            ready = states.ready if isinstance(states, Timed) else 0.0
            if books is not None:  # its kernels are among the pass's
                books.book("head_decode", since, 0)
            return Timed.of(torch.from_numpy(logits), ready, self._wait)


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of each text, place and depth the likely tokens, logs of chances, and of others."""
    said = [text.head for text in texts()]
    depth = max(len(depths) for head in said for depths in head)
    count = max(len(ids) for head in said for depths in head for ids, _ in depths)
    shape = len(said), max(map(len, said)), depth
    tokens = np.zeros((*shape, count), np.int64)
    tokens[:] = VOCABULARY - 1 - np.arange(count)  # what was not said is no token of a text
    chances = np.full((*shape, count), 0.1)
    for text, head in enumerate(said):
        for place, depths in enumerate(head):
            for deep, (ids, own) in enumerate(depths):
                tokens[text, place, deep], chances[text, place, deep] = ids, own
    rest = np.maximum(1e-6, 1 - chances.sum(-1)) / VOCABULARY
    logs = np.log(np.maximum(chances, rest[..., None]))
    return tokens, logs.astype(np.float32), np.log(rest).astype(np.float32)
