"""A draft server on a paced device of its own: what it foresees of recorded texts, and when.

    python drafts.py SOCKET PROFILE

It is `outrider draft-server`, but for its model: a pass takes what the profile says of a draft
model, and says what a real one thought likely at this place of the text. Off the text, what it says
is made up, as sure as it is elsewhere.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from outrider.core import KeyedCoins
from outrider.drafters.ahead import DraftServer
from outrider.engines.costs import PROFILES, PassCost
from paced.clock import now, sharpen_sleep, wait_until
from paced.texts import HEADER, VOCABULARY, texts

WIDTH = 32
"""Nodes of a pass: a GPU reads so many in the time of one."""

OTHERS = 64
"""Lists of tokens off the text."""

LONG, PREFILL_ROW = 128, 2e-6
"""A pass of more rows reads prompts, which are not part of what is measured."""


@dataclass
class Said:
    """A sequence: the header of its prompt, and whether it is on the recorded text.

    key: another one for each text
    """

    header: tuple[int, ...] = ()
    length: int = 0
    is_on_text: bool = True
    key: int = 0

    @property
    def place(self) -> int:
        """Which token of the output comes next."""
        _, _, high, low = self.header
        return self.length - high * VOCABULARY - low

    def read(self, token: int) -> None:
        """Append a token."""
        if self.length < HEADER:
            self.header = (*self.header, token)
        elif self.place >= 0:
            output = texts()[self.header[0]].output
            expected = (output[self.place % len(output)] + self.header[1]) % VOCABULARY
            self.is_on_text = self.is_on_text and token == expected
            self.key = hash((self.key, token))
        self.length += 1


class PacedBranches:
    """The draft model. cost: of its passes"""

    vocab_size, max_length = VOCABULARY, 1 << 30

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._tables = [_table(text.likely) for text in texts()]
        count, rng = self._tables[0][0].shape[1], random.Random(0)
        self._made_up = [rng.sample(range(VOCABULARY), count) for _ in range(OTHERS)]

    def open(self) -> Said:
        """Return an empty sequence."""
        return Said()

    def close(self, sequence: Said) -> None:
        """Do nothing."""

    def fork(self, sequence: Said) -> Said:
        """Return a branch."""
        return Said(**vars(sequence))

    def adopt(self, sequence: Said, branch: Said, others: Sequence[Said]) -> None:
        """Go on as a branch."""
        vars(sequence).update(vars(branch))

    def extend(self, segments: Sequence[tuple[Said, Sequence[int]]]) -> Tensor:
        """Return the logits after each segment, when the device would have them."""
        started, rows = now(), sum(len(tokens) for _, tokens in segments)
        contexts: dict[tuple[int, ...], int] = {}
        for sequence, tokens in segments:
            for token in tokens:
                sequence.read(token)
            # all branches of a text read its cache together
            contexts[sequence.header] = max(contexts.get(sequence.header, 0), sequence.length)
        logits = np.zeros((len(segments), VOCABULARY), np.float32)
        for row, (sequence, _) in zip(logits, segments, strict=True):
            self._say(sequence, row)
        seconds = self._cost.decode(rows, sum(contexts.values()))
        if rows > LONG:
            seconds = self._cost.fixed + PREFILL_ROW * rows
        wait_until(started + seconds)
        return torch.from_numpy(logits)

    def _say(self, sequence: Said, row: np.ndarray) -> None:
        """Write the logs of the likely tokens' chances; the others are alike."""
        if sequence.length < HEADER or sequence.place < 0:
            return
        which, shift, *_ = sequence.header
        tokens, chances, rest = self._tables[which]
        place = (sequence.place if sequence.is_on_text else sequence.key) % len(tokens)
        row[:] = rest[place]
        ids = tokens[place] if sequence.is_on_text else self._made_up[sequence.key % OTHERS]
        row[(np.asarray(ids) + shift) % VOCABULARY] = chances[place]


def _table(likely: Sequence[tuple[list[int], list[float]]]) -> tuple[np.ndarray, ...]:
    """Return of each place the likely tokens, [N, W], the logs of their chances, and of others."""
    count = max(len(ids) for ids, _ in likely)
    tokens, chances = (
        np.array([own + own[:1] * (count - len(own)) for own in column])
        for column in zip(*likely, strict=True)
    )
    rest = np.array([max(1e-6, 1 - sum(own)) for _, own in likely]) / VOCABULARY
    return tokens, np.log(np.maximum(chances, rest[:, None])), np.log(rest)


def main(socket: str, profile: str) -> None:
    """Serve until the process is told to end."""
    torch.set_num_threads(1)
    sharpen_sleep()
    model = PacedBranches(PROFILES[profile].draft)
    server = DraftServer(model, KeyedCoins(), Path(socket), name="paced", width=WIDTH)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        sys.stdout.write("draft server: paced\n")
        sys.stdout.flush()
        server.serve()
    finally:
        server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
