"""The host protocol on a Transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from outrider.core import Outcome, Proposal, Request, Unsupported
from outrider.engines.exactness import Exactness
from outrider.engines.transformers.passes import Segment
from outrider.engines.transformers.pool import CachedSequence
from outrider.engines.transformers.probe import check_forward
from outrider.engines.transformers.runner import Runner


class TransformersHost:
    """Runs a target model over requests and their drafts, and keeps the cache in step."""

    def __init__(self, model: PreTrainedModel, exactness: Exactness = "lossless") -> None:
        self.runner = Runner(model, exactness)
        check_forward(self.runner)
        self._sequences: dict[int, CachedSequence] = {}
        self._hidden_layers: tuple[int, ...] = ()
        self._hidden: dict[int, Tensor] = {}  # of each request's rows in the last pass
        self._again: set[int] = set()  # the requests that were read again in the last pass

    def read_hidden(self, layers: Sequence[int]) -> None:
        """Capture the hidden states of these layers from now on, for `with_hidden`."""
        last = self.runner.num_layers
        if any(not 0 <= layer <= last for layer in layers):
            raise Unsupported(
                f"hidden states of layers {tuple(layers)}", fix=f"choose from 0 to {last}"
            )
        self._hidden_layers = tuple(layers)

    def room(self, request: Request) -> int:
        """Return how many drafts the request may have in the next step, if the model has a limit.

        The pass in which plain decoding reads the request again, and those that lead to it, must
        not have rows beyond it: see `rope.drops_its_cache`.
        """
        limit = self.runner.recompute_limit
        if limit is None or request.length > limit + 1:
            return request.remaining
        return max(0, limit - request.length)

    def forward(self, requests: Sequence[Request], proposal: Proposal) -> Tensor:
        """Run the target over each request's last token and drafts. Return their logits, [N, V].

        A request that comes for the first time brings its whole prompt.
        """
        drafts, parents = proposal.tokens.tolist(), proposal.parents.tolist()
        segments = []
        for r, request in enumerate(requests):
            sequence = self._sequences.setdefault(request.id, self.runner.open())
            if self._is_read_again(request, sequence):
                self.runner.close(sequence)
                self._again.add(request.id)
            unread = request.tokens_from(sequence.length)
            own = slice(proposal.starts[r], proposal.starts[r + 1])
            segments.append(_segment(sequence, unread, drafts[own], parents[own]))
        logits, hidden = self.runner.run_with_hidden(segments, self._hidden_layers)
        if self._hidden_layers:
            self._hidden = {r.id: states for r, states in zip(requests, hidden, strict=True)}
        return logits

    def _is_read_again(self, request: Request, sequence: CachedSequence) -> bool:
        limit = self.runner.recompute_limit
        return limit is not None and 0 < sequence.length <= limit < request.length

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the cache entries of the rows that were kept, and drop the others."""
        for outcome in outcomes:
            sequence = self._sequences[outcome.request.id]
            sequence.length = outcome.request.length - 1
            self.runner.pool.keep(sequence, outcome.rows)

    def with_hidden(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Return the outcomes of the last pass with the hidden states of what was kept."""
        again, self._again = self._again, set()
        if not self._hidden_layers:
            return outcomes
        states, self._hidden = self._hidden, {}  # a prompt's are large: keep them no longer
        kept = {o.request.id: _kept(states[o.request.id], o) for o in outcomes}
        # a drafter has the states that it was given before
        kept |= {
            o.request.id: kept[o.request.id][-len(o.rows) :]
            for o in outcomes
            if o.request.id in again
        }
        return [replace(o, hidden=kept[o.request.id]) for o in outcomes]

    def release(self, requests: Sequence[Request]) -> None:
        """Give the slots of these requests back."""
        for request in requests:
            if sequence := self._sequences.pop(request.id, None):
                self.runner.close(sequence)


def _kept(states: Tensor, outcome: Outcome) -> Tensor:
    """Return the states of a request's rows up to its root, and of the kept ones beyond."""
    root = len(states) - 1 - outcome.num_drafts
    return states[[*range(root), *(root + row for row in outcome.rows)]]


def _segment(
    sequence: CachedSequence, unread: list[int], drafts: list[int], parents: Sequence[int]
) -> Segment:
    """Return the segment of a request: what is unread, the last token as root, then the drafts."""
    root = len(unread) - 1
    shifted = [*range(-1, root), *(root + 1 + parent for parent in parents)]
    return Segment(sequence, [*unread, *drafts], parents=shifted, logits_from=root)
