"""The host's grammars, asked about drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from torch import Tensor


def can_roll_back(grammar: Any) -> bool:
    """Say whether a grammar can be asked about drafts: some backends cannot go back."""
    return type(grammar).rollback is not BaseGrammarObject.rollback


class RowGrammar:
    """A request's grammar as it would be after the drafts on a row's path."""

    def __init__(self, grammar: Any, path: Sequence[int]) -> None:
        self._grammar, self._path = grammar, path
        self.finished = grammar.finished
        self.allocate_vocab_mask = grammar.allocate_vocab_mask
        self.apply_vocab_mask = grammar.apply_vocab_mask
        self.move_vocab_mask = grammar.move_vocab_mask

    def is_terminated(self) -> bool:
        """Let the host ask for a mask: `fill_vocab_mask` looks."""
        return False

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        """Write the mask of the tokens that may follow the path, if the path itself may be."""
        with self._after_path() as possible:
            if possible and not self._grammar.is_terminated():
                self._grammar.fill_vocab_mask(vocab_mask, idx)

    def fill_vocab_mask_batched(self, rows: Sequence[Any], vocab_mask: Tensor) -> None:
        """Write the masks of several rows; each has its own grammar."""
        for entry in rows:
            entry.grammar.fill_vocab_mask(vocab_mask, entry.row)

    @contextmanager
    def _after_path(self) -> Iterator[bool]:
        accepted = 0
        try:
            for token in self._path:
                if self._grammar.is_terminated():
                    break
                self._grammar.accept_token(token)
                accepted += 1
        except ValueError:
            pass  # no such text: the target cannot agree with this draft, nor reach the row
        try:
            yield accepted == len(self._path)
        finally:
            if accepted:
                self._grammar.rollback(accepted)
